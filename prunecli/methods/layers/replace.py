"""Linear maps in the place of removed layers (ReplaceMe, 2505.02819, section 3): no training, and no new tensor.

Before a run of removed layers, the last FFN adds M to the hidden states X; the removed layers moved X + M further by D.
The map T is the least-squares solution of M T = M + D over the tokens of a text, and is multiplied into the weights of
the FFN's output layer: its output becomes M T, about what the removed layers would have returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import linalg
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunecli.errors import UnsupportedModelError
from prunecli.evaluation.on_text import runner_and_batches
from prunecli.methods.units import TextRun
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Floats
from prunecli.model.find_axes import axes_of
from prunecli.model.parts import FfnLayer
from prunecli.model.patchwork import submodule
from prunecli.model.rewrite import Rewrite
from prunecli.modules.hooks import states_of
from prunecli.running.batches import TokenObserver, observe_batches
from prunecli.selection.cut import cut
from prunecli.selection.selection import Selection
from prunecli.tensors.dtypes import is_float
from prunecli.tensors.stream import Copy, Output, given, take, values
from prunecli.text.choice import Dataset, described

RIDGE = 1e-3
"""Weight of |T - 1|^2 in the least squares, relative to the mean square of M: without text, T is the identity."""
TOLERANCE = 0.02
"""Largest relative error, beside rounding, of the claim that a layer adds a multiple of its FFN's output."""
FITTING = 0.9
"""Share of the tokens for which the claim has to hold: a few have states so large that M is lost in rounding."""

Maps = dict[tuple[str, str], Floats]
"""Names of the layer before a run of removed layers, and of the last layer of the run -> T `[width, width]`."""


@dataclass(frozen=True, eq=False)
class Gap:
    """A run of removed layers.

    Attributes:
        ends: names of the layer before the run, and of its last layer: the map begins and ends there.
        ffn: FFN of the layer before the run.
    """

    ends: tuple[str, str]
    ffn: FfnLayer


def cut_replaced(
    checkpoint: Checkpoint, selection: Selection, data: Dataset, run: TextRun, known: Maps | None = None
) -> Rewrite:
    """The checkpoint with the units of `selection`, and linear maps in the place of removed layers.

    A run of layers at the beginning of a stack has no FFN before it and gets no map.

    Args:
        selection: may remove units of other kinds too; the maps are those of the whole model.
        data: the text that the maps are computed on.
        run: how the model runs on it.
        known: maps that earlier calls computed on the same text; the new ones are added.

    Raises:
        UnsupportedModelError: the FFN before a run is a mixture, shared, removed or quantised, or the layer does not
            add its output to the hidden states.
        PruneError: text or a model that cannot be used.
    """
    maps = {} if known is None else known
    arguments = {"text": described(data.text), **selection.step["arguments"], "replace": "linear"}
    step = {**selection.step, "arguments": arguments}
    rewrite, gaps = cut(checkpoint, replace(selection, step=step)), [*_gaps(checkpoint, selection)]
    if new := [gap for gap in gaps if gap.ends not in maps]:
        runner, batches = runner_and_batches(checkpoint, data, run.running, whole=True)
        observer = GapObserver(new)
        observe_batches(runner, observer, batches, "linear maps", run.progress)
        maps.update(observer.take())
    made = {}
    for gap in gaps:
        for name in gap.ffn.tensor_names:
            if module_of(name) == gap.ffn.output:
                own, carrier = (
                    np.concatenate([*values(checkpoint, Copy(name), "F64")]),
                    gap.ffn.carriers.get(name),
                )
                is_turned = carrier is None or carrier.dim != 1
                made[name] = own @ maps[gap.ends] if is_turned else maps[gap.ends].T @ own
    return replace(rewrite, outputs=tuple(_with_map(output, made) for output in rewrite.outputs))


def _with_map(output: Output, made: Mapping[str, Floats]) -> Output:
    """The output tensor, made of the product with a map if its source is one of `made`."""
    part = output.expression
    if not isinstance(part, Copy) or part.source not in made:
        return output
    array = made[part.source]
    for axis, ranges in part.taken:
        array = take(array, ranges, axis)
    return output._replace(expression=given(array))


def _gaps(checkpoint: Checkpoint, selection: Selection) -> Iterator[Gap]:
    """The runs of removed layers that have a layer before them."""
    ffns = {(str(ffn.side), ffn.layer): ffn for ffn in checkpoint.layout.ffns}
    shared = {ffn.owner for ffn in checkpoint.layout.ffns if ffn.is_shared}
    for axis in axes_of(checkpoint, "layer"):
        kept = [place for place, number in enumerate(axis.ids) if number in selection.kept[axis.name]]
        for place, following in zip(kept, [*kept[1:], axis.count], strict=True):
            if following == place + 1:
                continue
            ffn = ffns[axis.side, place]
            fault = None
            if ffn.removed or ffn.is_sparse or ffn.is_shared or ffn.name in shared:
                fault = "is removed, shared, a mixture of experts, or none that prunecli finds"
            elif not all(is_float(checkpoint.info(name).dtype) for name in ffn.tensor_names):
                fault = "is quantised"
            if fault is not None:
                raise UnsupportedModelError(
                    f"{checkpoint.path}: the FFN of layer {place}, before removed layers, {fault}",
                    "A linear map needs a dense FFN of floating-point weights: leave `replace` out.",
                )
            yield Gap((axis.members.format(place), axis.members.format(following - 1)), ffn)


class GapObserver(TokenObserver):
    """Sums the products of M and D over tokens, `[width, width]` for each gap."""

    def __init__(self, gaps: list[Gap]) -> None:
        self._gaps = gaps
        self._sums: dict[Gap, Any] = defaultdict(int)
        self._scales: dict[Gap, float] = {}
        self._made: dict[Gap, Tensor] = {}
        self._before: dict[Gap, Tensor] = {}
        self._is_checking = False

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the output layer of the FFN, the layer around it, and the last removed layer."""
        for gap in self._gaps:
            output = submodule(model, gap.ffn.output)
            yield output.register_forward_hook(partial(self._add_ffn, gap))
            layer, last = (submodule(model, name) for name in gap.ends)
            yield layer.register_forward_hook(partial(self._add_before, gap, output), with_kwargs=True)
            yield last.register_forward_hook(partial(self._add_after, gap))

    def take(self) -> Maps:
        """Return the map T of each gap."""
        maps = {}
        for gap in self._gaps:
            products, moved = self._sums[gap].cpu().numpy()
            identity = np.eye(len(products))
            ridge = RIDGE * np.trace(products) / len(products)
            found = linalg.solve(products + ridge * identity, moved, assume_a="pos")
            maps[gap.ends] = identity + found / self._scales[gap]
        return maps

    def real(self, states: Tensor) -> Tensor:
        """Return the states of real tokens, `[tokens, width]` float64."""
        return super().real(states).double()

    def _add_ffn(self, gap: Gap, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._made[gap] = output.clone()  # Falcon adds the attention's output in place

    def _add_before(
        self,
        gap: Gap,
        output_layer: nn.Module,
        layer: nn.Module,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        output: Any,
    ) -> None:
        if self._is_checking:
            return
        states = self._before[gap] = states_of(output)
        if gap in self._scales:
            return
        # The layer runs once more with 2 M: its output must move by a multiple of M.
        made, self._is_checking = self._made[gap], True
        try:
            with output_layer.register_forward_hook(lambda _module, _inputs, once: 2 * once):
                moved = self.real(states_of(layer(*arguments, **options)) - states)
        finally:
            self._is_checking, self._made[gap] = False, made
        own = self.real(made)
        scale = ((own * moved).sum(dim=1) / own.square().sum(dim=1)).median()
        rounding = torch.finfo(states.dtype).eps * self.real(states).norm(dim=1)
        size = scale.abs() * own.norm(dim=1)
        fits = (moved - scale * own).norm(dim=1) <= TOLERANCE * size + rounding
        if not (fits & (size > 2 * rounding)).double().mean() >= FITTING:
            raise UnsupportedModelError(
                f"{gap.ends[0]}: the layer does not add the output of its FFN to the hidden states, but changes it "
                "first (by a norm, perhaps), so that no linear map fits into the FFN",
                "Leave `replace` out.",
            )
        self._scales[gap] = float(scale)

    def _add_after(self, gap: Gap, _module: nn.Module, _inputs: Any, output: Any) -> None:
        own = self.real(self._made.pop(gap))
        moved = self.real(states_of(output)) - self.real(self._before.pop(gap).to(states_of(output).device))
        made = torch.stack([own.T @ own, own.T @ moved.to(own.device)])
        self._sums[gap] += made
