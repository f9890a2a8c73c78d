"""The artificial languages: regular sound changes, no two word forms alike, types as documented."""

from __future__ import annotations

import re

import pytest

from prunecli.demo import LANGUAGES as CODES
from tools.demo.languages import (
    BELIC,
    BY_CODE,
    FAMILIES,
    LANGUAGES,
    NURIC,
    concepts,
    inflect,
    proto_lexicon,
    sound_changes,
    word_forms,
)


def test_codes_are_free_for_local_use_and_show_the_family() -> None:
    assert tuple(BY_CODE) == CODES
    for language in LANGUAGES:
        assert re.fullmatch(r"q[a-t][a-z]_Latn", language.code)  # ISO 639-3 reserves qaa to qtz
        assert language.code[1] == language.family.name[0].lower()
    assert [sum(language.family is family for language in LANGUAGES) for family in FAMILIES] == [2, 2, 2]


# Worked by hand from the rules, in their order.
@pytest.mark.parametrize(
    ("code", "proto", "today"),
    [
        ("qba_Latn", "petal", "pedal"),  # t is voiced between vowels
        (
            "qba_Latn",
            "kotiros",
            "ködiroz",
        ),  # o is fronted before a later i; final s is voiced
        ("qbo_Latn", "petal", "fetol"),  # p to f; a before a final consonant to o
        ("qbo_Latn", "tikem", "sicen"),  # t to s before i, k to c before e, final m to n
        ("qka_Latn", "spewen", "špevin"),
        ("qko_Latn", "prash", "plåsx"),
        ("qko_Latn", "kalta", "kåwtå"),
        ("qna_Latn", "abaiz", "aves"),
        ("qno_Latn", "diguhav", "djiguaw"),  # h is lost after a vowel; g stays before u
    ],
)
def test_sound_changes_by_hand(code: str, proto: str, today: str) -> None:
    assert sound_changes(BY_CODE[code], proto) == today


def test_sisters_correspond_letter_by_letter() -> None:
    """Bolo f is Bela p and Bolo has no p: the same correspondence in every inherited word."""
    bela, bolo = BY_CODE["qba_Latn"], BY_CODE["qbo_Latn"]
    for root in proto_lexicon(BELIC).values():
        assert "p" not in inflect(bolo, root)
        assert [at for at, letter in enumerate(inflect(bela, root)) if letter == "p"] == [
            at for at, letter in enumerate(inflect(bolo, root)) if letter == "f"
        ]


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.code)
def test_no_two_meanings_share_a_word_form(language) -> None:
    owner: dict[str, str] = {}
    for concept, kind in concepts():
        for form in word_forms(language, proto_lexicon(language.family)[concept], kind):
            assert owner.setdefault(form, concept) == concept
    assert all(form and " " not in form for form in owner)


def test_a_few_hundred_roots_some_of_them_loans() -> None:
    assert len(concepts()) == len(dict(concepts())) > 200
    nuric, belic = proto_lexicon(NURIC), proto_lexicon(BELIC)
    devoiced = str.maketrans("bdgvzju", "ptkfsyo")

    def skeleton(root: str) -> str:
        return re.sub("[aeiou]", "", root.translate(devoiced))

    alike = sum(skeleton(nuric[concept]) == skeleton(belic[concept]) for concept, _ in concepts())
    assert alike >= 10


def test_affixes_stand_where_the_family_puts_them() -> None:
    assert inflect(BY_CODE["qba_Latn"], "lun", ("plural", "accusative")) == "lunikem"
    assert inflect(BY_CODE["qna_Latn"], "jula", ("plural", "accusative")) == "woljula"  # au to o
    assert (
        inflect(BY_CODE["qka_Latn"], "fot", ("plural", "accusative")) == "fotin"
    )  # no case: word order tells


def test_an_unknown_feature_of_a_language_that_marks_it_is_refused() -> None:
    with pytest.raises(KeyError):
        word_forms(BY_CODE["qba_Latn"], proto_lexicon(BELIC)["noun9999"], "noun")
