"""A class of transformers that is asked what a model is made of, and what a small copy of the model confirms.

Where no key moves heads alone, because the width of a head follows from their number, the small copy is watched as it
runs: the linear layers of an attention make queries, keys and values, and the last one mixes the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from json import dumps
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prunecli.architectures.records import (
    Carrier,
    Mixture,
    Stack,
)
from prunecli.errors import UnsupportedModelError, kind_and_reason
from prunecli.model.axes import module_of
from prunecli.model.found_experts import found_mixture
from prunecli.model.probe import (
    UNSTATED,
    VOCABULARY,
    WIDTH,
    LayerKey,
    UnitKeys,
    channel_keys,
    head_counts,
    head_keys,
    is_key_value,
    is_of_experts,
    layer_keys,
    numbers,
    outputs,
    owners,
    shared_keys,
    unit_owner,
    width_keys,
    with_scaled,
    without_tables,
)
from prunecli.model.skeleton import Skeleton, known_skeleton, skeleton_of, transformers_takes
from prunecli.model.small_copy import few_experts, shallow_towers
from prunecli.model.small_model import ATTENTION
from prunecli.model.trial import NEAR, Trial
from prunecli.tensors.json_files import parsed

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

Value = TypeVar("Value")
Carriers = Mapping[str, Carrier]
"""Name of a tensor -> where units lie in it."""
Placed = list[tuple[UnitKeys, Carriers]]
"""Units of each key, and where they lie."""
REMEDY = "inspect, evaluate and bench-latency work all the same."

Options = dict[str, tuple[Carrier, ...]]
Uneven = dict[str, Callable[[], UnitKeys | None]]
"""Key of heads or hidden units -> these, if each layer may keep another number: tried when it is asked."""
Candidate = tuple[UnitKeys, UnitKeys, Carriers, Mapping[str, str], int]
"""Units of the model; those of the small one, their carriers and the axis of each; how many a layer keeps at least."""
_SIDES = ("encoder", "decoder")


@dataclass(frozen=True)
class Probed:
    """A class that can be asked.

    Attributes:
        whole: skeleton of the model.
        skeleton: skeleton with few experts: names in files take long if there are thousands.
        layers: stacks of the model.
        trial: small copy of the model.
        removable: stack -> the same with notes which of its FFN and attentions the small copy runs without.
    """

    whole: Skeleton
    skeleton: Skeleton
    layers: list[LayerKey]
    trial: Trial
    removable: dict[Stack, Stack] = field(default_factory=dict)

    @cached_property
    def mixture(self) -> Mixture:
        """How the class stores its mixtures of experts.

        Raises:
            NotFoundError: as `found_mixture`.
            Exception: of any kind: transformers opens no smaller model.
        """
        return found_mixture(self.whole, self.skeleton, self.trial)

    @cached_property
    def small(self) -> dict[str, LayerKey]:
        """Key -> stack of the small copy."""
        return {stack.key: stack for stack in self.trial.stacks}

    @cached_property
    def movable(self) -> frozenset[str]:
        """Keys of the stacks whose layers the small copy can lose."""
        known = [self.small[stack.key] for stack in self.layers if stack.key in self.small]
        return frozenset(small.key for small in known if _is_same(self.trial, small))

    @cached_property
    def units(self) -> Confirmed:
        """The hidden units, heads and tokens that the small copy can lose."""
        trial, skeleton = self.trial, self.skeleton
        uneven: Uneven = {}
        widths = _tried(
            trial,
            width_keys(skeleton, WIDTH),
            trial.widths,
            lambda own: {name: unit_owner(name) for name in own},
            uneven,
        )
        heads = _tried(trial, head_keys(skeleton), trial.heads, owners, uneven, 0)
        heads = sorted(heads, key=lambda one: -len(one[1]))[:1]  # others are of linear attentions
        is_traced = not heads
        short = [self.small[stack.key] for stack in self.layers if stack.key in self.small]
        if len(short) == len(self.layers):
            placed = partial(_in_like_layers, skeleton, self.layers, short)
            heads = heads or _traced(trial, _heads_alone(trial, skeleton, short), placed, uneven)
            units = _widths_alone(trial, skeleton, short, placed)
            widths = widths or _traced(trial, units, placed, uneven)
        tokens = _tried(trial, width_keys(skeleton, VOCABULARY), trial.tokens, lambda _: {}, {})
        return Confirmed(widths, heads, tokens, uneven, is_traced)

    @cached_property
    def channels(self) -> tuple[UnitKeys, Carriers]:
        """The channels of the residual stream that the small copy can lose, and where they lie.

        Raises:
            UnsupportedModelError: it can lose none.
        """
        fault = "other sizes go with their number, such as the width of a head, or that of a part for images"
        for small in channel_keys(self.trial.skeleton):
            try:
                apart = self.trial.of_channels(small, small.layouts[0])
                fault = f"the logits differ by {apart:.0%} of what the channels make: something depends on their number"
            except Exception as error:  # of any kind: transformers opens no such model
                apart, fault = inf, kind_and_reason(error)
            for units in channel_keys(self.whole) if apart < NEAR else ():
                if (units.keys, [*units.stated]) == (small.keys, [*small.stated]):
                    return units, units.layouts[0]
        raise UnsupportedModelError(
            f"a small copy of the model cannot lose channels of its hidden states: {fault}"
        )

    def with_channels(self, config: Mapping[str, Any], count: int) -> dict[str, Any]:
        """config.json of the model with so many channels.

        Raises:
            CheckpointError: transformers refuses it.
        """
        changed = replace(self.whole, config=config).settled(self.channels[0].changes(count))
        with transformers_takes("config.json"):
            replace(self.whole, config=changed).shapes  # noqa: B018
        return changed


class Confirmed(NamedTuple):
    """Units that a small copy of a model confirms.

    Attributes:
        widths: hidden units of each key, and where they lie.
        heads: heads of each key, and where they lie.
        tokens: tokens of each key, and where they lie.
        uneven: see `Found`.
        is_traced: whether the width of a head follows from their number, so that no stock config says fewer.
    """

    widths: Placed
    heads: Placed
    tokens: Placed
    uneven: Uneven
    is_traced: bool


def probed(checkpoint: Checkpoint) -> Probed:
    """The class of a model, and a small copy.

    Raises:
        UnsupportedModelError: transformers has no such class, cannot build it, or nothing is found.
        CheckpointError: config.json names no type.
    """
    whole = skeleton_of(checkpoint)
    where = f'{checkpoint.path}: the model family "{checkpoint.model_type}" is not supported'
    try:
        return _asked(whole.model_class, whole.config_class, dumps(whole.config))
    except Exception as error:  # of any kind: what a class makes of its config
        if (taken := whole.model_class.main_input_name) != "input_ids":
            raise UnsupportedModelError(
                f"{where}: it takes {taken}, not tokens", "Give a model of text."
            ) from error
        raise UnsupportedModelError(f"{where} ({kind_and_reason(error)})", REMEDY) from error


@lru_cache(maxsize=8)  # a command opens a model, and its result, several times
def _asked(model_class: Any, config_class: Any, config: str) -> Probed:
    whole = known_skeleton(model_class, config_class, parsed(config))
    many = {key: few for key, value in numbers(whole.effective) if (few := few_experts(key, value)) != value}
    tried = ({**many, **shallow_towers(whole.effective)}, many)
    skeleton = next(filter(None, (whole.changed(changes) for changes in tried if changes)), whole)
    layers = layer_keys(skeleton)
    return Probed(whole, skeleton, layers, Trial.of(skeleton, layers))


def _tried(
    trial: Trial,
    found: Sequence[UnitKeys],
    small: Sequence[UnitKeys],
    axes: Callable[[Carriers], Mapping[str, str]],
    uneven: Uneven,
    least: int = 1,
) -> Placed:
    """Return the units that the small model confirms, in the layout in which it confirms them.

    Args:
        uneven: takes what asks whether each layer may have another number of units.
        least: units that a layer keeps at least.
    """
    confirmed: Placed = []
    by_keys = {frozenset(units.keys): units for units in small}
    for units in found:
        if (own := by_keys.get(frozenset(units.keys))) is None:
            continue
        for number, layout in enumerate(own.layouts):
            with suppress(Exception):  # of any kind: transformers opens no such model
                if trial.of_units(own, layout, axes(layout)) < NEAR:
                    confirmed.append((units, units.layouts[min(number, len(units.layouts) - 1)]))
                    if not is_of_experts(layout):
                        uneven[[*units.keys][-1]] = _uneven(units, trial, own, layout, axes(layout), least)
                    break
        else:
            layout = without_tables(own.layouts[-1])
            own = replace(own, biased=len(layout) < len(own.carriers))
            asked = _uneven(units, trial, own, layout, axes(layout), least)
            if own.biased and asked() is not None:
                confirmed.append((replace(units, biased=True), without_tables(units.layouts[-1])))
                uneven[[*units.keys][-1]] = asked
    return confirmed


def _traced(
    trial: Trial, candidates: Iterable[Candidate], placed: Callable[[Carriers], Carriers], uneven: Uneven
) -> Placed:
    """Units of which each layer may keep another number: the first of each key that the small model confirms.

    Args:
        placed: returns the carriers of the model by those of the small one.
        uneven: see `_tried`.
    """
    confirmed: Placed = []
    for units, small, layout, axes, least in candidates:
        asked = _uneven(units, trial, small, layout, axes, least)
        if (key := [*units.keys][-1]) not in uneven and asked() is not None:
            confirmed.append((units, placed(layout)))
            uneven[key] = asked
    return confirmed


def _heads_alone(trial: Trial, skeleton: Skeleton, layers: Sequence[LayerKey]) -> Iterator[Candidate]:
    """Heads whose width follows from their number.

    Args:
        layers: of the small model.
    """
    for small in _traced_heads(trial, layers):
        counts, key = head_counts(skeleton.effective), [*small.keys][-1]
        keys = {name: counts[name] // counts[key] for name in small.keys}
        units = with_scaled(UnitKeys(keys, counts[key], {}), skeleton)
        for layout, biased in product(small.layouts, (False, True)) if units.scaled else ():
            yield replace(units, biased=biased), replace(small, biased=biased), layout, owners(layout), 0


def _widths_alone(
    trial: Trial, skeleton: Skeleton, layers: Sequence[LayerKey], placed: Callable[[Carriers], Carriers]
) -> Iterator[Candidate]:
    """Hidden units whose number follows from other sizes.

    Args:
        layers: of the small model.
        placed: see `_traced`.
    """
    carriers: Options = {}
    for module in _modules(layers):
        attentions = tuple(f"{one}." for one in _attentions(trial.model.get_submodule(module), module))
        within = [name for name in trial.linears if name.startswith(f"{module}.")]
        carriers |= _carriers(trial, [name for name in within if not name.startswith(attentions)])
    own = UnitKeys({UNSTATED: 1}, 0, _in_files(trial, carriers))
    for layout in own.layouts if own.carriers else ():
        small_sizes, sizes = (
            {shapes[name][found[name].dim] for name in outputs(found)}
            for shapes, found in ((trial.skeleton.stored, layout), (skeleton.stored, placed(layout)))
        )
        if len(small_sizes) == len(sizes) == 1:
            units, small = (replace(own, held=held.pop()) for held in (sizes, small_sizes))
            yield units, small, layout, {name: unit_owner(name) for name in layout}, 1


def _in_like_layers(
    skeleton: Skeleton, layers: Sequence[LayerKey], small_layers: Sequence[LayerKey], small: Carriers
) -> dict[str, Carrier]:
    """Carriers of the model, by those of its small copy: in each layer that has the tensors of one of the copy's."""
    found: dict[str, Carrier] = {}
    for stack, short in zip(layers, small_layers, strict=True):
        kept = stack.samples if short.depth < stack.depth else range(stack.depth)
        for prefix in stack.prefixes:
            tensors = [_of_module(f"{prefix}.{number}", skeleton.stored) for number in range(stack.depth)]
            for place, number in enumerate(kept):
                own = _of_module(f"{prefix}.{place}", small)
                for other in range(stack.depth):
                    if tensors[other] == tensors[number]:
                        # A list of numbers of layers, such as Mllama's, may have that layer elsewhere in the copy.
                        found |= {
                            f"{prefix}.{other}.{name}": carrier
                            for name, carrier in own.items()
                            if name in tensors[other]
                        }
    return found


def _of_module(module: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """By the names within a module."""
    start = f"{module}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def _uneven(
    units: UnitKeys, trial: Trial, small: UnitKeys, layout: Carriers, axes: Mapping[str, str], least: int
) -> Callable[[], UnitKeys | None]:
    """Return a function that tries, once, whether layers may keep different numbers of units, and how many at least."""

    @cache
    def asked() -> UnitKeys | None:
        for count in range(least, 2) if axes else ():
            with suppress(Exception):  # as above
                if trial.of_uneven(small, layout, axes, count) < NEAR:
                    return replace(units, least=count)
        return None

    return asked


def _is_same(trial: Trial, stack: LayerKey) -> bool:
    for gone in (1, 0, stack.depth - 1):  # a class may need layers of each kind, or count them
        with suppress(Exception):  # as above
            if trial.of_layers(stack, [number for number in range(stack.depth) if number != gone]) < NEAR:
                return True
    return False


def _traced_heads(trial: Trial, layers: Sequence[LayerKey]) -> list[UnitKeys]:
    """The heads of a small model, by the key that counts them; `carriers` by the names in files.

    Args:
        layers: of the model.
    """
    found = []
    every = head_counts(trial.skeleton.effective)
    counts = {key: count for key, count in every.items() if not is_key_value(key)}
    for key, queries in counts.items():
        shared = next((one for one in shared_keys(every, key) if 1 < every[one] < queries), None)
        held = queries if shared is None else every[shared]
        keys = {key: 1} if shared is None else {key: queries // held, shared: 1}
        units = with_scaled(UnitKeys(keys, held, {}), trial.skeleton)
        if not units.scaled or units.held < 2:
            continue
        carriers: Options = {}
        for module in _modules(layers):
            # Where both stacks have a key of their own, its name says which.
            others = [
                other for other in counts if other != key and any(s in other and s in module for s in _SIDES)
            ]
            if not others:
                for own in _attentions(trial.model.get_submodule(module), module):
                    within = [name for name in trial.linears if name.startswith(f"{own}.")]
                    carriers |= _carriers(trial, within, own, units.held, queries)
        if stored := _in_files(trial, carriers):
            # A vector that is no layer's has entries of heads (DeBERTa), or is the bias of the output.
            plain = {name: own for name, own in stored.items() if name.endswith((".weight", ".bias"))}
            found += [
                replace(units, carriers=own) for own in ([stored] if plain == stored else [stored, plain])
            ]
    return found


def _modules(stacks: Iterable[LayerKey]) -> list[str]:
    """Names of the layers of a small model."""
    return [f"{one}.{number}" for stack in stacks for one in stack.modules for number in range(stack.depth)]


def _in_files(trial: Trial, carriers: Options) -> Options:
    """The carriers by the names in files; empty where these hold several of the tensors in one."""
    files = {name: file for file, name in trial.modules.items()}
    return {files[name]: own for name, own in carriers.items()} if files.keys() >= carriers.keys() else {}


def _attentions(module: Any, name: str) -> Iterator[str]:
    """Names of the outermost attentions within a module."""
    for piece, child in module.named_children():
        own = f"{name}.{piece}"
        if ATTENTION.search(piece) or ATTENTION.search(type(child).__name__):
            yield own
        else:
            yield from _attentions(child, own)


def _carriers(
    trial: Trial, linears: Sequence[str], attention: str = "", held: int = 1, heads: int = 1
) -> Options:
    """Return the positions of heads, or hidden units, in the linear layers of a part, of which the last mixes them.

    Empty if the shapes allow none.

    Args:
        attention: its name, if they are those of one.
        held: heads of keys and values.
        heads: of queries.
    """
    if len(linears) < 2:
        return {}
    found: Options = {}
    shapes = trial.skeleton.shapes
    *inputs, output = linears
    is_turned = type(trial.model.get_submodule(output)).__name__ == "Conv1D"  # its weight is [in, out]
    width = shapes[f"{output}.weight"][0 if is_turned else 1]
    found[f"{output}.weight"] = (Carrier(0 if is_turned else 1),)
    for name in inputs:
        dim = 1 if is_turned else 0
        length = shapes[f"{name}.weight"][dim]
        # Queries, or keys or values; all three, or two of them.
        counts = {heads: (1,), held: (1,), 2 * heads: (1, 1), heads + 2 * held: (heads // held, 1, 1)}
        parts, rest = divmod(length * heads, width)
        tail = 2 if parts == heads + 2 and parts not in counts else 0  # one key and value for all
        blocks = counts.get(parts - tail, ())
        if not blocks or rest or width % heads:
            return {}
        for tensor, axis in ((f"{name}.weight", dim), (f"{name}.bias", 0)):
            if tensor in shapes:
                tried = Carrier(axis, tail=tail), Carrier(axis, blocks, tail)
                found[tensor] = tried[: min(len(blocks), 2)]
    for name, shape in shapes.items() if attention else ():
        owner = module_of(name)
        if not name.startswith(f"{attention}.") or owner in linears:
            continue
        # A tensor as long as there are heads may be a norm over the width of one where both are the same.
        if heads in shape and width != heads * heads:
            found[name] = (Carrier(shape.index(heads)),)
        # A vector beside linear layers may be a bias of theirs.
        elif shape == (width,) and [*trial.model.get_submodule(owner).children()]:
            found[name] = (Carrier(0),)
    return found
