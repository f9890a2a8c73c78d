"""From the hidden states of a text's tokens to its vector, as a sentence-transformers model says it.

Known are the modules Pooling, Dense, Normalize and Dropout, in `modules.json` beside or above the transformer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.progress import Say, unsaid
from prunecli.tensors.directory import find_weights
from prunecli.tensors.json_files import read_json, read_object
from prunecli.tensors.reader import TensorReader
from prunecli.tensors.side_files import MODULES_FILE, module_folder

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Key of an older Pooling's config.json -> what newer ones call it under `pooling_mode`."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU")
"""Classes of torch that a Dense may name."""


Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Dense:
    """A linear layer with its activation; `weight` `[out, in]`, `bias` `[out]`."""

    weight: Tensor
    bias: Tensor | None
    activation: Step

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return `[texts, out]` of `[texts, in]`.

        Raises:
            CheckpointError: the vectors have another width.
        """
        if vectors.shape[1] != self.weight.shape[1]:
            raise CheckpointError(
                f"a Dense module of {MODULES_FILE} reads vectors of {self.weight.shape[1]} numbers, the one before it "
                f"gives {vectors.shape[1]}",
                "Copy the model's files again.",
            )
        bias = None if self.bias is None else self.bias.to(vectors.device)
        return self.activation(functional.linear(vectors, self.weight.to(vectors.device), bias))


@dataclass(frozen=True)
class Pooling:
    """How a model makes one vector of a text.

    Attributes:
        modes: kinds of pooling; the results of several lie side by side.
        steps: what is done with the vectors then, one after another.
        max_tokens: longest text, cut there; if None, what the model takes.
        lower_case: whether texts are lower-cased first.
        prompt: what is put before each text.
    """

    modes: tuple[str, ...] = ("mean",)
    steps: tuple[Step, ...] = ()
    max_tokens: int | None = None
    lower_case: bool = False
    prompt: str = ""

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """A vector for each text.

        Args:
            hidden: `[texts, tokens, width]`, of the last layer.
            mask: `[texts, tokens]`, 1 where there is a token.

        Returns:
            `[texts, width of a vector]` float32, on the device of `hidden`.

        Raises:
            CheckpointError: a linear layer reads vectors of another width.
        """
        hidden, real = hidden.float(), mask.to(hidden.device)[..., None].float()
        vectors = torch.cat([_POOLED[mode](hidden, real) for mode in self.modes], dim=1)
        for step in self.steps:
            vectors = step(vectors)
        return vectors

    def width(self, hidden_size: int) -> int:
        """Return the width of a vector if the hidden states have `hidden_size`."""
        return self(torch.zeros(1, 1, hidden_size), torch.ones(1, 1)).shape[1]


def read_pooling(directory: Path, say: Say = unsaid) -> Pooling:
    """Read the pooling of the model in `directory` from its `modules.json`, or from one above that names the folder.

    Args:
        say: hears how texts are pooled where the model does not say it.

    Raises:
        CheckpointError: a file that cannot be read, or says what cannot be.
        UnsupportedModelError: a module or a kind of pooling that is not known.
    """
    found = modules_of(directory)
    if found is None:
        say(f"{directory}: no {MODULES_FILE} says how texts are pooled; by the mean of their tokens.")
        return Pooling()
    home, entries = found
    modes: tuple[str, ...] = ("mean",)
    steps: list[Step] = []
    stated = model_settings(home)
    prompt = (stated.get("prompts") or {}).get(stated.get("default_prompt_name"), "")
    for entry in entries:
        kind = str(entry["type"]).rpartition(".")[2]
        folder = home / _folder_of(entry, home)
        config = folder / "config.json"
        settings = read_object(config) if kind != "Transformer" and config.is_file() else {}
        names = {settings.get(f"module_{end}_name") for end in ("input", "output")}
        if settings.get("use_residual") or not names <= {None, "sentence_embedding"}:
            raise UnsupportedModelError(
                f"{config}: a {kind} of tokens, or around which vectors go, is not known"
            )
        if prompt and settings.get("include_prompt") is False:
            raise UnsupportedModelError(f"{config}: a {kind} without the tokens of the prompt is not known")
        if kind == "Pooling":
            named = settings.get("pooling_mode")
            if named is None:
                named = [mode for key, mode in MODES.items() if settings.get(key) is True]
            modes = tuple(map(str, named if isinstance(named, list) else [named]))
            if not modes or not _POOLED.keys() >= {*modes}:
                shown = ", ".join(modes) or "nothing"
                raise UnsupportedModelError(f"{config}: pooling by {shown} is not known")
        elif kind == "Dense":
            steps.append(_dense(folder, settings))
        elif kind == "Normalize":
            steps.append(functional.normalize)
        elif kind not in ("Transformer", "Dropout"):
            raise UnsupportedModelError(f"{home / MODULES_FILE}: a module of the kind {kind} is not known")
    lengths = next(iter(sorted(directory.glob("sentence_*_config.json"))), None)
    settings = {} if lengths is None else read_object(lengths)
    longest = settings.get("max_seq_length")
    return Pooling(
        modes,
        tuple(steps),
        longest if type(longest) is int and longest > 0 else None,
        settings.get("do_lower_case") is True,
        prompt,
    )


def model_settings(home: Path) -> dict[str, Any]:
    """The settings of the sentence-transformers model in a folder: its prompts; empty where it has none."""
    path = home / "config_sentence_transformers.json"
    return read_object(path) if path.is_file() else {}


def modules_of(directory: Path) -> tuple[Path, list[Mapping[str, Any]]] | None:
    """The folder whose `modules.json` has the transformer in `directory`, and the modules; None: there is none.

    Raises:
        CheckpointError: one that cannot be read.
    """
    for home in (directory, directory.parent):
        if not (home / MODULES_FILE).is_file():
            continue
        entries = read_json(home / MODULES_FILE, error=CheckpointError)
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and "type" in entry for entry in entries
        ):
            raise CheckpointError(f"{home / MODULES_FILE}: is no list of modules", "Copy the file again.")
        if any((home / _folder_of(entry, home)).resolve() == directory.resolve() for entry in entries):
            return home, entries
    return None


def _folder_of(entry: Mapping[str, Any], home: Path) -> str:
    folder = module_folder(entry.get("path", ""))
    if folder is None:
        raise CheckpointError(
            f"{home / MODULES_FILE}: {entry['path']!r} is no folder below it",
            "Correct the path of the module.",
        )
    return folder


def _dense(folder: Path, settings: Mapping[str, Any]) -> Step:
    name = str(settings.get("activation_function", "Identity")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{folder / 'config.json'}: the activation {name} is not known")
    with TensorReader(folder, find_weights(folder)) as held:
        found = {name: torch.from_numpy(held.read(name).astype(np.float32)) for name in held.tensors}
    weight, bias = found.get("linear.weight"), found.get("linear.bias")
    if (
        weight is None
        or weight.dim() != 2
        or not weight.numel()
        or (bias is not None and len(bias) != len(weight))
    ):
        raise CheckpointError(f"{folder}: its tensors are no weight and bias", "Copy the files again.")
    return Dense(weight, bias, getattr(nn, name)())


def _at(hidden: Tensor, places: Tensor) -> Tensor:
    """Return each text's token at the largest of its `places` `[texts, tokens]`."""
    return hidden[torch.arange(len(hidden), device=hidden.device), places.argmax(dim=1)]


def _mean(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1)


def _numbered(mask: Tensor) -> Tensor:
    """Return n for the n-th place of a row, 0 where there is no token."""
    return mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)[None, :, None]


_POOLED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    # If texts are filled up on the left, the first token is not the first one of the row.
    "cls": lambda hidden, mask: _at(hidden, mask[..., 0]),
    "mean": _mean,
    "max": lambda hidden, mask: hidden.masked_fill(mask == 0, -torch.inf).amax(dim=1),
    "mean_sqrt_len_tokens": lambda hidden, mask: _mean(hidden, mask) * mask.sum(dim=1).sqrt(),
    "weightedmean": lambda hidden, mask: _mean(hidden, _numbered(mask)),
    "lasttoken": lambda hidden, mask: _at(hidden, _numbered(mask)[..., 0]),
}
"""Mode -> function from `[texts, tokens, width]` and `[texts, tokens, 1]` to `[texts, width]`."""
