"""Sentences of the artificial languages: `python -m tools.demo.corpus DIR` writes the bundled text again.

Meanings are drawn at random, said in all six languages, and split in three.

A sentence is one clause of 3 to 12 words in every language. Splits never share a meaning, and as every sentence has
one meaning, never a sentence.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tools.demo.languages import (
    BY_CODE,
    COUNTS,
    FREE_FEATURES,
    LANGUAGES,
    PARTICLES,
    SEED,
    Language,
    inflect,
    pick,
    proto_lexicon,
)

HELD_OUT: Mapping[str, int] = {"test": 200, "val": 200}
"""Sentences of the held-out splits, drawn in this order and before those of train, whose number they do not need."""

TRAIN = 24_000
"""Sentences of train."""

WORDS = range(3, 13)


@dataclass(frozen=True)
class Phrase:
    """A noun phrase; a pronoun stands alone. The possessor is a bare noun, in the singular or the plural."""

    noun: str
    plural: bool = False
    adjective: str | None = None
    demonstrative: str | None = None
    numeral: str | None = None
    possessor: tuple[str, bool] | None = None


@dataclass(frozen=True)
class Clause:
    """The meaning of a sentence. `tense` is None in the present."""

    subject: Phrase
    verb: str
    object: Phrase | None
    tense: str | None
    negative: bool
    question: bool
    adverb: str | None
    place: tuple[str, Phrase] | None


def _concept(rng: Random, kind: str) -> str:
    count = {**PARTICLES, **COUNTS}[kind]
    return f"{kind}{int(rng.random() * count)}"


def _maybe(rng: Random, probability: float, kind: str) -> str | None:
    return _concept(rng, kind) if rng.random() < probability else None


def draw_phrase(rng: Random) -> Phrase:
    """A noun phrase with, now and then, an adjective, a demonstrative, a numeral and a possessor."""
    plural = rng.random() < 0.4
    return Phrase(
        noun=_concept(rng, "noun"),
        plural=plural,
        adjective=_maybe(rng, 0.35, "adjective"),
        demonstrative=_maybe(rng, 0.15, "demonstrative"),
        numeral=_maybe(rng, 0.3, "numeral") if plural else None,
        possessor=(_concept(rng, "noun"), rng.random() < 0.3) if rng.random() < 0.12 else None,
    )


def draw_clause(rng: Random) -> Clause:
    """A meaning."""
    transitive = rng.random() < 0.65
    pronoun = _maybe(rng, 0.2, "pronoun")
    subject = draw_phrase(rng) if pronoun is None else Phrase(pronoun, plural=int(pronoun[-1]) >= 3)
    return Clause(
        subject=subject,
        verb=_concept(rng, "transitive" if transitive else "intransitive"),
        object=draw_phrase(rng) if transitive else None,
        tense=pick(rng, (None, "past", "future")),
        negative=rng.random() < 0.2,
        question=rng.random() < 0.15,
        adverb=_maybe(rng, 0.3, "adverb"),
        place=(_concept(rng, "adposition"), draw_phrase(rng)) if rng.random() < 0.4 else None,
    )


def _say_phrase(language: Language, phrase: Phrase, case: tuple[str, ...] = ()) -> list[str]:
    roots = proto_lexicon(language.family)
    pronoun = phrase.noun.startswith("pronoun")
    number = ("plural",) if phrase.plural and not pronoun else ()
    words: dict[str, list[str]] = {"noun": [inflect(language, roots[phrase.noun], number + case)]}
    for slot, concept in (
        ("adjective", phrase.adjective),
        ("demonstrative", phrase.demonstrative),
        ("numeral", phrase.numeral),
    ):
        words[slot] = [] if concept is None else [inflect(language, roots[concept])]
    words["possessor"] = []
    if phrase.possessor is not None:
        noun, plural = phrase.possessor
        features = ("plural",) * plural + ("genitive",)
        particle = (
            [] if "genitive" in language.bound else [inflect(language, language.family.affixes["genitive"])]
        )
        words["possessor"] = [*particle, inflect(language, roots[noun], features)]
    return [word for slot in language.phrase for word in words[slot]]


def say(language: Language, clause: Clause) -> str:
    """The sentence: words with one space between, and a full stop or question mark."""
    family, roots = language.family, proto_lexicon(language.family)
    features = tuple(f for f in (clause.tense, "negative" if clause.negative else None) if f is not None)
    agreement = ("agreement",) if clause.subject.plural else ()
    words = {
        "subject": _say_phrase(language, clause.subject),
        "verb": [inflect(language, roots[clause.verb], features + agreement)],
        "object": [] if clause.object is None else _say_phrase(language, clause.object, ("accusative",)),
        "adverb": [] if clause.adverb is None else [inflect(language, roots[clause.adverb])],
        "place": [],
    }
    for feature in FREE_FEATURES:
        present = (
            clause.question
            if feature == "question"
            else feature in features and feature not in language.bound
        )
        words[feature] = [inflect(language, family.affixes[feature])] if present else []
    if clause.place is not None:
        adposition, phrase = inflect(language, roots[clause.place[0]]), _say_phrase(language, clause.place[1])
        words["place"] = [*phrase, adposition] if language.postposed else [adposition, *phrase]
    return " ".join(word for slot in language.clause for word in words[slot]) + (
        "?" if clause.question else "."
    )


def translations(clause: Clause) -> dict[str, str]:
    """The sentence in every language."""
    return {language.code: say(language, clause) for language in LANGUAGES}


def parallel_text(train: int = TRAIN) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Every split's sentences by language, aligned, the first `train` of train: `[split][language][line]`."""
    rng = Random(f"{SEED} corpus")
    seen: set[str] = set()
    text: dict[str, dict[str, tuple[str, ...]]] = {}
    for split, count in {**HELD_OUT, "train": train}.items():
        rows: list[dict[str, str]] = []
        while len(rows) < count:
            row = translations(draw_clause(rng))
            fits = all(len(sentence.split()) in WORDS for sentence in row.values())
            if fits and not seen.intersection(row.values()):
                seen.update(row.values())
                rows.append(row)
        text[split] = {code: tuple(row[code] for row in rows) for code in BY_CODE}
    return text


def main(directory: Path, train: int = TRAIN) -> None:
    """Write `SPLIT.LANG` of every split and language into `directory`, one sentence a line; train packed by gzip.

    The packed bytes are the same at every call, but for the version of zlib.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for split, by_language in parallel_text(train).items():
        for code, sentences in by_language.items():
            data = "".join(f"{line}\n" for line in sentences).encode()
            if split in HELD_OUT:
                (directory / f"{split}.{code}").write_bytes(data)
            else:
                (directory / f"{split}.{code}.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
