"""The generator makes the bundled text; word order is as documented."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import pytest

from prunecli.demo import DATA, LANGUAGES
from tools.demo.corpus import Clause, Phrase, draw_clause, main, translations
from tools.demo.languages import BY_CODE, inflect, proto_lexicon

TRAIN = 300
"""Sentences of train that are made again: all 24,000 take seconds."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written") / "data"
    main(directory, TRAIN)
    return directory


def test_the_held_out_text_is_made_again_byte_for_byte(written: Path) -> None:
    assert {file.name for file in written.iterdir()} == {file.name for file in DATA.iterdir()}
    for split in ("val", "test"):
        for code in LANGUAGES:
            assert (written / f"{split}.{code}").read_bytes() == (DATA / f"{split}.{code}").read_bytes()


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_training_text_begins_as_it_is_made(code: str, written: Path) -> None:
    made, bundled = (
        gzip.decompress((folder / f"train.{code}.gz").read_bytes()) for folder in (written, DATA)
    )
    assert made.count(b"\n") == TRAIN
    assert bundled.startswith(made)


def test_packing_leaves_the_time_out(written: Path, tmp_path: Path) -> None:
    main(tmp_path, TRAIN)
    name = f"train.{LANGUAGES[0]}.gz"
    assert (tmp_path / name).read_bytes() == (written / name).read_bytes()
    assert (DATA / name).read_bytes()[4:8] == bytes(4)


def test_meanings_depend_on_the_seed_alone() -> None:
    first, again, other = (draw_clause(Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_word_orders() -> None:
    """Subject noun0, object noun1, verb transitive0: SOV, SVO and VSO, with the object marked where there is case."""
    clause = Clause(
        Phrase("noun0"),
        "transitive0",
        Phrase("noun1", adjective="adjective0"),
        None,
        False,
        False,
        None,
        None,
    )
    said = translations(clause)
    order = {
        "qba_Latn": ("noun0", "adjective0", "noun1", "transitive0"),
        "qbo_Latn": ("noun0", "noun1", "adjective0", "transitive0"),
        "qka_Latn": ("noun0", "transitive0", "noun1", "adjective0"),
        "qko_Latn": ("noun0", "transitive0", "adjective0", "noun1"),
        "qna_Latn": ("transitive0", "noun0", "noun1", "adjective0"),
        "qno_Latn": ("transitive0", "noun0", "adjective0", "noun1"),
    }
    for code, concepts in order.items():
        language = BY_CODE[code]
        roots = proto_lexicon(language.family)
        words = [inflect(language, roots[c], ("accusative",) if c == "noun1" else ()) for c in concepts]
        assert said[code] == " ".join(words) + "."


def test_every_feature_is_heard_in_every_language() -> None:
    """Changing any part of the meaning changes the sentence in all six languages."""
    base = dict(
        subject=Phrase("noun0"), verb="transitive0", object=Phrase("noun1"), tense=None, negative=False
    )
    base |= dict(question=False, adverb=None, place=None)
    changes = [
        {"subject": Phrase("noun0", plural=True)},
        {"subject": Phrase("noun0", possessor=("noun2", False))},
        {"object": Phrase("noun1", demonstrative="demonstrative0")},
        {"object": Phrase("noun1", plural=True)},
        {"subject": Phrase("noun1"), "object": Phrase("noun0")},
        {"tense": "past"},
        {"tense": "future"},
        {"negative": True},
        {"question": True},
        {"adverb": "adverb0"},
        {"place": ("adposition0", Phrase("noun2"))},
    ]
    said = [translations(Clause(**{**base, **change})) for change in [{}, *changes]]
    for code in LANGUAGES:
        assert len({sentences[code] for sentences in said}) == len(said)


def test_an_unknown_concept_is_refused() -> None:
    with pytest.raises(KeyError, match="noun9999"):
        translations(Clause(Phrase("noun9999"), "intransitive0", None, None, False, False, None, None))
