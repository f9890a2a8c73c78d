import pytest

from prunecli.errors import UsageError
from prunecli.methods.sharing.options import CONFIGURATIONS, find_configuration

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
