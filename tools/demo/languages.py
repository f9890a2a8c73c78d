"""Six artificial languages in three families: what each family inherited, and what each language did to it.

A family has proto-roots and proto-affixes. A language is its family plus ordered sound changes, applied to whole
words (root and affixes together, so that a change can alter a stem before one suffix only), a word order, and a
choice of which features it marks on the word and which with a particle. Families differ in sounds, roots and type:

==========  ========================  =======  =====================================================
family      languages                 order    type
==========  ========================  =======  =====================================================
Belic       qba_Latn, qbo_Latn        SOV      suffixes for case, number, tense; postpositions
Kemic       qka_Latn, qko_Latn        SVO      particles, plural suffix; prepositions
Nuric       qna_Latn, qno_Latn        VSO      prefixes for case, number, tense; prepositions
==========  ========================  =======  =====================================================

In Kemic and Nuric one root in six is an old loan from another family. Every feature is expressed in every language
and no two word forms of a language coincide, so that each sentence has exactly one translation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import TypeVar

T = TypeVar("T")

SEED = 2212_09811

COUNTS: Mapping[str, int] = {"noun": 120, "transitive": 40, "intransitive": 24, "adjective": 36, "adverb": 14}
"""Content roots of each word class."""

PARTICLES: Mapping[str, int] = {"pronoun": 6, "numeral": 4, "adposition": 6, "demonstrative": 2}
"""Short roots of each closed word class."""

NOUN_FEATURES = ("plural", "accusative", "genitive")
VERB_FEATURES = ("past", "future", "negative", "agreement")
FREE_FEATURES = ("past", "future", "negative", "genitive", "question")


@dataclass(frozen=True, eq=False)
class Family:
    """What two sister languages inherited.

    Attributes:
        consonants, vowels: of the proto-language, one letter each.
        templates: shapes of content roots: C a consonant, V a vowel.
        particles: shapes of the roots of closed word classes.
        affixes: proto-form of each feature, bound or free.
        prefixing: bound forms stand before the root.
    """

    name: str
    consonants: str
    vowels: str
    templates: tuple[str, ...]
    particles: tuple[str, ...]
    affixes: Mapping[str, str]
    prefixing: bool = False


@dataclass(frozen=True, eq=False)
class Language:
    """One language.

    Attributes:
        code: as the tokenizer has it.
        changes: ordered sound changes, regular expressions and their replacements, on whole words.
        bound: the features marked on the word; the others have a particle, or nothing where word order tells.
        clause: order of subject, object, verb, place, adverb and of the particles.
        phrase: order inside a noun phrase.
        postposed: adpositions follow their noun phrase.
    """

    code: str
    name: str
    family: Family
    changes: tuple[tuple[str, str], ...]
    bound: frozenset[str]
    clause: tuple[str, ...]
    phrase: tuple[str, ...]
    postposed: bool = False


BELIC = Family(
    "Belic",
    consonants="ptkbdgmnslr",
    vowels="aeiou",
    templates=("CVCVC", "CVCVC", "CVC"),
    particles=("CV", "CVC"),
    affixes={
        "plural": "ik",
        "accusative": "em",
        "genitive": "os",
        "past": "ata",
        "future": "ulo",
        "negative": "ni",
        "agreement": "ek",
        "question": "kam",
    },
)
KEMIC = Family(
    "Kemic",
    consonants="ptkfshmnlrwyz",
    vowels="aeio",
    templates=("CrVC", "sCVC", "CVlC", "CVnC", "CVC"),
    particles=("CV", "VC"),
    affixes={
        "plural": "en",
        "genitive": "fo",
        "past": "tah",
        "future": "wil",
        "negative": "noy",
        "question": "hest",
    },
)
NURIC = Family(
    "Nuric",
    consonants="ndgbvzjlrmh",
    vowels="aiu",
    templates=("VCVC", "CVCV", "VCCV", "CVVCV"),
    particles=("VC", "VCV"),
    affixes={
        "plural": "wa",
        "accusative": "ul",
        "genitive": "ni",
        "past": "iz",
        "future": "bu",
        "negative": "ma",
        "agreement": "ha",
        "question": "juva",
    },
    prefixing=True,
)

_CASES = frozenset({"plural", "accusative", "genitive"})
_VERBAL = frozenset({"past", "future", "negative", "agreement"})

LANGUAGES: tuple[Language, ...] = (
    Language(
        "qba_Latn",
        "Bela",
        BELIC,
        changes=(("(?<=[aeiou])t(?=[aeiou])", "d"), ("o(?=.*i)", "ö"), ("s$", "z")),
        bound=_CASES | _VERBAL,
        clause=("subject", "adverb", "place", "object", "verb", "question"),
        phrase=("demonstrative", "possessor", "numeral", "adjective", "noun"),
        postposed=True,
    ),
    Language(
        "qbo_Latn",
        "Bolo",
        BELIC,
        changes=(("p", "f"), ("k(?=[ei])", "c"), ("t(?=i)", "s"), ("m$", "n"), ("a(?=.$)", "o")),
        bound=_CASES | _VERBAL,
        clause=("adverb", "subject", "place", "object", "verb", "question"),
        phrase=("demonstrative", "numeral", "noun", "adjective", "possessor"),
        postposed=True,
    ),
    Language(
        "qka_Latn",
        "Kema",
        KEMIC,
        changes=(("s(?=[ptk])", "š"), ("w", "v"), ("e(?=n)", "i")),
        bound=frozenset({"plural"}),
        clause=("question", "subject", "negative", "past", "future", "verb", "object", "place", "adverb"),
        phrase=("demonstrative", "numeral", "noun", "adjective", "possessor"),
    ),
    Language(
        "qko_Latn",
        "Koma",
        KEMIC,
        changes=(("r(?=[aeio])", "l"), ("l(?=[ptkfs])", "w"), ("a", "å"), ("h$", "x")),
        bound=frozenset({"plural", "past", "future"}),
        clause=("question", "adverb", "subject", "negative", "verb", "object", "place"),
        phrase=("demonstrative", "numeral", "adjective", "noun", "possessor"),
    ),
    Language(
        "qna_Latn",
        "Nura",
        NURIC,
        changes=(("(?<=[aiu])b(?=[aiu])", "v"), ("ai", "e"), ("au", "o"), ("z", "s")),
        bound=_CASES | _VERBAL,
        clause=("verb", "subject", "object", "place", "adverb", "question"),
        phrase=("numeral", "noun", "adjective", "demonstrative", "possessor"),
    ),
    Language(
        "qno_Latn",
        "Nuro",
        NURIC,
        changes=(("d(?=[iu])", "dj"), ("g(?=a)", "gw"), ("v", "w"), ("(?<=[aiu])h", ""), ("u$", "o")),
        bound=_CASES | _VERBAL,
        clause=("verb", "adverb", "subject", "object", "place", "question"),
        phrase=("demonstrative", "numeral", "adjective", "noun", "possessor"),
    ),
)

BY_CODE: Mapping[str, Language] = {language.code: language for language in LANGUAGES}
FAMILIES: tuple[Family, ...] = (BELIC, KEMIC, NURIC)


def pick(rng: Random, values: Sequence[T]) -> T:
    """One of the values, evenly, the same on every version of Python (only `Random.random` promises that)."""
    return values[int(rng.random() * len(values))]


def sound_changes(language: Language, word: str) -> str:
    """The word of the proto-language as the language has it today."""
    for pattern, replacement in language.changes:
        word = re.sub(pattern, replacement, word)
    return word


def inflect(language: Language, root: str, features: Sequence[str] = ()) -> str:
    """The surface form of a proto-root with those of the features that the language marks on the word."""
    family = language.family
    affixes = "".join(family.affixes[feature] for feature in features if feature in language.bound)
    return sound_changes(language, affixes + root if family.prefixing else root + affixes)


def _features(word_class: str) -> Iterator[tuple[str, ...]]:
    if word_class in ("noun", "pronoun"):
        numbers: tuple[tuple[str, ...], ...] = ((), ("plural",)) if word_class == "noun" else ((),)
        cases: tuple[tuple[str, ...], ...] = ((), ("accusative",), ("genitive",))
        yield from (number + case for number, case in product(numbers, cases))
    elif word_class in ("transitive", "intransitive"):
        tenses: tuple[tuple[str, ...], ...] = ((), ("past",), ("future",))
        for tense, negative, agreement in product(tenses, (False, True), (False, True)):
            yield tense + ("negative",) * negative + ("agreement",) * agreement
    else:
        yield ()


def word_forms(language: Language, root: str, word_class: str) -> set[str]:
    """Every surface form of a proto-root."""
    return {inflect(language, root, features) for features in _features(word_class)}


def _paradigm_size(language: Language, word_class: str) -> int:
    return len({tuple(f for f in features if f in language.bound) for features in _features(word_class)})


def concepts() -> tuple[tuple[str, str], ...]:
    """Every meaning with its word class, closed classes first: `("noun12", "noun")`."""
    counts = {**PARTICLES, **COUNTS}
    return tuple((f"{kind}{index}", kind) for kind, count in counts.items() for index in range(count))


def _draw(rng: Random, family: Family, particle: bool) -> str:
    template = pick(rng, family.particles if particle else family.templates)
    sounds = {"C": family.consonants, "V": family.vowels}
    return "".join(pick(rng, sounds[slot]) if slot in sounds else slot for slot in template)


def _adapt(root: str, family: Family) -> str:
    """A loan: sounds that the family lacks become near ones."""
    near = str.maketrans(
        {"p": "b", "t": "d", "k": "g", "f": "v", "s": "z", "e": "i", "o": "u", "w": "v", "y": "j"}
    )
    back = str.maketrans({"b": "p", "d": "t", "g": "k", "v": "f", "j": "y", "u": "o"})
    known = set(family.consonants + family.vowels)
    for table in (near, back):
        root = "".join(letter if letter in known else letter.translate(table) for letter in root)
    return "".join(letter for letter in root if letter in known)


@cache
def proto_lexicon(family: Family) -> Mapping[str, str]:
    """Proto-root of each meaning. No two word forms of a sister language coincide, particles included."""
    rng = Random(f"{SEED} {family.name}")
    sisters = [language for language in LANGUAGES if language.family is family]
    free = [family.affixes[feature] for feature in FREE_FEATURES]
    used = {sister.code: {inflect(sister, form) for form in free} for sister in sisters}
    donors = FAMILIES[: FAMILIES.index(family)]
    lexicon: dict[str, str] = {}
    for concept, kind in concepts():
        loan = bool(donors) and kind in COUNTS and rng.random() < 0.2
        while True:
            root = _draw(rng, family, kind in PARTICLES)
            if loan:
                root, loan = _adapt(proto_lexicon(pick(rng, donors))[concept], family), False
            forms = {language.code: word_forms(language, root, kind) for language in sisters}
            distinct = all(len(forms[sister.code]) == _paradigm_size(sister, kind) for sister in sisters)
            if root and distinct and not any(forms[code] & used[code] for code in used):
                break
        for code, found in forms.items():
            used[code] |= found
        lexicon[concept] = root
    return lexicon
