"""Scores for the units of every axis on text: gradients of masks, and how active hidden units are.

A mask xi multiplies what a unit adds to the model's hidden states (1905.10650, eq. 2). The output weights of a head,
hidden unit or expert are linear in that part, so that dL/dxi is the sum of w dL/dw over these weights. A layer adds its
output less its input. The score of a unit is I = E |dL(x)/dxi|, the mean over the examples x of a text: one forward and
one backward pass, for all axes together.

Gradients of the tokens in a window of plain text mostly cancel out, and there are few windows. So the score of a hidden
unit of a causal language model is E (dL/dxi)^2 over all tokens, with a mask xi for each: the diagonal of the Fisher
information (2204.09656, 3.2), and HEAPr's score of units of experts (2509.22299) but for its factor 1/2. Where several
modules read the activations, or none that can be watched, xi is a mask for the whole window.

The score of a channel of the residual stream is measured in the same pass: the sum of |y| over all tokens of an example
and all norms of the stream, y being the norm's output on the channel (2407.14679, 2.2).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from prunecli.architectures.records import Carrier
from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.evaluation.on_text import RunOptions, runner_and_batches, runner_of
from prunecli.methods.units import TextRun
from prunecli.model.axes import Axis, Kind, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import CHANNELS
from prunecli.model.names import layer_of
from prunecli.model.parts import FfnLayer
from prunecli.model.patchwork import submodule
from prunecli.model.probe import MIXES, outputs
from prunecli.model.small_model import given_states, stream_norms
from prunecli.modules.hooks import replaced, states_of
from prunecli.modules.pooling import read_pooling
from prunecli.modules.stock_experts import own_experts
from prunecli.modules.stock_names import StockNames
from prunecli.private import can_replace_experts
from prunecli.progress import Progress, silent
from prunecli.results.unit_scores import Per, Scores, scores_of
from prunecli.running.batches import (
    Losses,
    TokenObserver,
    differentiate_losses,
    example_losses,
    observe_batches,
    random_projections,
    task_batches,
)
from prunecli.running.examples import Batch, num_examples
from prunecli.running.layerwise.runner import Runner
from prunecli.running.runner import REHEARSING
from prunecli.text.choice import Dataset
from prunecli.text.tokens import load_tokenizer

GRADIENT, NORMS = "gradient", "norm-output"
Take = Callable[[Tensor], None]
"""Takes w dL/dw of a parameter w, or a dL/da of activations."""


@dataclass
class _Masks:
    """Watches a model, and sums |dL/dxi|, or its square, over examples, or their tokens, for the units of each axis.

    Attributes:
        names: names in the model of the checkpoint's tensors.
        hooks: undoes what watches the model.
        per: what the absolute value is taken of.
        readers: axis whose squares are summed -> number of tensors that read its activations. Of a single one squares
            are taken at once, since the tokens of all layers would not fit in memory.
        rows: examples in the present batch.
        present: name of an axis -> `[examples, tokens or 1, units]` of dL/dxi of the present batch.
        sums: name of an axis -> `[units]`, without the present batch.
    """

    checkpoint: Checkpoint
    model: Any
    names: StockNames
    hooks: ExitStack
    per: Per
    readers: Mapping[str, int]
    rows: int = 1
    present: dict[str, Any] = field(default_factory=partial(defaultdict, int))
    sums: dict[str, Any] = field(default_factory=partial(defaultdict, int))

    def add(self, name: str, gradients: Tensor) -> None:
        """Add `[tokens, units]`, or `[units]` of an only example: a module may be run several times in a pass."""
        if self.readers.get(name) == 1:
            self._sum(name, gradients)
            return
        of_tokens = gradients.reshape(self.rows, -1, gradients.shape[-1])
        self.present[name] += of_tokens if self.per == "token" else of_tokens.sum(dim=1, keepdim=True)

    def flush(self, rows: int = 1) -> None:
        """Take the values of the present batch, before one of `rows` examples begins."""
        for name, own in self.present.items():
            self._sum(name, own)
        self.present.clear()
        self.rows = rows

    def _sum(self, name: str, gradients: Tensor) -> None:
        values = gradients.square() if name in self.readers else gradients.abs()
        self.sums[name] += values.reshape(-1, values.shape[-1]).sum(dim=0, dtype=torch.float64)

    def inputs(self, axes: Mapping[str, Axis]) -> Iterator[tuple[Tensor, Take]]:
        """Watch the inputs of the linear layers that mix heads and hidden units; yield the output weights of others."""
        for axis in axes.values():
            for tensor in outputs(axis.carriers) if axis.kind in ("head", "unit") else ():
                carrier, count = axis.carriers[tensor], axis.count
                place = self.names.place(tensor)
                owner, _, attribute = place.rpartition(".")
                parameter = self.model.get_parameter(place)
                if attribute == "weight" and parameter.dim() == 2:
                    hook = partial(self._note_input, axis.name, carrier, count)
                    self.hooks.enter_context(self.model.get_submodule(owner).register_forward_pre_hook(hook))
                else:
                    yield parameter, partial(self._by_unit, axis.name, carrier, count)

    def _note_input(
        self, name: str, carrier: Carrier, units: int, _: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """dL/dxi is the sum of a dL/da over a unit's values a, as far as its output weights read them."""
        values, *rest = inputs
        if not values.requires_grad:  # nothing below has units that are watched: the graph begins here
            values = values.detach().requires_grad_()
        values = values.view_as(values)  # which nothing else reads
        _on_gradient(values, values, lambda product: self.add(name, _unit_sums(product, carrier, units)))
        return (values, *rest)

    def _by_unit(self, name: str, carrier: Carrier, units: int, products: Tensor) -> None:
        self.add(
            name, _unit_sums(products.movedim(carrier.dim, -1).flatten(0, -2).sum(dim=0), carrier, units)
        )

    def experts(self, axes: Mapping[str, Axis]) -> Iterator[tuple[Tensor, Take]]:
        """The output weights of experts and their biases."""
        if not any(axis.kind == "expert" for axis in axes.values()):
            return
        for layer in self.checkpoint.mixtures:
            if layer.is_predicting:
                continue
            every = sorted(self.names.of_experts(layer).items())
            of_experts = {name: number for name, number in every if MIXES.search(name, len(layer_of(name)))}
            axis, count = axis_name(layer.name, "expert"), len(layer.experts)
            for name, number in of_experts.items():
                take = (
                    partial(self._by_unit, axis, Carrier(0), count)
                    if number is None
                    else partial(self._of_unit, axis, number, count)
                )
                yield self.model.get_parameter(name), take

    def _of_unit(self, name: str, number: int, units: int, products: Tensor) -> None:
        """Add the products of all weights of one unit."""
        self.add(name, products.sum() * functional.one_hot(torch.tensor(number), units).to(products))

    def watch_units_of_experts(self, axes: Mapping[str, Axis]) -> set[str]:
        """Watch the activations in experts that prunecli can run; return the names of the axes that these are of."""
        of_experts = [axis for axis in axes.values() if axis.kind == "unit" and axis.keys]
        if not (of_experts and can_replace_experts(self.model)):
            return set()
        places = _units_of_experts(self.checkpoint, of_experts)

        def note(number: int, expert: int, hidden: Tensor, *_: Tensor) -> None:
            if not hidden.requires_grad:  # nothing below has units that are watched: the graph begins here
                hidden.requires_grad_()
            _on_gradient(hidden, hidden, partial(self.add, places[number, expert]))

        for number, module in enumerate(self.hooks.enter_context(own_experts(self.model)).values()):
            module.watcher = partial(note, number)
        return {*places.values()}

    def watch_layers(self, axes: Mapping[str, Axis]) -> None:
        """Watch what each layer adds to its input."""

        def compute(name: str, number: int, forward: Callable[..., Any], *given: Any, **options: Any) -> Any:
            before = given_states(given, options)
            output = forward(*given, **options)
            if REHEARSING.get():
                return output
            made = states_of(output)
            if not made.requires_grad:  # nothing below has units that are watched: the graph begins here
                made = made.detach().requires_grad_()

            def take(products: Tensor) -> None:
                own = products.sum(dim=1, keepdim=True)
                self.add(name, own * functional.one_hot(torch.tensor(number), axes[name].count).to(own))

            _on_gradient(made, made - before.to(made.device), take)
            return (made, *output[1:]) if isinstance(output, tuple | list) else made

        for layer in self.checkpoint.layout.layers:
            name = axis_name(layer.side, "layer")
            if name in axes:
                module = submodule(self.model, layer.name)
                self.hooks.enter_context(replaced({layer.number: module}, partial(compute, name)))

    def watch_norms(self, axis: Axis) -> None:
        """Add up what each norm of the residual stream hands on of each channel."""

        def note(_: nn.Module, __: Any, made: Tensor) -> None:
            if made.shape[-1] == axis.count:
                self.add(CHANNELS, made.detach().float().abs().reshape(-1, axis.count).sum(dim=0))

        for norm in stream_norms(self.model, {*map(self.names.parameter, axis.carriers)}):
            self.hooks.enter_context(norm.register_forward_hook(note))


def gradient_sums(
    runner: Runner,
    checkpoint: Checkpoint,
    axes: Sequence[Axis],
    batches: Sequence[Batch],
    progress: Progress = silent,
    *,
    per: Per = "example",
    fisher: bool = False,
    losses_of: Losses = example_losses,
) -> dict[str, NDArray[np.float64]]:
    """Sum over examples x of |dL(x)/dxi_u| for every unit u of some axes, see the module.

    L(x) is the example's mean token loss. Per token the absolute value is taken at each position, as in the code that
    the paper's authors released, and the sum is over the positions of all examples. Padding adds nothing: no loss
    depends on it.

    Args:
        runner: runs the checkpoint's model in float32 or bfloat16 (float16 loses small gradients). Layer by layer
            neither experts nor channels are scored.
        axes: of any kinds but tokens. With experts or channels batches hold one example each, and with the hidden units
            of experts that only the model's class can run; so they do where layers hold texts along another dimension
            than the first (FSMT, XLNet, Gemma 3n).
        fisher: whether squares over tokens are summed for hidden units.
        losses_of: L(x) of each example of a batch.

    Returns:
        Name of an axis -> `[units]`.

    Raises:
        DataError: an example's loss is not finite.
        PruneError: a gradient is not finite.
        UnsupportedModelError: transformers stores the units' weights otherwise than the checkpoint.
        UsageError, CheckpointError, OutputError: as `runner` does.
    """
    model, every = runner.model, {axis.name: axis for axis in axes}
    readers = {axis.name: len(outputs(axis.carriers)) for axis in axes if axis.kind == "unit" and fisher}

    def losses(model: Any, batch: Batch) -> Tensor:
        masks.flush(len(batch.indices))
        return losses_of(model, batch)

    model.requires_grad_(False)  # gradients of activations, and of what is watched, are all that is needed
    with ExitStack() as hooks:
        masks = _Masks(checkpoint, model, StockNames(checkpoint, model), hooks, per, readers)
        takers: dict[Tensor, list[Take]] = defaultdict(list)
        seen = masks.watch_units_of_experts(every)
        if seen and runner.layerwise:  # experts run apart: the graph begins below the layers
            model.enable_input_require_grads()
            hooks.callback(model.disable_input_require_grads)
        named = {name: axis for name, axis in every.items() if name not in seen}
        for parameter, take in chain(masks.inputs(named), masks.experts(named)):
            takers[parameter].append(take)
        for parameter, together in takers.items():
            hooks.enter_context(_watch(parameter, together))
            hooks.callback(parameter.requires_grad_, False)
        masks.watch_layers(named)
        if CHANNELS in named:
            masks.watch_norms(named[CHANNELS])
        differentiate_losses(runner, batches, losses, progress)
    masks.flush()
    sums, found = masks.sums, {}
    reached = {axis.kind for axis in axes if axis.name in sums}
    if unreached := sorted({axis.kind for axis in axes} - reached):
        raise UnsupportedModelError(
            f"{unreached[0]}s cannot be scored: no gradient reaches them, since the class computes "
            "gradients of its own",
            "Rank them by another metric, such as activations, or at random.",
        )
    for name, axis in every.items():
        # Where no gradient came, no loss depends on the units.
        found[name] = sums[name].cpu().numpy() if name in sums else np.zeros(axis.count)
        if not np.isfinite(found[name]).all():
            raise PruneError(
                f"{module_of(name)}: a gradient is not finite, though every loss is",
                "Compute with `dtype=float32`.",
            )
    return found


def measure_gradients(
    checkpoint: Checkpoint,
    data: Dataset,
    axes: Mapping[Kind, Sequence[Axis]],
    running: RunOptions,
    progress: Progress,
) -> dict[Kind, Scores]:
    """Load the model of a checkpoint and score the units of each kind, see `gradient_scores`.

    Args:
        running: how the model runs; its batches are of one example.
    """
    runner, _ = runner_of(checkpoint, running, gradients=True)
    return gradient_scores(checkpoint, runner, data, axes, progress=progress)


def gradient_scores(
    checkpoint: Checkpoint,
    runner: Runner,
    data: Dataset,
    axes: Mapping[Kind, Sequence[Axis]],
    batch_tokens: int = 1,
    per: Per = "example",
    progress: Progress = silent,
) -> dict[Kind, Scores]:
    """The scores of the units of each kind, see `gradient_sums`.

    Args:
        axes: kind -> its axes.
        data: the text, with its task. For an embedding model L(x) is that of `random_projections`.
        batch_tokens: padded tokens in a batch; 1: each example is one.
    """
    pooling = read_pooling(checkpoint.path) if data.task == "embedding" else None
    losses_of = example_losses if pooling is None else partial(random_projections, pooling)
    batches = task_batches(load_tokenizer(checkpoint.path), runner.model, data, batch_tokens, pooling)
    every = [*chain(*axes.values())]
    fisher = data.task == "lm"
    sums = gradient_sums(
        runner, checkpoint, every, batches, progress, per=per, fisher=fisher, losses_of=losses_of
    )
    examples = num_examples(batches)

    def tokens(axis: Axis) -> int:
        mask = "attention_mask" if axis.side == "encoder" else "decoder_attention_mask"
        return sum(int(batch.inputs.get(mask, batch.inputs["attention_mask"]).sum()) for batch in batches)

    found = {}
    for kind, own in axes.items():
        by = "token" if fisher and kind == "unit" else per
        found[kind] = scores_of(
            checkpoint,
            kind=kind,
            method=NORMS if kind == "channel" else GRADIENT,
            task=data.task,
            examples=examples,
            per=by,
            ids={axis.name: axis.ids for axis in own},
            values={axis.name: sums[axis.name].tolist() for axis in own},
            counts={axis.name: examples if by == "example" else tokens(axis) for axis in own},
        )
    return found


def _on_gradient(values: Tensor, factor: Tensor, take: Take) -> None:
    """Have `take` called with `factor` x dL/d`values`, `[tokens, width]` float32, in the backward pass."""
    held = [factor.detach()]
    # Popped, so that it is freed as the pass goes down.
    values.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: take((held.pop().float() * gradient.float()).flatten(0, -2))
    )


def _unit_sums(values: Tensor, carrier: Carrier, units: int) -> Tensor:
    """`[..., units]`: sums of `[..., size]` over the places of each unit."""
    width = carrier.unit(values.shape[-1], units)
    blocks = torch.split(values, [block * units * width for block in carrier.blocks], dim=-1)
    return torch.stack([block.reshape(*block.shape[:-1], units, -1).sum(dim=-1) for block in blocks]).sum(
        dim=0
    )


def _units_of_experts(checkpoint: Checkpoint, axes: Sequence[Axis]) -> dict[tuple[int, int], str]:
    """Number of a mixture, without those for further tokens, and of an expert -> the axis of its hidden units."""
    of_modules = {axis.module: axis.name for axis in axes}
    of_tensors = {tensor: axis.name for axis in axes for tensor in axis.carriers}
    found = {}
    for number, layer in enumerate(checkpoint.require_routed()):
        of_all = next((of_tensors[name] for name in layer.stacked_tensors if name in of_tensors), None)
        for expert in range(layer.num_experts):
            name = of_modules.get(layer.expert_prefix.format(expert=expert), of_all)
            if name is not None:
                found[number, expert] = name
    return found


def _watch(parameter: Tensor, takers: Sequence[Take]) -> Any:
    """Have `takers` called with w dL/dw of a parameter in each backward pass; the gradient is freed at once."""

    def multiply(own: Tensor) -> None:
        assert own.grad is not None
        products = own.detach().float() * own.grad.float()
        own.grad = None
        for take in takers:
            take(products)

    parameter.requires_grad_(True)
    return parameter.register_post_accumulate_grad_hook(multiply)  # type: ignore[no-untyped-call]


def measure_activations(
    checkpoint: Checkpoint,
    data: Dataset,
    run: TextRun,
    metric: str = "activation",
    experts: Sequence[Axis] = (),
) -> Scores:
    """Load the model of a checkpoint and sum the squared activations of its hidden units on text.

    Their importance is the root of the mean of a_u^2 over the real tokens, for each hidden unit u of each FFN. A unit
    that is large on a few tokens counts more than in the mean of |a_u|: such units carry what a language model does at
    its first token, and removing them costs most.

    a_u is the input of the output layer: act(x W1 + b1)_u, in a gated FFN times its gate. If several layers run one
    FFN, the sum is over all of them. In an expert the mean is that of (g a_u)^2 over the real tokens that the router
    sends to it, g being the weight that its output is multiplied by; experts that serve every token have g = 1.

    Args:
        metric: the method that the scores name.
        experts: hidden units of experts, which are measured in the place of those of dense FFNs.

    Raises:
        DataError: no token.
        UnsupportedModelError: transformers does not let the experts be run from outside.
        PruneError: a model or text that cannot be used; an activation is not finite.
    """
    observer = ExpertUnitObserver(checkpoint, experts) if experts else UnitObserver(checkpoint.layout.ffns)
    runner, batches = runner_and_batches(checkpoint, data, run.running, run.say, whole=bool(experts))
    observe_batches(runner, observer, batches, "activations", run.progress)
    examples, fields = num_examples(batches), observer.take()
    return scores_of(checkpoint, kind="unit", method=metric, examples=examples, per="token", **fields)


class UnitObserver(TokenObserver):
    """Sums the squared activations of hidden units over real tokens.

    Args:
        layers: the FFNs of the checkpoint.
    """

    def __init__(self, layers: Sequence[FfnLayer] = ()) -> None:
        self._layers = layers
        self._sums: dict[Any, tuple[Any, int]] = {}

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of each output layer."""
        for layer in self._layers:
            if layer.has_tensors and not layer.is_sparse:
                output = submodule(model, layer.output)
                yield output.register_forward_pre_hook(partial(self._given, axis_name(layer.name, "unit"), 1))

    def sums(self) -> dict[Any, tuple[Tensor, int]]:
        """Name of an axis -> sums `[units]`, and number of tokens."""
        return self._sums

    def take(self) -> dict[str, Any]:
        """Return the fields `ids`, `values` and `counts` of `Scores`.

        Raises:
            PruneError: an activation was not finite.
        """
        fields: dict[str, dict[str, Any]] = {"ids": {}, "values": {}, "counts": {}}
        for name, (own, tokens) in self.sums().items():
            values = own.tolist()
            if not np.isfinite(values).all():
                raise PruneError(
                    f"{module_of(name)}: the activation of a hidden unit is not finite.",
                    "The weights are damaged, or overflow the type they are run in: choose by norms.",
                )
            fields["ids"][name], fields["values"][name] = [*range(len(values))], values
            fields["counts"][name] = tokens
        return fields

    def _given(self, name: str, blocks: int, _module: Any, inputs: tuple[Tensor, ...]) -> None:
        if REHEARSING.get():
            return
        rows = self.real(inputs[0])
        # Of several experts that serve every token, side by side, each has every unit.
        self._add(name, rows.reshape(-1, rows.shape[-1] // blocks))

    def _add(self, place: Hashable, rows: Tensor) -> None:
        own, tokens = self._sums.get(place, (0, 0))
        self._sums[place] = own + rows.float().square().sum(dim=0).double(), tokens + len(rows)


class ExpertUnitObserver(UnitObserver):
    """Sums the squared, weighted activations of experts' hidden units over real tokens.

    Args:
        checkpoint: the model's.
        axes: hidden units of experts.
    """

    def __init__(self, checkpoint: Checkpoint, axes: Sequence[Axis]) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._axes: dict[Any, str] = _units_of_experts(checkpoint, axes)
        self._units = axes

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """See `Observer`."""
        with own_experts(model) as modules, super().watching(model):
            for number, module in enumerate(modules.values()):
                module.watcher = partial(self._routed, number)
            yield

    def hooks(self, model: Any) -> Iterator[RemovableHandle]:
        """Watch the input of the output layer of experts that serve every token."""
        names = StockNames(self._checkpoint, model)
        routed = {*self._axes.values()}
        for axis in (axis for axis in self._units if axis.name not in routed):
            (output, *_) = outputs(axis.carriers)
            module = model.get_submodule(module_of(names.place(output)))
            blocks = len(axis.carriers[output].blocks)
            yield module.register_forward_pre_hook(partial(self._given, axis.name, blocks))

    def sums(self) -> dict[Any, tuple[Tensor, int]]:
        """See `UnitObserver`; an expert that no token was sent to has zeros, and counts one token."""
        found = {axis.name: (torch.zeros(axis.count, dtype=torch.float64), 0) for axis in self._units}
        for place, (own, tokens) in self._sums.items():
            name = self._axes.get(place, place)
            before, earlier = found[name]
            found[name] = before + own.cpu(), earlier + tokens
        return {name: (own, max(tokens, 1)) for name, (own, tokens) in found.items()}

    def _routed(self, number: int, expert: int, hidden: Tensor, tokens: Tensor, weights: Tensor) -> None:
        real = self.mask.reshape(-1).to(tokens.device)[tokens]
        self._add((number, expert), (hidden * weights[:, None])[real])
