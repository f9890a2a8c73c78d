"""The experts of a family that nobody declared: found by asking its class, and tried on a small copy of the model.

The key that counts experts is changed by one: numbered names that appear are of experts, dimensions that grow are of
stacked experts, of routers and of their biases.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from prunecli.architectures.mixtures import (
    ALIASES,
    GROUPS,
    LANGUAGE_MODEL,
    ROOTS,
    STACKED,
    TOP_K_ALIASES,
    within,
)
from prunecli.architectures.records import Mixture
from prunecli.model.declared import EXPERTS, value_of
from prunecli.model.mixtures import blocks_of, experts_of
from prunecli.model.names import layer_of
from prunecli.model.probe import common_owner, numbers
from prunecli.model.skeleton import Skeleton, stored_form
from prunecli.model.small_copy import TOP_K
from prunecli.model.small_model import NEVER
from prunecli.model.trial import NEAR, Trial

EXPERT = "{expert}"
SEPARATE = "experts.{expert}"


class NotFoundError(Exception):
    """Nothing that can be believed is found, and why."""


@dataclass(frozen=True)
class _Member:
    """A tensor with entries for each expert, or one that each expert has.

    Attributes:
        stack: the list of layers that it is of.
        name: relative to its layer, "{expert}" for the number of the expert that it is of.
        dim: on which experts lie; None: it is of one expert.
        each: entries of one expert on `dim`.
        others: numbers in one entry.
        ndim: number of its dimensions.
    """

    stack: str
    name: str
    dim: int | None = None
    each: int = 1
    others: int = 0
    ndim: int = 0

    @property
    def owner(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]


def found_mixture(whole: Skeleton, skeleton: Skeleton, trial: Trial) -> Mixture:
    """How a class stores its mixtures of experts.

    Args:
        whole: of the model.
        skeleton: the same with few experts.
        trial: a small copy of it.

    Raises:
        NotFoundError: no key counts experts, what it moves has no plain meaning, or the copy disagrees.
    """
    counts = dict(numbers(skeleton.effective))
    of_experts = [key for key, count in counts.items() if EXPERTS.search(key) and count > 1]
    key, members = next(
        ((key, found) for key in of_experts if (found := _members(skeleton, key, counts[key]))), ("", set())
    )
    if not key:
        raise NotFoundError("no key of its config.json moves tensors of experts alone")
    outer, _, name = key.rpartition(".")
    held = value_of(skeleton.effective, outer) if outer else skeleton.effective
    chosen = [other for other in held if TOP_K.search(other) and type(held[other]) is int]
    if not chosen:
        raise NotFoundError("no key of its config.json says how many of them a token is given to")
    config = skeleton.config_of(skeleton.config)
    aliases = getattr(getattr(config, outer) if outer else config, "attribute_map", {})

    def named(key: str) -> tuple[str, ...]:
        return (key, *(alias for alias, own in aliases.items() if own == key))

    mixture = replace(
        _placed(members),
        counts=tuple(dict.fromkeys((*named(name), *ALIASES))),
        top_k=tuple(dict.fromkeys((*named(chosen[0]), *TOP_K_ALIASES))),
        default_top_k=value_of(whole.effective, f"{outer}.{chosen[0]}" if outer else chosen[0]),
        groups=next((groups for groups in GROUPS if groups.count in held), None),
    )
    mixture = within(mixture, outer) if outer else mixture
    difference = max(_differences(trial, key, mixture), default=1.0)
    if difference > NEAR:
        raise NotFoundError(
            "a small copy of the model computes something else without some than when it never picks them (by "
            f"{difference:.0%} of what they do)"
        )
    return mixture


def _members(skeleton: Skeleton, key: str, held: int) -> set[_Member]:
    """Return the tensors that change with the number of experts; empty if others change too."""
    other = skeleton.changed({key: held + 1})
    if other is None or not skeleton.stored.keys() <= other.stored.keys():
        return set()
    found = set()
    for name, after in other.stored.items():
        layer = layer_of(name)
        stack, own = layer.rpartition(".")[0], name[len(layer) + 1 :]
        before = skeleton.stored.get(name)
        if before is None:
            template, replaced = re.subn(rf"(?<=[._]){held}(?=\.)", EXPERT, own, count=1)
            if not (layer and replaced):
                return set()
            found.add(_Member(stack, template))
        elif before != after:
            dims = [dim for dim, (one, two) in enumerate(zip(before, after, strict=True)) if one != two]
            dim = dims[0]
            if not layer or len(dims) > 1 or before[dim] * (held + 1) != after[dim] * held:
                return set()
            each = before[dim] // held
            found.add(_Member(stack, own, dim, each, prod(before) // before[dim], len(before)))
    return found


def _placed(members: Iterable[_Member]) -> Mixture:
    """Blocks, routers, experts and vectors.

    Raises:
        NotFoundError: they do not lie as a mixture's tensors do.
    """
    stacked_in = {(one.stack, one.owner) for one in members if one.ndim > 2}

    def is_stacked(one: _Member) -> bool:
        return one.dim is not None and (
            one.ndim > 2 or one.each > 1 or (one.others > 1 and (one.stack, one.owner) in stacked_in)
        )

    routers = [one for one in members if one.others > 1 and not is_stacked(one)]
    blocks, router, stacked, vectors = [], set(), set(), {}
    experts = set()
    for own in routers:
        beside = [other for other in routers if other.stack == own.stack]
        near = [
            one
            for one in members
            if one.stack == own.stack
            and own is max(beside, key=lambda other: common_owner((one.name, other.name)))
        ]
        if not any(one.dim is None or is_stacked(one) for one in near):
            raise NotFoundError(f"{own.name} routes to no experts")
        block = common_owner(one.name for one in near)
        for one in sorted(near, key=lambda one: one.name):
            name = one.name[len(block) + 1 :] if block else one.name
            if one.dim is None:
                experts.add(name[: name.index(EXPERT) + len(EXPERT)])
            elif is_stacked(one):
                stacked.add(name)
            elif one is own or one.name == f"{own.owner}.bias".lstrip("."):
                router.add(name)
            else:
                vectors[name] = one.dim
            if one.dim and name not in vectors:
                raise NotFoundError(f"experts lie on dimension {one.dim} of {one.name}")
        stacks = ROOTS if own.stack in ROOTS else (own.stack,)
        blocks += [f"{stack}.{{layer}}{block and '.'}{block}" for stack in stacks]
    if not blocks or len(experts) > 1:
        raise NotFoundError("its tensors do not lie as those of a router and its experts do")
    return replace(
        LANGUAGE_MODEL,
        blocks=tuple(dict.fromkeys(blocks)),
        router=tuple(sorted(router, reverse=True)),
        expert=next(iter(experts), None),
        # Some files hold stacked what others of the same type hold apart.
        stacked=STACKED if experts == {SEPARATE} else tuple(sorted(stacked)),
        vectors=vectors,
    )


def _differences(trial: Trial, key: str, mixture: Mixture) -> Iterator[float]:
    """By how much copies with half of the experts, and with as few as can be, differ from one that picks no others.

    Raises:
        NotFoundError: no copy can be made.
    """
    values = trial.skeleton.effective
    assert isinstance(mixture.top_k, tuple)
    held, top_k = dict(numbers(values))[key], value_of(values, mixture.top_k[0])
    groups = (mixture.groups and value_of(values, mixture.groups.count)) or 1
    chosen = (mixture.groups and value_of(values, mixture.groups.chosen)) or 1
    least = max(-(-top_k // chosen), 2 if groups > 1 else 1)
    width = held // groups
    if least >= width:
        raise NotFoundError(f"a small copy of the model has {held} experts, too few to lose any")
    generator = torch.Generator().manual_seed(3)
    stored = stored_form(trial.model)
    for kept in {max(width // 2, least), least}:
        cut, never, seen = dict(stored), {}, 0
        for (block, _, _), members in blocks_of(stored, mixture)[0].items():
            experts, rest = experts_of(mixture, members)
            own = [
                group * width + place
                for group in range(groups)
                for place in sorted(torch.randperm(width, generator=generator)[:kept].tolist())
            ]
            gone = sorted({*range(held)}.difference(own))
            prefix = f"{block}.{mixture.expert}"
            for number in experts:
                for suffix in experts[number]:
                    del cut[f"{prefix.format(expert=number)}.{suffix}"]
            for new, number in enumerate(own if experts else ()):
                for suffix, tensor in experts[number].items():
                    cut[f"{prefix.format(expert=new)}.{suffix}"] = tensor
            for suffix, tensor in rest.items():
                name, is_vector = f"{block}.{suffix}", suffix in mixture.vectors
                if not (is_vector or suffix in mixture.router or suffix in mixture.stacked):
                    continue
                seen += 1
                dim = mixture.vectors.get(suffix, 0)
                if is_vector:
                    tensor = tensor + torch.randn(tensor.shape, generator=generator) * 0.1
                each = tensor.shape[dim] // held
                rows = torch.tensor(own)[:, None] * each + torch.arange(each)
                cut[name] = tensor.index_select(dim, rows.flatten())
                if suffix not in mixture.stacked:
                    # A router's bias may be added to its scores or to what they become.
                    mark = NEVER if is_vector or tensor.ndim == 1 else torch.nan
                    never[name] = tensor.index_fill(dim, torch.tensor(gone), mark)
        if not seen:
            raise NotFoundError("a small copy of the model has no experts")
        yield trial.of_experts({key: kept * groups}, cut, never)
