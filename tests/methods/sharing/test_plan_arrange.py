"""Which FFNs are merged and which go, by hand and against the algorithm of Takase and Kiyono."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.architectures import NLLB_MOE
from prunecli.architectures.records import Carrier
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.sharing.options import (
    CONFIGURATIONS,
    Configuration,
    FfnOptions,
    Order,
    find_configuration,
)
from prunecli.methods.sharing.plan import Group, SharePlan, arrange, group_numbers
from prunecli.model.parts import FfnLayer
from tests.reference import ffn as reference


def ffn(name: str, **changes: Any) -> FfnLayer:
    stack = NLLB_MOE.stacks[name[0] == "d"]
    carriers = {f"{name}.fc1.weight": Carrier(0), f"{name}.fc2.weight": Carrier(1)}
    values = dict.fromkeys(("name", "own_name", "owner"), name)
    values |= {"layer": int(name[1:]), "carriers": carriers, "stack": stack, "spec": stack.ffn}
    values |= {"count": 8, "stated": 8, "removed": False, "is_sparse": False}
    return FfnLayer(**{**values, **changes})


def model(encoder: int = 6, decoder: int = 6) -> list[FfnLayer]:
    return [ffn(f"e{n}") for n in range(encoder)] + [ffn(f"d{n}") for n in range(decoder)]


def asked(
    encoder: Any = "keep", decoder: Any = "keep", *, across: bool = False, **options: Any
) -> tuple[FfnOptions, Configuration]:
    return FfnOptions(**options), Configuration("", encoder, decoder, across=across)


def members(found: SharePlan) -> list[str]:
    return [" ".join(group.members) for group in found.groups]


ALL_E, ALL_D = "e0 e1 e2 e3 e4 e5", "d0 d1 d2 d3 d4 d5"


@pytest.mark.parametrize(
    ("request_", "groups", "removed"),
    [
        (asked(), [*ALL_E.split(), *ALL_D.split()], ""),
        (asked(encoder="share"), [ALL_E, *ALL_D.split()], ""),
        (asked("share", "share"), [ALL_E, ALL_D], ""),
        (asked("share", "share", across=True), [f"{ALL_E} {ALL_D}"], ""),
        (asked("drop"), ALL_D.split(), ALL_E),
        (asked("share", "drop", groups=(2,)), ["e0 e1 e2", "e3 e4 e5"], ALL_D),
        (asked("share", "drop", groups=(3,), order="cycle"), ["e0 e3", "e1 e4", "e2 e5"], ALL_D),
        (asked("share", "drop", groups=(3,), order="cycle-reverse"), ["e0 e5", "e1 e4", "e2 e3"], ALL_D),
        (asked("share", "share", groups=(2, 1)), ["e0 e1 e2", "e3 e4 e5", ALL_D], ""),
        (asked("share", "share", across=True, groups=(2,)), [ALL_E, ALL_D], ""),
    ],
)
def test_groups(request_, groups, removed):
    found = arrange(model(), *request_, {})
    assert members(found) == groups
    assert " ".join(found.removed) == removed
    assert all(group.owner == group.members[0] for group in found.groups)
    assert all(group.is_merged == (len(group.members) > 1) for group in found.groups)


@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from(get_args(Order)))
def test_orders_are_those_of_takase_and_kiyono(groups, times, order):
    found = group_numbers(groups * times, groups, order)
    if order == "cycle-reverse" and times == 1:  # all of their own: the names of the groups do not matter
        assert sorted(found) == list(range(groups))
    else:
        assert [number + 1 for number in found] == reference.takase_kiyono(groups * times, groups, order)


ENCODER = tuple(ALL_E.split())


@pytest.mark.parametrize(
    ("options", "group"),
    [
        ({}, Group(ENCODER, ENCODER, "mean", 8, 8)),
        ({"init": "first"}, Group(ENCODER, ("e0",), "first", 8, 8)),
        ({"init": "last", "scale": 2.0}, Group(ENCODER, ("e5",), "last", 8, 8, 2.0)),
        ({"init": "concat"}, Group(ENCODER, ENCODER, "concat", 48, 48, 1 / 6)),
        ({"init": "concat", "scale": 1.0}, Group(ENCODER, ENCODER, "concat", 48, 48, 1.0)),
        ({"width": 5}, Group(ENCODER, ENCODER, "mean", 8, 5)),
        ({"width": 9}, Group(ENCODER, ENCODER, "concat", 48, 9, 1 / 6)),
        ({"width": 9, "init": "mean"}, Group(ENCODER, ENCODER, "mean", 8, 9)),
        ({"width": "match"}, Group(ENCODER, ENCODER, "concat", 48, 96, 1 / 6)),
        ({"width": "match", "init": "last"}, Group(ENCODER, ("e5",), "last", 8, 96)),
    ],
)
def test_widths_and_initialisations(options, group):
    assert arrange(model(), *asked("share", "drop", **options), {}).groups == (group,)


def test_different_widths_have_no_mean():
    layers = [*model(2, 0), *(ffn(f"d{n}", count=6) for n in range(2))]
    with pytest.raises(UsageError, match=r"different widths \(6, 8\)"):
        arrange(layers, *asked("share", "share", across=True), {})
    found = arrange(layers, *asked("share", "share", across=True, init="concat"), {})
    assert [(group.init_width, group.scale) for group in found.groups] == [(28, 0.25)]
    assert arrange(layers, *asked("share", "share", across=True, init="last"), {}).groups[0].width == 6


def shared(layers: list[FfnLayer], owners: dict[str, str]) -> list[FfnLayer]:
    """The model with FFNs of some layers run by others."""
    return [ffn(layer.name, owner=owners.get(layer.name, layer.name)) for layer in layers]


def test_what_shares_already_counts_once():
    layers = shared(model(4, 2), {"e1": "e0", "e3": "e2"})
    (group,) = arrange(layers, *asked("share", "drop", init="concat"), {}).groups
    assert (group.members, group.sources) == (("e0", "e1", "e2", "e3"), ("e0", "e2"))
    assert (group.init_width, group.scale) == (16, 0.5)
    kept = arrange(layers, *asked(decoder="drop"), {})
    assert members(kept) == ["e0 e1", "e2 e3"]
    assert not any(group.is_merged for group in kept.groups)


def test_an_owner_that_goes_leaves_its_tensors_to_the_next():
    layers = shared(model(2, 2), {"e1": "e0", "d0": "e0", "d1": "e0"})
    (group,) = arrange(layers, *asked("drop"), {}).groups
    assert (group.owner, group.members, group.sources) == ("d0", ("d0", "d1"), ("e0",))
    assert not group.is_merged


def mixed() -> list[FfnLayer]:
    return [ffn(f"e{n}", is_sparse=n % 2 == 1) for n in range(4)] + model(0, 2)


def test_experts_are_left_alone_only_when_told():
    for request in (asked("share"), asked("drop")):
        with pytest.raises(UnsupportedModelError, match="2 of the 4 FFNs of the encoder") as caught:
            arrange(mixed(), *request, {})
        assert "Add `dense_only`" in str(caught.value)
    assert members(arrange(mixed(), *asked(decoder="drop"), {})) == ["e0", "e2"]
    found = arrange(mixed(), *asked("share", dense_only=True), {})
    assert (members(found), found.sparse) == (["e0 e2", "d0", "d1"], ("e1", "e3"))
    assert arrange(mixed(), *asked("drop", dense_only=True), {}).removed == ("e0", "e2")


BOTH = ("encoder", "decoder")
NAMES = tuple(known.name for known in CONFIGURATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_found_in_any_writing(name):
    for written in (name, name.lower(), name.upper(), name.replace("Shared", "Share"), f" {name} "):
        assert find_configuration(written, BOTH).name == name


@pytest.mark.parametrize(
    ("side", "name", "treatments"),
    [
        ("encoder", "Shared", ("share", "keep")),
        ("encoder", "no", ("drop", "keep")),
        ("decoder", "share", ("keep", "share")),
        ("decoder", "NoDec", ("keep", "drop")),
        ("decoder", "onewide", ("keep", "share")),
    ],
)
def test_models_with_one_stack(side, name, treatments):
    found = find_configuration(name, (side,))  # type: ignore[arg-type]
    assert (found.encoder, found.decoder) == treatments
    assert found.match == (found.name == "OneWide")


@pytest.mark.parametrize(
    ("sides", "name", "hint"),
    [
        (BOTH, "SharedEnk", "Did you mean SharedEnc"),
        (BOTH, "OneWied", "OneWide"),
        (("decoder",), "NoEnc", "of a model with decoder.\nIt can be"),
    ],
)
def test_unknown_names_with_near_ones(sides, name, hint):
    with pytest.raises(UsageError, match=f"{name}`: no such configuration") as caught:
        find_configuration(name, sides)
    assert hint in str(caught.value)
