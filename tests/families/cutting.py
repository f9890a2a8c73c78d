"""Tiny models of found families, cut along their axes by prunecli and compared with themselves masked."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prunecli.errors import PruneError
from prunecli.model.axes import Axis, Kind
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.stock import uniform_heads
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from prunecli.selection.selection import Selection
from tests.families import tiny

KINDS: tuple[Kind, ...] = ("layer", "unit", "head")


def saved(model_type: str, directory: Path, head: str | None = None) -> PreTrainedModel:
    """A tiny model, written to `directory`."""
    model = tiny.build(model_type, head=head)
    model.save_pretrained(directory)
    return model


def axes_found(checkpoint: Checkpoint) -> dict[Kind, list[Axis]]:
    """Kind -> axes along which the result can be a stock model; without kinds that are refused."""
    found: dict[Kind, list[Axis]] = {}
    for kind in KINDS:
        try:
            axes = [axis for axis in axes_of(checkpoint, kind) if axis.carriers or axis.members]
            if axes and (kind != "head" or uniform_heads(checkpoint)):
                found[kind] = axes
        except PruneError:
            continue
    return found


def kept_of(checkpoint: Checkpoint, axes: Sequence[Axis], layer: int) -> dict[str, tuple[int, ...]]:
    """Half of the units of each axis of one kind, by chance but the same number in each; all layers but one."""
    generator = torch.Generator().manual_seed(3)
    kept = {}
    for axis in axes:
        if axis.kind == "layer":
            gone = layer % len(axis.ids)
            kept[axis.name] = tuple(one for one in axis.ids if one != gone or len(axis.ids) < 2)
            continue
        held = len(axis.ids)
        able = uniform_heads(checkpoint) if axis.kind == "head" else range(1, held + 1)
        count = max(number for number in able if number <= max(held // 2, 1))
        drawn = torch.randperm(held, generator=generator)[:count].tolist()
        kept[axis.name] = tuple(axis.ids[place] for place in sorted(drawn))
    return kept


def apart(
    model: PreTrainedModel, checkpoint: Checkpoint, axes: Sequence[Axis], output: Path, layer: int = 1
) -> float:
    """Largest difference between the cut model's logits and those of the masked one, over these' spread.

    Args:
        axes: to be cut together.
        output: where the result is written.
        layer: that goes of each stack, where stacks are among the axes.

    Raises:
        PruneError: prunecli refuses.
    """
    kept = kept_of(checkpoint, axes, layer)
    apply(checkpoint, cut(checkpoint, Selection(kept, step={"command": "test"})), output)
    reduced = type(model).from_pretrained(output).eval()
    state = {
        name: value.clone()
        for name, value in revert_weight_conversion(model, dict(model.state_dict())).items()
    }
    skipped, found = [], checkpoint.require_architecture().found
    for axis in axes:
        gone = [place for place, unit in enumerate(axis.ids) if unit not in kept[axis.name]]
        if axis.kind == "layer":
            (stack,) = [one for one in found.layers if axis.members.startswith(f"{one.prefixes[0]}.")]
            skipped += [f"{stack.modules[0]}.{place}" for place in gone]
        for name, carrier in axis.carriers.items():
            if carrier.dim == 1:  # what the units write is masked where it is read
                width = state[name].shape[1] // len(axis.ids)
                columns = [place * width + column for place in gone for column in range(width)]
                state[name][:, columns] = 0
    held = {name: value for name, value in state.items() if name in checkpoint.tensors}
    other = type(model).from_pretrained(None, config=model.config, state_dict=held).eval()
    rows = tiny.inputs(other)
    for name in skipped:
        # The layers stay in their lists: many classes look up by position what else a layer is given.
        other.get_submodule(name).register_forward_hook(_hand_on, with_kwargs=True)
    expected = logits(other, rows)
    return float((expected - logits(reduced, rows)).abs().max() / expected.std())


def outcome(model_type: str, directory: Path) -> dict[Kind | str, str | float]:
    """Kind -> difference, or why it is refused; of each kind alone. Tokens are found, not cut."""
    model = saved(model_type, directory / "model")
    told: dict[Kind | str, str | float] = {}
    with open_model(directory / "model") as checkpoint:
        if checkpoint.architecture is not None:  # saved as a type that is declared
            return told
        found = axes_found(checkpoint)
        for kind, axes in found.items():
            for layer in (1, 0, 2) if kind == "layer" else (0,):
                try:
                    told[kind] = apart(model, checkpoint, axes, directory / f"{kind}{layer}", layer)
                    break
                except (PruneError, ValueError) as error:  # a class may need layers of each kind to answer
                    told[kind] = str(error)
        with suppress(PruneError):
            (axis,) = axes_of(checkpoint, "token")
            told["token"] = 0.0 if axis.carriers else "no tensor of tokens"
    return told


def logits(model: PreTrainedModel, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[rows, tokens, vocabulary]`, without a cache where the class has one."""
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        found: torch.Tensor = model(**rows, **cache).logits
    return found


def _hand_on(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """What a layer is given, and what it returns beside it (T5's biases of positions)."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
