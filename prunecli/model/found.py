"""The record of a family, found by asking its class and tried on a small copy of the model."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.nn import Embedding

from prunecli.architectures.mixtures import experts_alone
from prunecli.architectures.records import (
    Architecture,
    Attention,
    Carrier,
    FeedForward,
    Mixture,
    ModelClass,
    Side,
    Stack,
    TensorSpec,
    TokenEmbedding,
)
from prunecli.errors import UnsupportedModelError, kind_and_reason
from prunecli.model.axes import module_of
from prunecli.model.declared import TIE_KEY, value_of, with_keys
from prunecli.model.depth import DEPTH_ALIAS
from prunecli.model.found_experts import NotFoundError
from prunecli.model.names import layer_of
from prunecli.model.parts import CROSS
from prunecli.model.patchwork import remove_attention, remove_ffn
from prunecli.model.probe import (
    HIDDEN,
    LayerKey,
    UnitKeys,
    by_layer,
    common_owner,
    head_counts,
    head_keys,
    is_of_experts,
    last_part,
    numbers,
    outer,
    outputs,
    owners,
    template_of,
)
from prunecli.model.probed import REMEDY, Carriers, Placed, Probed
from prunecli.model.skeleton import Changes, Shape, Skeleton, known_skeleton, transformers_takes
from prunecli.model.structure import Structure
from prunecli.model.trial import NEAR, Trial
from prunecli.private import UNEXPECTED

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

Value = TypeVar("Value")
Part = TypeVar("Part", Attention, FeedForward)
_NO_FFN = FeedForward("", "", (), ())


@dataclass(frozen=True)
class Found:
    """A class that was asked what a model is made of.

    Attributes:
        probed: the class, and the small copy.
        skeleton: of the model.
        layers: its stacks.
        movable: keys of those whose layers a small copy can lose.
        parts: names of the tensors of FFNs and attentions that can be cut.
        experts: key of the hidden units of experts, of which all keep as many -> name of a tensor without numbers, see
            `template_of` -> where they lie.
        structure: of the model.
    """

    probed: Probed
    skeleton: Skeleton
    layers: tuple[LayerKey, ...]
    movable: tuple[str, ...]
    parts: frozenset[str]
    experts: Mapping[str, Carriers]
    structure: Structure

    @cached_property
    def classes(self) -> tuple[ModelClass, ...]:
        """Classes that open the model."""
        return self.probed.trial.skeleton.opened_as

    @cached_property
    def embeddings(self) -> list[str]:
        """Names in files of the modules that are tables outside of the layers, and of the output layer."""
        model = self.skeleton.model
        output = model.get_output_embeddings()
        names = [name for name, one in model.named_modules() if isinstance(one, Embedding) or one is output]
        weights = [f"{name}.weight" for name in names if f"{name}.weight" in self.skeleton.shapes]
        stored = map(self.skeleton.stored_name, weights)  # MusicGen has a list of output layers
        return [name.removesuffix(".weight") for name in stored if not layer_of(name)]

    def unties(self, output: str) -> bool:
        """Whether `tie_word_embeddings` false says that the output layer has a table of its own, and nothing else.

        In BART's kin it would also part the encoder's table from the decoder's, in T5 it changes a factor.

        Args:
            output: name of the table that it would have.
        """
        trial = self.probed.trial
        return (output in trial.loose or output not in self.skeleton.tied) and trial.only_unties

    def ignores(self, name: str) -> bool:
        """Whether a tensor that the class does not have is a buffer of older ones, which changes nothing."""
        patterns = getattr(self.skeleton.model, UNEXPECTED) or ()
        return any(re.search(pattern, name) for pattern in (*patterns, r"\.(masked_bias|inv_freq)$"))

    @cached_property
    def uneven(self) -> Mapping[str, UnitKeys]:
        """Key of the heads or hidden units of which each layer may keep another number -> what it moves."""
        return {
            key: units for key, asked in self.probed.units.uneven.items() if (units := asked()) is not None
        }

    def tried(self, family: Architecture, structure: Structure) -> Architecture:
        """The record, after trials of what a model of this structure lacks: they cannot run while a model is built."""
        if structure.axes or structure.widths:
            self.uneven  # noqa: B018
        if not structure.removed:
            return family
        return replace(family, stacks=tuple(_with_notes(self.probed, stack) for stack in family.stacks))

    def holds(self, stack: Stack, structure: Structure, number: int, name: str) -> bool:
        """Whether a layer has a tensor of this name that can be cut.

        Args:
            structure: of a model with some of the layers.
            number: of the layer in that model.
            name: relative to the layer.
        """
        original = structure.original_layer(stack.side, number)
        while self.structure.original_layer(stack.side, number) != original:
            number += 1
        return f"{stack.layers.format(layer=number)}.{name}" in self.parts

    def stored(self, config: Mapping[str, Any], changes: Changes = MappingProxyType({})) -> dict[str, Shape]:
        """Name in files -> shape of each tensor of the model of this config with these values.

        Raises:
            CheckpointError: transformers cannot build it.
        """
        with transformers_takes("config.json"):
            own, changed = self.skeleton, with_keys(config, changes)
            return known_skeleton(own.model_class, own.config_class, changed).stored

    def may_keep(self, key: str, counts: Collection[int]) -> bool:
        """Whether layers may have these numbers of what this key of the config counts."""
        units = self.uneven.get(key)
        if units is None or min(counts) < units.least:
            return False
        try:
            for count in counts:
                self.skeleton.donor(units.donor(max(count, 1)))
        except ValueError:  # transformers refuses a model with so many
            return False
        return True

    def with_layers(self, config: Mapping[str, Any], kept: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """config.json of the model that has only these layers of the stacks under these keys."""
        skeleton = replace(self.skeleton, config=config)
        changes: dict[str, Any] = {}
        for stack in self.layers:
            if stack.key in kept:
                changes |= stack.changes(skeleton, kept[stack.key])
        found = skeleton.settled(changes)
        for stack in self.layers:
            numbers = kept.get(stack.key, ())
            for key, value in [*found.items()] if numbers and stack.key in stack.lists else ():
                # Where a list counts the layers, the class no longer reads these, and other programs do.
                if isinstance(value, str) and key.endswith("pattern") and len(value) == stack.depth:
                    found[key] = "".join(value[number] for number in numbers)
                elif key == DEPTH_ALIAS and value == stack.depth:
                    found[key] = len(numbers)
        return found

    def try_layers(self, kept: Mapping[str, Sequence[int]]) -> None:
        """Cut a small copy of the whole depth to these layers, and compare.

        Raises:
            UnsupportedModelError: it is not what the copy computes that skips the others.
        """
        last = _last_with_images(self.skeleton.effective)
        for stack in self.layers:
            own = kept.get(stack.key, range(stack.depth))
            if len(own) == stack.depth:
                continue
            if not {*range(last + 1)} <= {*own}:
                raise UnsupportedModelError(
                    f"the model adds features of images to the hidden states by the numbers of the layers 0 to {last}",
                    "Keep these layers: `remove` names the others.",
                )
            try:
                trial = Trial.of(self.skeleton, self.layers, whole=True)
                small = next(one for one in trial.stacks if one.key == stack.key)
                apart = trial.of_layers(small, own)
            except Exception as error:  # as above
                raise UnsupportedModelError(
                    f"a small copy of the model cannot lose these layers ({kind_and_reason(error)})",
                    "Remove others: `remove` names them.",
                ) from error
            if apart > NEAR:
                raise UnsupportedModelError(
                    "a small copy of the model computes something else without these layers than when it skips them "
                    f"(by {apart:.0%} of what they do): what a layer does depends on its number",
                    "Remove others: `metric=last` removes the last ones.",
                )


def found_experts(checkpoint: Checkpoint) -> Architecture:
    """Return the record of a model's experts that a class of transformers has.

    Raises:
        UnsupportedModelError: as `probed`; or what is found of them is not confirmed.
        CheckpointError: config.json names no type.
    """
    own = checkpoint.probed
    try:
        mixture = own.mixture
    except Exception as error:  # of any kind: transformers opens no smaller model
        reason = str(error) if isinstance(error, NotFoundError) else kind_and_reason(error)
        raise UnsupportedModelError(
            f"{checkpoint.path}: experts of a model of type {checkpoint.model_type} cannot be removed: {reason}"
        ) from error
    skeleton = own.whole
    return experts_alone(
        checkpoint.model_type, skeleton.model_class.__name__, mixture, opened_by=skeleton.auto_class
    )


def found_family(checkpoint: Checkpoint) -> Architecture:
    """Return the record of a model's layers, hidden units, heads and tokens that a class of transformers has.

    Only what a small random copy of the model confirms is in it. The result has to be a stock model.

    Raises:
        UnsupportedModelError, CheckpointError: as `probed`.
    """
    own = checkpoint.probed
    whole, skeleton, layers = own.whole, own.skeleton, own.layers
    if not layers:
        raise UnsupportedModelError(
            f'{checkpoint.path}: the model family "{checkpoint.model_type}" is not supported: no key of its '
            "config.json says how many layers it has",
            REMEDY,
        )
    widths, heads, tokens, _, is_traced = own.units
    if whole_heads := _of_one_head(checkpoint.structure, skeleton):
        heads = whole_heads
    is_counted = bool(heads) and not (is_traced or whole_heads or heads[0][0].biased)
    units = heads[0][0] if is_counted else UnitKeys({}, 0, {})
    takes_any = units.held < 3 or skeleton.changed(units.changes(units.held - 1)) is not None
    movable = tuple(
        stack.key
        for stack in layers
        if stack.key in own.movable
        # The class does not have layers that predict further tokens: nothing would say which number they get.
        and not any(
            name.startswith(f"{prefix}.{stack.depth}.")
            for prefix in stack.prefixes
            for name in checkpoint.tensors
        )
    )
    values = skeleton.effective
    stacks = _stacks(own, widths, heads, None if checkpoint.family is None else checkpoint.family.mixture)
    if whole_heads:
        stacks = tuple(_with_whole_heads(stack) for stack in stacks)
    cut = dict(ChainMap(*(dict(carriers) for _, carriers in (*heads, *widths))))
    hidden = next((name for name, _ in numbers(values) if last_part(name) in HIDDEN), None)
    declared = checkpoint.family or Architecture(checkpoint.model_type, "", "")  # of its experts
    embedding, loose = _embedding(own, [name for _, carriers in tokens for name in carriers])
    return replace(
        declared,
        model_class=skeleton.model_class.__name__,
        auto_class=skeleton.auto_class,
        stacks=stacks,
        tied=_tied(whole, checkpoint),
        loose=loose,
        vocabulary=next((tuple(units.keys) for units, _ in tokens), ()),
        embedding=embedding,
        head_counts=tuple(units.keys),
        head_width=_width_key(values, units) if is_counted else None,
        heads_divide=None if takes_any else hidden,
        attributes={
            **dict(numbers(values)),
            **{one.key: value_of(values, one.key) for one in layers},
            TIE_KEY: bool(loose or values.get(TIE_KEY)),  # some configs do not have the key
            **declared.attributes,
            **{key: one.held for one, _ in widths for key in one.keys},
            **units.stated,
        },
        found=Found(
            own,
            whole,
            tuple(layers),
            movable,
            frozenset(cut).union(_beside(whole.stored, cut), _around(whole.stored, heads)),
            {
                [*units.keys][-1]: {template_of(name): carrier for name, carrier in carriers.items()}
                for units, carriers in widths
                if is_of_experts(carriers)
            },
            checkpoint.structure,
        ),
    )


def _last_with_images(values: Mapping[str, Any]) -> int:
    """Number of the last layer whose number says which features of images it gets; -1: there is none.

    A small copy is given no images, so that it cannot tell.
    """
    last = [_last_with_images(value) for value in values.values() if isinstance(value, Mapping)]
    last.append(len(values.get("deepstack_visual_indexes") or ()) - 1)  # for the first layers, one for each
    last += [number for _, number in values.get("deepstack_layer_map") or ()]
    last += values.get("spatial_target_layers") or ()
    return max(last)


def _of_one_head(structure: Structure, skeleton: Skeleton) -> Placed:
    """The heads of attentions that have one key/value head left each; empty if one has more.

    What looks like heads now are the query heads of that one. They are found in a model with twice as many of both.
    """
    left, counts = structure.of_kind("head"), head_counts(skeleton.effective)
    if not left or any(len(axis.kept) > 1 for axis in left.values()) or 1 not in counts.values():
        return []
    more = skeleton.changed({key: 2 * count for key, count in counts.items()})
    found = [(units, units.layouts[0]) for units in head_keys(more or skeleton)[:1]]
    known = {*left, *structure.shared, *structure.removed}
    return [(units, carriers) for units, carriers in found if known.issuperset(owners(carriers).values())]


def _with_whole_heads(stack: Stack) -> Stack:
    """The stack with attentions that can be shared and removed, and lose no heads."""
    attentions = (
        replace(one, tensors=tuple(replace(spec, units=None) for spec in one.tensors))
        for one in stack.attentions
    )
    return replace(stack, attentions=tuple(attentions))


def _tied(skeleton: Skeleton, checkpoint: Checkpoint) -> dict[str, str]:
    """Name that the files leave out -> the tied one that they hold."""
    tied, tensors = dict(skeleton.model.all_tied_weights_keys), checkpoint.tensors
    if not tensors and skeleton.config.get(TIE_KEY) is False:  # T5's class ties them all the same
        tied.pop("lm_head.weight", None)
    pairs = [(skeleton.stored_name(alias), skeleton.stored_name(name)) for alias, name in tied.items()]
    found = {alias: name for alias, name in pairs if alias not in tensors}
    if checkpoint.structure.embedding.is_stock:  # else another module may be in the place of the table
        found |= {name: alias for alias, name in pairs if alias in tensors and name not in tensors}
    return found


def _embedding(probed: Probed, tokens: Container[str]) -> tuple[TokenEmbedding | None, tuple[str, ...]]:
    """The table of the tokens and the output layer, and the aliases that `tie_word_embeddings` false parts.

    Args:
        tokens: names in files of the tensors with a row for each token.
    """
    skeleton, trial = probed.whole, probed.trial
    model = skeleton.model
    names = {id(module): name for name, module in model.named_modules()}
    with suppress(Exception):  # of any kind: some classes have no table, or several
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        own = f"{names[id(table)]}.weight"
        stored = skeleton.stored_name(model.all_tied_weights_keys.get(own, own))
        output = "" if head is None else skeleton.stored_name(f"{names[id(head)]}.weight")
        if stored in tokens:
            made = TokenEmbedding(
                stored.removesuffix(".weight"),
                output.removesuffix(".weight"),
                (skeleton.model_class.__name__,) if output else (),
            )
            return made, trial.loose
    return None, ()


def _stacks(
    probed: Probed,
    widths: Placed,
    heads: Placed,
    mixture: Mixture | None,
) -> tuple[Stack, ...]:
    """The deepest stack of each side, with the FFN and the attentions of its layers; the text model goes first."""
    skeleton, layers = probed.skeleton, probed.layers
    is_pair = bool(skeleton.effective.get("is_encoder_decoder"))
    by_side: dict[Side, Stack] = {}
    for stack in sorted(layers, key=lambda stack: (not stack.key.startswith("text_config."), -stack.depth)):
        if len(stack.prefixes) > 1:
            continue
        (prefix,) = stack.prefixes
        side: Side = "encoder" if (is_pair and "decoder" not in prefix) or skeleton.is_masked else "decoder"
        names = _within(prefix, skeleton.stored)
        ffns = (_ffn(probed.trial, prefix, names, units, carriers) for units, carriers in widths)
        sparse = _NO_FFN if mixture is None else _sparse_ffn(probed.trial, prefix, mixture)
        ffn = next(filter(None, ffns), sparse)
        attentions = [
            one
            for units, carriers in heads
            for one in _attentions(probed.trial, stack, skeleton.stored, units, carriers)
        ]
        layers_of = f"{prefix}.{{layer}}"
        by_side.setdefault(side, Stack(side, layers_of, stack.key, tuple(attentions), ffn, ()))
    return tuple(by_side[side] for side in ("encoder", "decoder") if side in by_side)


def _with_notes(probed: Probed, stack: Stack) -> Stack:
    if stack not in probed.removable:
        tried = _removable(probed.trial, stack)
        probed.removable.update({stack: tried, tried: tried})
    return probed.removable[stack]


def _removable(trial: Trial, stack: Stack) -> Stack:
    """The stack, and whether its FFN and attentions can go in a small copy, and which norms go with them."""
    within: dict[str, list[str]] = {}
    for names in by_layer(trial.modules, stack.layers.removesuffix(".{layer}")).values():
        for own, name in names.items():
            within.setdefault(own, []).append(name)
    norms: dict[str, list[str]] = {}
    for name, places in within.items():
        module = trial.model.get_submodule(module_of(trial.modules[places[0]]))
        if "norm" in type(module).__name__.lower():
            norms.setdefault(module_of(name), []).extend(places)

    def tried(part: Part, written: Iterable[str], remove: Callable[..., None]) -> Part:
        modules = {module_of(name) for name in written}
        masked = [place for name, places in within.items() if module_of(name) in modules for place in places]
        layers = {int(layer_of(name).rpartition(".")[2]) for name in masked}

        def without(model: Any, own: Sequence[str]) -> None:
            for layer in layers:
                remove(model, stack, replace(part, norms=tuple(own)), layer, trial.modules.__getitem__)

        with suppress(Exception):  # of any kind: what a class makes of it
            own, apart = trial.without(masked, norms, part.norms, without)
            if apart < NEAR:
                return replace(part, norms=tuple(own))
        return replace(part, removable=False)

    owner = f"{stack.ffn.name}." if stack.ffn.name else ""
    hidden = {owner + spec.name: spec.units for spec in stack.ffn.tensors if spec.units is not None}
    attentions = tuple(tried(one, [f"{one.output}.weight"], remove_attention) for one in stack.attentions)
    ffn = tried(stack.ffn, outputs(hidden), remove_ffn)
    own_norms = {*ffn.norms, *(norm for attention in attentions for norm in attention.norms)}
    specs = (TensorSpec(name, (), "norm") for name in within if module_of(name) in own_norms)
    return replace(stack, attentions=attentions, ffn=ffn, norms=tuple(specs))


def _within(prefix: str, carriers: Mapping[str, Value]) -> dict[str, Value]:
    """Names within a layer of a stack -> carrier."""
    layers = by_layer(carriers, prefix).values()
    return {own: carriers[name] for names in layers for own, name in names.items()}


def _beside(names: Iterable[str], carriers: Carriers) -> list[str]:
    """Names of the other tensors of the linear layers that have the carriers: the output's bias."""
    modules = {module_of(name) for name in carriers}
    return [name for name in names if module_of(name) in modules and name not in carriers]


def _around(names: Iterable[str], heads: Placed) -> Iterator[str]:
    """Names of all tensors of the attentions that have these heads: norms of a head, say."""
    attentions = {owner for _, carriers in heads for owner in owners(carriers).values()}
    for name in names:
        owner = name
        while owner and owner not in attentions:
            owner = module_of(owner)
        if owner:
            yield name


def _ffn(
    trial: Trial, prefix: str, names: Iterable[str], units: UnitKeys, carriers: Carriers
) -> FeedForward | None:
    own = _within(prefix, carriers)
    if not own or is_of_experts(own):
        return None
    owner = common_owner(module_of(name) for name in own)
    start = len(owner) + 1 if owner else 0
    (key,) = units.keys
    # The output layer comes last, see `output_layer`; of models with images the names are sorted.
    specs = [
        _spec(name[start:], "ffn", carrier)
        for name, carrier in sorted(own.items(), key=lambda item: item[0] in outputs(own)[:1])
    ]
    others = (TensorSpec(name[start:], (), "ffn") for name in _beside(names, own))
    norms, residual = _norms_after(trial, prefix, own)
    return FeedForward(owner, key, norms, (*specs, *others), residual=residual)


def _spec(name: str, part: Literal["attention", "ffn"], carrier: Carrier) -> TensorSpec:
    return TensorSpec(name, (), part, units=carrier)


def _sparse_ffn(trial: Trial, prefix: str, mixture: Mixture) -> FeedForward:
    """The FFN of a stack whose layers are mixtures of experts, which have no hidden units that are one axis."""
    layer, router = f"{prefix}.{{layer}}.", f".{mixture.router[0]}"
    for block in mixture.blocks:
        own = re.compile(re.escape(block + router).replace(r"\{layer\}", r"(\d+)"))
        for name, module in trial.modules.items():
            if block.startswith(layer) and (match := own.fullmatch(name)):
                inner = module.partition(f".{match[1]}.")[2].removesuffix(router)
                return FeedForward(block.removeprefix(layer), "", (), (), module=inner)
    return _NO_FFN


def _attentions(
    trial: Trial, stack: LayerKey, names: Iterable[str], units: UnitKeys, carriers: Carriers
) -> list[Attention]:
    (prefix,) = stack.prefixes
    own, layers = _within(prefix, carriers), by_layer(names, prefix).values()
    parents: dict[str, dict[str, Carrier]] = {}
    for name, owner in owners(own).items():
        parents.setdefault(owner, {})[name] = own[name]
    made = []
    for owner, tensors in parents.items():
        for output in outputs(tensors)[:1]:
            norms, residual = _norms_after(trial, prefix, tensors)
            specs = [_spec(name, "attention", carrier) for name, carrier in tensors.items()]
            others = {
                name
                for layer in layers
                if tensors.keys() <= {*layer}
                for name in layer
                if name.startswith(f"{owner}.") and module_of(name) not in norms
            }
            others = others.union(*(_beside(layer, tensors) for layer in layers)).difference(tensors)
            inner = common_owner(module_of(name) for name in tensors if name not in outputs(tensors))
            made.append(
                Attention(
                    owner,
                    "cross" if CROSS.search(owner) else "self",
                    [*units.keys][-1],
                    (
                        *specs,
                        *(
                            TensorSpec(name, (), "attention", first=name in stack.tables)
                            for name in sorted(others)
                        ),
                    ),
                    output.removesuffix(".weight"),
                    norms,
                    projections=inner,
                    residual=residual,
                    position_bias=units.biased,
                )
            )
    return made


def _norms_after(trial: Trial, prefix: str, tensors: Carriers) -> tuple[tuple[str, ...], str | None]:
    """Names, within a layer, of the norms after the addition of what a part of it makes to what it is given.

    Returns:
        Those, and the norm before the addition.
    """
    mixing = [module_of(name) for name in outputs(tensors)]
    inputs = {module_of(name) for name in tensors}.difference(mixing)
    after: dict[str, None] = {}
    before: dict[str, None] = {}
    for names in by_layer(trial.modules, prefix).values():
        own = {module_of(inner): module_of(trial.modules[name]) for inner, name in names.items()}
        for norm, last in product(own.keys() - inputs.union(mixing), own.keys() & mixing):
            if trial.comes_after(own[norm], own[last]):
                before[norm] = None
            if any(trial.comes_after(own[norm], own[last], own[first]) for first in inputs & own.keys()):
                after[norm] = None
    return (*after,), next(iter(before), None)


def _width_key(values: Mapping[str, Any], units: UnitKeys) -> str | None:
    """The key of the width of a head: the one that has to be stated, or one that is."""
    within = outer(next(iter(units.keys)))
    names = (within + name for name in ("head_dim", "d_kv", "attention_head_dim"))
    return next(iter(units.stated), None) or next((name for name in names if value_of(values, name)), None)
