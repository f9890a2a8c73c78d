"""Gate statistics in either form: gates.json, or the files that the authors of 2212.09811 published.

Those lie at github.com/naver/nllb-pruning. Their lists are flat: 1536 values = 12 sparse layers x 128 experts, encoder
layers first. A statistic is a ratio, so each entry is read as the sums over one token; several are averaged
(`gates.combine`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import StatisticsError
from prunecli.results.arrays import checked_array
from prunecli.results.gate_sums import SUMS, Array, GateSums
from prunecli.results.gates import GateStatistics, split_pair
from prunecli.tensors.json_files import read_json

NLLB_200_LAYERS = tuple(
    f"model.{side}.layers.{layer}.ffn" for side in ("encoder", "decoder") for layer in range(3, 24, 4)
)
"""The sparse layers of NLLB-200 54.5B."""
NLLB_200_EXPERTS = 128
TOP_K = 2
FIELDS = {"top1": "top1", "top2": "top2", "gate_sum": "mean", "conf1_sum": "conf1", "conf2_sum": "conf2"}
"""Name of a sum -> field of a published entry. `top2` is the share of tokens that rank the expert second."""


def read_gates(
    path: Path, layers: Sequence[str] | None = None, num_experts: int | None = None
) -> GateStatistics:
    """Read a gates.json, or statistics that the paper's authors published.

    Those are `{pair: {"top1": [...], "conf1": [...], "mean": [...]}}`; pairs are named SRC-TGT, SRC-X or X-TGT.

    Args:
        path: the file.
        layers: names of the model's sparse layers, which a published file does not give; default: those of
            NLLB-200 54.5B.
        num_experts: experts of an original layer, likewise; default 128.

    Raises:
        StatisticsError: missing, cut short, not statistics, misshapen, with values that no run could give.
    """
    payload = read_json(path)
    if not isinstance(payload, dict):
        raise StatisticsError(f"{path}: no gate statistics.", "A list of expert ids goes with --keep.")
    if "format" in payload:
        return GateStatistics.from_json(payload, path)
    names = NLLB_200_LAYERS if layers is None else tuple(layers)
    experts = NLLB_200_EXPERTS if num_experts is None else num_experts
    for pair, entry in payload.items():
        if (
            not isinstance(entry, Mapping)
            or not all(split_pair(pair))
            or not set(entry) & set(FIELDS.values())
        ):
            raise StatisticsError(
                f"{path}: neither a gates.json nor published gate statistics ({pair!r} fits neither).",
                "Give a file that `collect-gates` wrote.",
            )
    if not payload:
        raise StatisticsError(f"{path}: no language pairs.", "Give a file that `collect-gates` wrote.")
    lacks = frozenset(
        name for name, field in FIELDS.items() if any(field not in entry for entry in payload.values())
    )
    entries = {
        pair: _entry(entry, lacks, (len(names), experts), f"{path}: {pair}")
        for pair, entry in payload.items()
    }
    return GateStatistics(None, None, "published", names, experts, TOP_K, entries, lacks)


def _entry(entry: Mapping[str, Any], lacks: frozenset[str], shape: tuple[int, int], where: str) -> GateSums:
    sums: dict[str, Array] = {"tokens": np.ones(shape[0])}
    for name, field in FIELDS.items():
        if name in lacks:
            sums[name] = np.zeros(shape)
        else:
            if isinstance(entry[field], list) and len(entry[field]) != shape[0] * shape[1]:
                raise StatisticsError(
                    f"{where}: {field} holds {len(entry[field])} values; the model has "
                    f"{shape[0]} sparse layers x {shape[1]} experts = {shape[0] * shape[1]}.",
                    "The authors' files are for NLLB-200 54.5B (12 x 128); collect the gates of this model.",
                )
            flat = checked_array(entry[field], (shape[0] * shape[1],), f"{where}: {field}")
            sums[name] = flat.reshape(shape)
    for rank in ("1", "2"):  # a mean over the tokens of this rank, back to the sum over them
        sums[f"conf{rank}_sum"] = sums[f"conf{rank}_sum"] * sums[f"top{rank}"]
    return GateSums(**{name: sums[name] for name in SUMS})
