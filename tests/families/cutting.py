"""Tiny models of found families, cut along their axes by prunecli and compared with themselves masked."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prunecli import load_model
from prunecli.errors import PruneError, UsageError
from prunecli.methods.sharing.options import AttentionOptions, FfnOptions
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.names import with_new_ending
from prunecli.model.patchwork import module_name
from prunecli.model.probe import UNSTATED, outputs
from prunecli.model.small_model import fold_norms, stream_norms
from prunecli.model.stock import uniform_heads
from prunecli.modules.stock_names import StockNames
from prunecli.selection.cut import Selection
from tests.contracts.method_contract import written
from tests.families import tiny
from tests.reference.masks import passed_by
from tests.selections import kept_experts

KINDS = ("layer", "unit", "head", "channel")


def saved(model_type: str, directory: Path | str, head: str | None = None) -> PreTrainedModel:
    model = tiny.build(model_type, head=head)
    model.save_pretrained(directory)
    return model


def axes_found(checkpoint: Checkpoint) -> dict[str, list[Axis]]:
    """Kind, or "expert unit" -> axes that can lose units; without kinds that are refused."""
    found = {}
    for kind in KINDS:
        with suppress(PruneError):
            for axis in axes_of(checkpoint, kind):
                if axis.carriers or axis.members:
                    found.setdefault("expert unit" if kind == "unit" and axis.keys else kind, []).append(axis)
    return found


def stays_stock(checkpoint: Checkpoint, kind: str) -> bool:
    """Whether the stock class opens a model whose layers all keep as many units."""
    widths = {stack.ffn.width for stack in checkpoint.require_architecture().stacks}
    return {"head": bool(uniform_heads(checkpoint)), "unit": UNSTATED not in widths}.get(kind, True)


def can_differ(checkpoint: Checkpoint, kind: str) -> bool:
    """Whether each layer may keep another number of units."""
    stacks, found = checkpoint.require_architecture().stacks, checkpoint.require_architecture().found
    keys = {
        "unit": [stack.ffn.width for stack in stacks],
        "head": [attention.heads for stack in stacks for attention in stack.attentions],
    }
    return bool(set(keys.get(kind, ())) & found.uneven.keys())


def kept_of(
    checkpoint: Checkpoint, axes: Sequence[Axis], layer: int, *, uneven: bool = False
) -> dict[str, tuple[int, ...]]:
    """Half of the units of each axis of one kind, by chance but the same number in each; all layers but one.

    Args:
        uneven: of each axis another number of units, where that can be.
    """
    generator = torch.Generator().manual_seed(3)
    kept = {}
    found = checkpoint.require_architecture().found
    for number, axis in enumerate(axes):
        if axis.kind == "layer":
            gone = layer % len(axis.ids)
            kept[axis.name] = tuple(one for one in axis.ids if one != gone or len(axis.ids) < 2)
            continue
        held = len(axis.ids)
        if uneven and not axis.keys and can_differ(checkpoint, axis.kind):
            least = 1 if axis.kind == "unit" else max(units.least for units in found.uneven.values())
            count = least + number % (held - least)
        else:
            able = uniform_heads(checkpoint) if axis.kind == "head" else range(1, held + 1)
            count = max(number for number in able if number <= max(held // 2, 1))
            if axis.keys:  # transformers' grouped product takes rows of 16 bytes
                count = max(count // 4 * 4, min(held, 4))
        drawn = torch.randperm(held, generator=generator)[:count].tolist()
        kept[axis.name] = tuple(axis.ids[place] for place in sorted(drawn))
    return kept


def apart(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    axes: Sequence[Axis],
    output: Path | str,
    layer: int = 1,
    *,
    uneven: bool = False,
) -> float:
    """Largest difference between the cut model's logits and those of the masked one, over these' spread.

    Args:
        axes: to be cut together.
        output: where the result is written.
        layer: that goes of each stack, where stacks are among the axes.
        uneven: see `kept_of`; the result is then opened by prunecli.

    Raises:
        PruneError: prunecli refuses.
    """
    kept = kept_of(checkpoint, axes, layer, uneven=uneven)
    written(checkpoint, Selection(kept, step={"command": "test"}), output)
    reduced, told = load_model(output, device="cpu"), {}
    if not uneven:
        reduced, told = type(model).from_pretrained(output, output_loading_info=True)
    assert not any(told.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = stored(model)
    skipped, found = [], checkpoint.require_architecture().found
    for axis in axes:
        gone = [place for place, unit in enumerate(axis.ids) if unit not in kept[axis.name]]
        if axis.kind == "layer":
            (stack,) = [one for one in found.layers if axis.members.startswith(f"{one.prefixes[0]}.")]
            skipped += [f"{stack.modules[0]}.{place}" for place in gone]
        width = {
            name: state[name].shape[carrier.dim] // len(axis.ids) for name, carrier in axis.carriers.items()
        }
        for name, carrier in axis.carriers.items() if axis.keys else ():
            rows = [
                row
                for each in carrier.ranges(gone, state[name].shape[carrier.dim], len(axis.ids))
                for row in range(*each)
            ]
            state[name].index_fill_(carrier.dim, torch.tensor(rows, dtype=torch.long), 0)
        # What other units write is masked where it is read.
        for name in () if axis.keys else outputs(axis.carriers):
            rows = [place * width[name] + row for place in gone for row in range(width[name])]
            state[name].index_fill_(axis.carriers[name].dim, torch.tensor(rows, dtype=torch.long), 0)
    other = opened(model, checkpoint, state)
    rows = tiny.inputs(other)
    with ExitStack() as hooks:
        for axis in axes:
            if axis.kind == "channel":
                names = StockNames(checkpoint, other)
                norms = stream_norms(other, {names.parameter(name) for name in axis.carriers})
                gone = sorted({*axis.ids}.difference(kept[axis.name]))
                hooks.enter_context(fold_norms(norms, kept[axis.name], gone))
        # The layers stay in their lists: many classes look up by position what else a layer is given.
        hooks.enter_context(passed_by(other, skipped))
        expected = logits(other, rows)
    return difference(expected, logits(reduced.eval(), rows))


def some_experts(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Other experts in every layer, as many in each; of each group as many."""
    kept = {}
    for number, layer in enumerate(checkpoint.mixtures):
        width = layer.num_experts // layer.groups.count
        left = width - max(2 // layer.groups.count, 1)
        kept[layer.name] = tuple(
            group * width + place
            for group in range(layer.groups.count)
            for place in sorted((number + group + step) % width for step in range(left))
        )
    return kept


@contextmanager
def without_experts(
    model: PreTrainedModel, checkpoint: Checkpoint, kept: Mapping[str, tuple[int, ...]]
) -> Iterator[None]:
    """Inside, the dropped experts' router logits, and correction biases, are minus infinity."""
    values = dict((*model.named_parameters(), *model.named_buffers()))
    dropped = {}
    names = StockNames(checkpoint, model)
    for layer in checkpoint.mixtures:
        gone = [number for number in range(layer.num_experts) if number not in kept[layer.name]]
        for name in layer.cut:
            if name in layer.stacked_tensors:
                continue
            own = values[names.parameter(name)]
            if name in layer.router_tensors and own.dim() == 2:
                dropped[id(own)] = gone
            else:
                own.data[(*[slice(None)] * (own.dim() - 1), gone)] = -torch.inf
    used = set()
    stock = functional.linear

    def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result = stock(hidden, weight, bias)
        if id(weight) in dropped:
            used.add(id(weight))
            result[..., dropped[id(weight)]] = -torch.inf
        return result

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = stock
    assert used == set(dropped)


def experts_apart(model: PreTrainedModel, checkpoint: Checkpoint, output: Path) -> float:
    """Difference for a model without some experts of each layer, whose routers never choose them.

    Raises:
        PruneError: prunecli refuses.
    """
    kept = some_experts(checkpoint)
    written(checkpoint, kept_experts(kept), output)
    reduced, told = type(model).from_pretrained(output, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    other = opened(model, checkpoint, stored(model))
    rows = tiny.inputs(other)
    whole = logits(other, rows)
    with without_experts(other, checkpoint, kept):
        expected = logits(other, rows)
    assert not torch.equal(whole, expected)
    return difference(expected, logits(reduced.eval(), rows))


def treated_apart(
    model: PreTrainedModel, checkpoint: Checkpoint, part: str, treatment: str, output: Path | str
) -> float:
    """Difference for a model whose layers all run the first one's FFN, or self-attention, by what is copied.

    Args:
        treatment: "share"; or "drop": no layer has any, by what is zero.

    Raises:
        PruneError: prunecli refuses.
    """
    layout, sides = checkpoint.layout, {stack.side for stack in checkpoint.require_architecture().stacks}
    treated = dict.fromkeys(sides, treatment)
    if treatment == "share":
        treated["init"] = "first"
    options = FfnOptions(dense_only=True, **treated) if part == "ffn" else AttentionOptions(**treated)
    written(checkpoint, options, output)
    state = stored(model)
    names = {layer.name: layer.tensor_names for layer in (*layout.ffns, *layout.attentions)}
    result = open_model(output)
    shared, removed = result.structure.shared, result.structure.removed
    parts = [one for one in (*result.layout.ffns, *result.layout.attentions) if one.removed]
    norms = {name.rpartition(".")[0] for one in parts for name in one.norm_tensors}
    for name, owner in shared.items():
        state |= {own: state[other] for own, other in zip(names[name], names[owner], strict=True)}
    for name in removed:
        state |= {own: torch.zeros_like(state[own]) for own in names[name]}
    if not shared and not removed:
        raise UsageError("no two layers are alike")
    other = opened(model, checkpoint, state)
    rows = tiny.inputs(other)
    with passed_by(other, [module_name(other, name) for name in norms]):  # those behind the addition go too
        expected = logits(other, rows)
    return difference(expected, logits(load_model(output, device="cpu"), rows))


def stored(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Copies of a model's tensors by their names in files; ESM's class writes the older names of norms."""
    state = revert_weight_conversion(model, dict(model.state_dict()))
    return {with_new_ending(name): value.clone() for name, value in state.items()}


def opened(model: PreTrainedModel, checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A model like this one of other tensors."""
    held = {name: value for name, value in state.items() if name in checkpoint.tensors}
    other = type(model).from_pretrained(None, config=model.config, state_dict=held)
    return other.eval()


def outcome(model_type: str, directory: Path) -> dict[str, str | float]:
    """Removed or shared parts -> difference, or the reason of the refusal; each alone. Tokens are found, not cut."""
    model = saved(model_type, directory / "model")
    told = {}
    checkpoint = open_model(directory / "model")
    found = axes_found(checkpoint)
    for kind, axes in found.items():
        for layer in (1, 0, 2) if kind == "layer" else (0,):
            try:
                if stays_stock(checkpoint, kind):
                    told[kind] = apart(model, checkpoint, axes, directory / f"{kind}{layer}", layer)
                break
            except (PruneError, ValueError) as error:  # a class may need layers of each kind to answer
                told[kind] = str(error)
        if can_differ(checkpoint, kind):
            output = directory / f"uneven {kind}"
            try:
                told[f"uneven {kind}"] = apart(model, checkpoint, axes, output, uneven=True)
            except PruneError as error:
                told[f"uneven {kind}"] = str(error)
    try:
        if checkpoint.mixtures:
            told["expert"] = experts_apart(model, checkpoint, directory / "experts")
    except PruneError as error:
        told["expert"] = str(error)
    for treatment, part in product(("share", "drop"), ("ffn", "attention")):
        try:
            told[f"{treatment} {part}"] = treated_apart(
                model, checkpoint, part, treatment, directory / f"{treatment} {part}"
            )
        except PruneError as error:
            told[f"{treatment} {part}"] = str(error)
    with suppress(PruneError):
        (axis,) = axes_of(checkpoint, "token")
        told["token"] = 0.0 if axis.carriers else "no tensor of tokens"
    return told


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest, over the spread of the first."""
    return float((expected - found).abs().max() / expected.std())


def logits(model: PreTrainedModel, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[rows, tokens, vocabulary]`, without a cache where the class has one."""
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        return model(**rows, **cache).logits
