"""The bundled text is what the generator makes; splits are disjoint; word order is as documented."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from prunecli.demo import DATA, LANGUAGES
from prunecli.demo.corpus import (
    SPLITS,
    WORDS,
    Clause,
    Phrase,
    draw_clause,
    parallel_text,
    translations,
    write_split,
)
from prunecli.demo.languages import BY_CODE, inflect, proto_lexicon


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_bundled_text_is_regenerated_byte_for_byte(split: str, tmp_path: Path) -> None:
    write_split(tmp_path, split)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(f"{split}.{code}" for code in LANGUAGES)
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (DATA / file.name).read_bytes()


def test_the_data_folder_holds_nothing_else() -> None:
    expected = {f"{split}.{code}" for split in ("val", "test") for code in LANGUAGES}
    assert {file.name for file in DATA.iterdir()} == expected


@pytest.mark.parametrize("code", LANGUAGES)
def test_no_held_out_sentence_is_trained_on(code: str) -> None:
    text = parallel_text()
    sentences = [sentence for split in text.values() for sentence in split[code]]
    assert len(sentences) == len(set(sentences)) == sum(SPLITS.values())


@pytest.mark.parametrize("code", LANGUAGES)
def test_sentences_have_3_to_12_words(code: str) -> None:
    lengths = {len(sentence.split()) for split in parallel_text().values() for sentence in split[code]}
    assert lengths <= set(WORDS)
    assert max(lengths) - min(lengths) >= 8


def test_every_held_out_word_occurs_in_training() -> None:
    """The roots at least: a word form may be new, its root never is."""
    text = parallel_text()
    trained = {word.rstrip(".?") for line in text["train"]["qka_Latn"] for word in line.split()}
    held_out = {word.rstrip(".?") for line in text["test"]["qka_Latn"] for word in line.split()}
    assert held_out <= trained


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


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="dev"):
        write_split(tmp_path, "dev")
