"""Options of one kind of model are refused for the other."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import UsageError
from prunecli.methods.experts.options import check_kind
from prunecli.methods.options import ExpertOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": ("eng_Latn",)}, "`sources`, `targets`"),
        ({"targets": ("eng_Latn",)}, "`sources`, `targets`"),
        ({"granularity": "global"}, "`granularity`"),
        ({"balance": Fraction(3)}, "`balance`"),
        ({"strategy": "side-threshold"}, "encoders and decoders"),
        ({"texts": ("code",), "keep": Path("ids.json")}, "`keep` takes none"),
        ({"experts_per_layer": (36, 12)}, "experts_per_layer=E,D"),
    ],
)
def test_what_a_language_model_does_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_kind(ExpertOptions(**options), True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"texts": ("code",)},
        {"experts_per_layer": 12},
        {"multiple_of": 8},
        {"strategy": "global-threshold"},
    ],
)
def test_what_a_language_model_takes(options: dict[str, Any]) -> None:
    check_kind(ExpertOptions(**options), True)


def test_a_translation_model_has_no_texts() -> None:
    check_kind(ExpertOptions(sources=("eng_Latn",), balance=Fraction(3), strategy="global-threshold"), False)
    with pytest.raises(UsageError, match="`texts` names texts") as refused:
        check_kind(ExpertOptions(texts=("code",)), False)
    assert "`sources` and `targets`" in str(refused.value.remedy)
