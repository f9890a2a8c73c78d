"""Paths as text, and short names that keep what tells them apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.report.drawing import outline, shortened


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a", "bb"], ["a", "bb"]),
        (
            ["run/experts-by-language-0.5-balanced", "run/experts-by-language-0.8-balanced"],
            ["…0.5-balanced", "…0.8-balanced"],
        ),
        (
            ["model.decoder.layers.10.encoder_attn", "model.decoder.layers.9.encoder_attn"],
            ["…10.encoder_attn", "…9.encoder_attn"],
        ),
        (["x" * 30], ["xxxxxxxxxx…xxxxxxxxx"]),
        ([f"{'y' * 30}{end}" for end in "ab"], [f"{'y' * 10}…{'y' * 8}{end}" for end in "ab"]),
    ],
)
def test_what_differs_stays(names: list[str], wanted: list[str]) -> None:
    assert list(shortened(names, 20).values()) == wanted


def test_names_that_short_forms_would_mix_up_have_more_room() -> None:
    names = [f"{'a' * 30}{middle}{'b' * 30}" for middle in "xy"]
    assert [len(short) for short in shortened(names, 20).values()] == [61, 61]
    names = ["model", *(f"by-language-of-{n}-and-ratio-0.25-of-all" for n in (1, 3))]
    assert list(shortened(names, 20).values()) == ["model", "…1…", "…3…"]


@given(st.lists(st.text("ab-/", max_size=40), max_size=6), st.integers(5, 30))
def test_no_two_names_are_shortened_to_one(names: list[str], letters: int) -> None:
    found = shortened(names, letters)
    assert len(set(found.values())) == len(set(names))
    assert set(found) == set(names)


def test_the_text_of_a_path_has_no_needless_signs() -> None:
    assert outline("M", 1.0, 2.5, "H", 3.004, "v4") == "M1 2.5H3v4"
