"""What each layer does to the hidden states of text, or to the loss: the less, the sooner it can be removed.

The states of a stack are x_0, before its first layer, to x_L, after its last. All means are over the real tokens.

Linear maps take the place of removed layers (ReplaceMe, 2505.02819, section 3): no training, and no new tensor. Before
a run of removed layers, the last FFN adds M to the hidden states X; the removed layers moved X + M further by D. The
map T is the least-squares solution of M T = M + D over the tokens of a text, and is multiplied into the weights of the
FFN's output layer: its output becomes M T, about what the removed layers would have returned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy import linalg
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from prunecli.architectures.records import Side
from prunecli.errors import DataError, PruneError, UnsupportedModelError, UsageError
from prunecli.evaluation.on_text import runner_and_batches
from prunecli.methods.options import LayerMetric
from prunecli.methods.units import TextRun
from prunecli.model.axes import axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Floats
from prunecli.model.find_axes import axes_of
from prunecli.model.layout import ModelLayout
from prunecli.model.parts import FfnLayer
from prunecli.model.patchwork import submodule
from prunecli.model.rewrite import Rewrite
from prunecli.model.small_model import given_states, hand_on
from prunecli.modules.hooks import states_of
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, silent
from prunecli.results.document import LARGEST
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.running.batches import (
    TokenObserver,
    batch_vectors,
    observe_batches,
    require_finite,
    token_losses,
)
from prunecli.running.examples import Batch, num_examples
from prunecli.running.layerwise.runner import Runner
from prunecli.selection.cut import Selection, cut
from prunecli.tensors.dtypes import is_float
from prunecli.tensors.stream import Copy, given, take, values
from prunecli.text.choice import Dataset, described
from prunecli.text.parallel import ParallelText


def measure_layers(checkpoint: Checkpoint, data: Dataset, run: TextRun, metric: LayerMetric) -> Scores:
    """Load the model of a checkpoint and score its layers on text, see `layer_scores`.

    Raises:
        UsageError: vectors are asked for of a model that translates.
        PruneError: a model or text that cannot be used.
    """
    pooling = None
    if metric == "embedding":
        if isinstance(data.text, ParallelText):
            raise UsageError(
                "`metric=embedding`: the model translates, and makes no vector of a text.",
                "Choose another metric.",
            )
        pooling = read_pooling(checkpoint.path, run.say)
    runner, batches = runner_and_batches(
        checkpoint, data, run.running, run.say, predicting=metric == "perplexity", pooling=pooling, whole=True
    )
    return layer_scores(checkpoint, runner, batches, metric, pooling, run.progress)


def layer_scores(
    checkpoint: Checkpoint,
    runner: Runner,
    batches: Sequence[Batch],
    metric: LayerMetric,
    pooling: Pooling | None = None,
    progress: Progress = silent,
) -> Scores:
    """Score the layers of a model on batches of text; padding is left out.

    By `cosine` a layer's score is 1 - mean cos(x_l, x_(l+1)) (ShortGPT's block influence, 2403.03853), and the
    distance of layers i and j is mean arccos(cos(x_i, x_j)) / pi (2403.17887, 3.2, there of the last token alone).
    By `cka` it is 1 - linear CKA (1905.00414) of x_l and x_(l+1), tokens being the examples.

    By `perplexity` it is ln(perplexity without the layer / perplexity), by `embedding` the mean over the texts of
    1 - cos(vector without the layer, vector): each layer is passed by in turn. Sums are those of the rise of the losses
    over the tokens, or of the cosines over the texts.

    Args:
        runner: a runner of a model that is held whole.
        pooling: pooling of the vector of a text, for `embedding`.

    Raises:
        DataError: a loss or vector of the whole model is not finite.
        PruneError: a state is not finite.
    """
    total, fields = num_examples(batches), dict[str, Any]()
    if metric in ("cosine", "cka"):
        observer = StateObserver(checkpoint.layout, metric)
        observe_batches(runner, observer, batches, "layers", progress)
        fields = {"per": "token", **observer.take()}
    else:
        model, layers, by_loss = runner.model, checkpoint.layout.layers, pooling is None
        vectors = pooling and partial(batch_vectors, model, pooling)
        forward: Any = vectors or partial(token_losses, model)
        what = f"measuring {'the loss' if by_loss else 'the vectors'} without each layer"
        count, sums = 0, [0.0] * len(layers)
        with torch.inference_mode(), progress(what, (len(layers) + 1) * total, "examples") as advance:
            for batch in batches:
                examples, whole = len(batch.indices), forward(batch)
                advance(examples)
                if by_loss:
                    require_finite(whole[0], batch)
                    count += int(whole[1].sum())
                elif not whole.isfinite().all():
                    raise DataError(
                        "a vector is not finite", "The weights are damaged, or overflow the type."
                    )
                for number, layer in enumerate(layers):
                    with submodule(model, layer.name).register_forward_hook(hand_on, with_kwargs=True):
                        made = forward(batch)
                    if by_loss:
                        changes = made[0].double() - whole[0].double()
                    else:
                        changes = functional.cosine_similarity(made.double(), whole.double())
                    sums[number] += float(changes.sum())
                    advance(examples)
        # Without a layer no loss or vector may be finite: then it counts as the worst value.
        worst = LARGEST if by_loss else -LARGEST
        found: dict[str, list[float]] = {}
        for layer, value in zip(layers, sums, strict=True):
            own = found.setdefault(axis_name(layer.side, "layer"), [])
            own.append(value if abs(value) < LARGEST else worst)
        per, counts = (
            "prediction" if by_loss else "example",
            dict.fromkeys(found, max(count, 1) if by_loss else total),
        )
        fields = {"per": per, "values": found, "counts": counts}
    return scores_of(
        checkpoint,
        kind="layer",
        method=metric,
        examples=total,
        ids={axis.name: axis.ids for axis in axes_of(checkpoint, "layer")},
        **fields,
    )


class StateObserver(TokenObserver):
    """Sums over tokens of products of the states X `[L + 1, tokens, width]` before and after each layer.

    By `cka`: of X `[L + 1, width]`, X^T X `[L + 1, width, width]` and X^T Y of neighbours `[L, width, width]`; else of
    the cosines and the angles between states, `[L + 1, L + 1]` each.
    """

    def __init__(self, layout: ModelLayout, metric: LayerMetric) -> None:
        self._layout, self._is_cka = layout, metric == "cka"
        self._sums: dict[str, list[Any]] = {}
        self._states: list[Tensor] = []

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of each layer, and the output of the last one of each stack."""
        last = {layer.side: layer for layer in self._layout.layers}
        for layer in self._layout.layers:
            module = submodule(model, layer.name)
            hook = partial(self._add, layer.side, layer is last[layer.side])
            yield module.register_forward_hook(hook, with_kwargs=True)

    def take(self) -> dict[str, Any]:
        """Return the fields `values`, `counts` and `distances` of `Scores`.

        Raises:
            PruneError: they are not finite.
        """
        fields: dict[str, dict[str, Any]] = {"values": {}, "counts": {}, "distances": {}}
        for side, (*sums, tokens) in self._sums.items():
            name = axis_name(side, "layer")
            values = _alignment(sums, tokens) if self._is_cka else np.diagonal(sums[0].cpu().numpy(), 1)
            if not np.isfinite(values).all():
                raise PruneError(
                    f"The hidden states of the {side} are not finite, or the same for every token.",
                    "The weights are damaged, or overflow the type they are run in: use `metric=last` or random.",
                )
            fields["values"][name], fields["counts"][name] = values.tolist(), tokens
            if not self._is_cka:
                fields["distances"][name] = (sums[1] / np.pi).tolist()
        return fields

    def _add(
        self,
        side: Side,
        is_last: bool,
        _: nn.Module,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        output: Any,
    ) -> None:
        self._states.append(given_states(arguments, options))
        if not is_last:
            return
        self._states.append(states_of(output))
        device = self.mask.device
        states = torch.stack([self.real(state).to(device).float() for state in self._states])
        self._states.clear()
        if self._is_cka:  # X, X^T X, and X^T Y of neighbours
            own = torch.stack([one.double().T @ one.double() for one in states])
            crossed = torch.stack([one.double().T @ other.double() for one, other in pairwise(states)])
            made: list[Any] = [states.sum(dim=1, dtype=torch.float64), own, crossed]
        else:
            units = functional.normalize(states, dim=-1)
            cosines = torch.einsum("itd,jtd->tij", units, units).double().clamp(-1, 1)
            made = [cosines.sum(dim=0), cosines.arccos().sum(dim=0)]
        made.append(states.shape[1])
        before = self._sums.get(side, [0] * len(made))
        self._sums[side] = [old + new for old, new in zip(before, made, strict=True)]


def _alignment(sums: Sequence[Tensor], tokens: int) -> np.ndarray:
    """`[L]`: 1 - CKA of neighbours, from the sums of X, X^T X and X^T Y."""
    total, own, crossed = sums
    means = total / tokens

    def squares(products: Tensor, first: Tensor, second: Tensor) -> Tensor:
        centred = products - tokens * torch.einsum("li,lj->lij", first, second)
        return centred.square().sum(dim=(1, 2))

    norms = squares(own, means, means)
    found = 1 - squares(crossed, means[:-1], means[1:]) / (norms[:-1] * norms[1:]).sqrt()
    return np.asarray(found.cpu().numpy())


RIDGE = 1e-3
"""Weight of |T - 1|^2 in the least squares, relative to the mean square of M: without text, T is the identity."""
TOLERANCE = 0.02
"""Largest relative error, beside rounding, of the claim that a layer adds a multiple of its FFN's output."""
FITTING = 0.9
"""Share of the tokens for which the claim has to hold: a few have states so large that M is lost in rounding."""

Maps = dict[tuple[str, str], Floats]
"""Names of the layer before a run of removed layers, and of the last layer of the run -> T `[width, width]`."""


@dataclass(eq=False)
class Gap:
    """A run of removed layers.

    Attributes:
        ends: names of the layer before the run, and of its last layer: the map begins and ends there.
        ffn: FFN of the layer before the run.
        sums: products of M and M, and of M and D, over tokens, `[2, width, width]`.
        scale: factor of M in what the layer adds to the hidden states; 0: not known yet.
        made, before: M, and the layer's output, in the present pass.
    """

    ends: tuple[str, str]
    ffn: FfnLayer
    sums: Any = 0
    scale: float = 0.0
    made: Any = None
    before: Any = None


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
                own = np.concatenate([*values(checkpoint, Copy(name))])
                carrier = gap.ffn.carriers.get(name)
                is_turned = carrier is None or carrier.dim != 1
                made[name] = own @ maps[gap.ends] if is_turned else maps[gap.ends].T @ own
    outputs = [*rewrite.outputs]
    for number, output in enumerate(outputs):
        part = output.expression
        if isinstance(part, Copy) and part.source in made:
            array = made[part.source]
            for axis, ranges in part.taken:
                array = take(array, ranges, axis)
            outputs[number] = output._replace(expression=given(array))
    return replace(rewrite, outputs=tuple(outputs))


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
    """Sums the products of M and D over tokens for each gap."""

    def __init__(self, gaps: list[Gap]) -> None:
        self._gaps = gaps
        self._is_checking = False

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the output layer of the FFN, the layer around it, and the last removed layer."""
        for gap in self._gaps:
            output = submodule(model, gap.ffn.output)
            # A copy, since Falcon adds the attention's output in place.
            yield output.register_forward_hook(
                lambda *given, gap=gap: setattr(gap, "made", given[-1].clone())
            )
            layer, last = (submodule(model, name) for name in gap.ends)
            yield layer.register_forward_hook(partial(self._add_before, gap, output), with_kwargs=True)
            yield last.register_forward_hook(partial(self._add_after, gap))

    def take(self) -> Maps:
        """Return the map T of each gap."""
        maps = {}
        for gap in self._gaps:
            products, moved = gap.sums.cpu().numpy()
            identity = np.eye(len(products))
            ridge = RIDGE * np.trace(products) / len(products)
            found = linalg.solve(products + ridge * identity, moved, assume_a="pos")
            maps[gap.ends] = identity + found / gap.scale
        return maps

    def real(self, states: Tensor) -> Tensor:
        """Return the states of real tokens, `[tokens, width]` float64."""
        return super().real(states).double()

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
        states = gap.before = states_of(output)
        if gap.scale:
            return
        # The layer runs once more with 2 M: its output must move by a multiple of M.
        made, self._is_checking = gap.made, True
        with output_layer.register_forward_hook(lambda _module, _inputs, once: 2 * once):
            moved = self.real(states_of(layer(*arguments, **options)) - states)
        self._is_checking, gap.made = False, made
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
        gap.scale = float(scale)

    def _add_after(self, gap: Gap, _module: nn.Module, _inputs: Any, output: Any) -> None:
        own = self.real(gap.made)
        moved = self.real(states_of(output)) - self.real(gap.before.to(states_of(output).device))
        gap.made = gap.before = None
        gap.sums += torch.stack([own.T @ own, own.T @ moved.to(own.device)])
