"""Sums of experts' outputs, in a file beside gates.json: with the tokens that it counts they give mean outputs.

Symbols: f is an expert's output before the router's weight. Ids of experts are the original ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, reason_of
from prunecli.tensors.transaction import new_file

FORMAT = "prunecli.outputs/1"
REMEDY = "Collect again with --mean-outputs."


@dataclass(frozen=True)
class OutputSums:
    """The file's content.

    Attributes:
        fingerprint: of the checkpoint that was run.
        sums: text's name, layer's name -> `[experts, width]` float64, sum of f over the tokens routed to an expert.
    """

    fingerprint: str
    sums: Mapping[tuple[str, str], NDArray[np.float64]]

    @classmethod
    def of(
        cls, fingerprint: str, parts: Sequence[Mapping[tuple[str, str], NDArray[np.float64]]]
    ) -> OutputSums:
        """Those of several processes, added up."""
        keys = sorted({key for part in parts for key in part})
        return cls(
            fingerprint, {key: np.sum([part[key] for part in parts if key in part], axis=0) for key in keys}
        )

    def write(self, path: Path) -> None:
        """Replace the file at once."""
        from safetensors.numpy import save

        tensors = {
            f"{text}/{layer}": np.ascontiguousarray(values) for (text, layer), values in self.sums.items()
        }
        with new_file(path) as temporary:
            temporary.write_bytes(save(tensors, {"format": FORMAT, "fingerprint": self.fingerprint}))

    @classmethod
    def read(cls, path: Path) -> OutputSums:
        """The file's content.

        Raises:
            StatisticsError: there is none, it is damaged or of another format.
        """
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise StatisticsError(f"{path}: no such file", REMEDY)
        try:
            with safe_open(path, framework="np") as file:
                metadata: Mapping[str, Any] = file.metadata() or {}
                # By the header: numpy has no bfloat16, nor other types of fewer bits.
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
                tensors = {name: file.get_tensor(name) for name, kind in kinds.items() if kind == "F64"}
                sums = {(name.rpartition("/")[0], name.rpartition("/")[2]): tensors[name] for name in tensors}
        except (SafetensorError, OSError, ValueError) as error:
            raise StatisticsError(f"{path}: is damaged ({reason_of(error)})", REMEDY) from error
        sound = (values.ndim == 2 and np.isfinite(values).all() for values in sums.values())
        if metadata.get("format") != FORMAT or len(sums) < len(kinds) or not all(sound):
            raise StatisticsError(f"{path}: holds no sums of outputs", REMEDY)
        return cls(str(metadata.get("fingerprint")), sums)


def outputs_path(statistics: Path) -> Path:
    """Where the sums lie that belong to a gates.json."""
    return statistics.with_name(f"{statistics.stem}.outputs.safetensors")


def added(parts: Sequence[OutputSums], texts: Sequence[str], layer: str) -> NDArray[np.float64]:
    """`[experts, width]`: the sums of a layer over some texts of several files.

    Raises:
        StatisticsError: none of them holds a text, or they are of different widths.
    """
    found = []
    for text in texts:
        own = [part.sums[text, layer] for part in parts if (text, layer) in part.sums]
        if not own:
            raise StatisticsError(f"No sums of outputs of the text {text!r} in {layer}.", REMEDY)
        found += own
    if len({values.shape for values in found}) > 1:
        raise StatisticsError(f"Sums of outputs of {layer} are of different shapes.", REMEDY)
    total: NDArray[np.float64] = np.sum(found, axis=0)
    return total
