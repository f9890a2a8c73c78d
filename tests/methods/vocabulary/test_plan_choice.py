"""Which tokens stay, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import CheckpointError, DataError, UsageError
from prunecli.methods.vocabulary import measure
from prunecli.methods.vocabulary.measure import Text, TokenCounts
from prunecli.methods.vocabulary.plan import VocabularyOptions, VocabularyPlan, select_tokens
from prunecli.methods.vocabulary.tokenizer import Segmentation, Vocabulary
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.tiny import VOCAB

TOKENS = ("<s>", "a", "b", "c", "d", "ab", "cd", "abcd", "bc", "da", "<mask>")
RANKS = {("a", "b"): 0, ("c", "d"): 1, ("ab", "cd"): 2, ("b", "c"): 3, ("d", "a"): 4}
VOCABULARY = Vocabulary(
    {token: number for number, token in enumerate(TOKENS)},
    frozenset({"<s>", "<mask>"}),
    Segmentation(frozenset("abcd"), (lambda left, right: RANKS.get((left, right)),)),
)
TEXT = Text(("one",), (3,), ("val",), ("eng",))
COUNTS = TokenCounts({"abcd": 5, "bc": 2, "a": 1, "no token": 4})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tiny_family(tmp_path_factory.mktemp("model") / "tiny", "gpt2")
    with open_model(path) as opened:
        yield opened


def decided(
    checkpoint: Checkpoint, counts: TokenCounts = COUNTS, needed: Any = (), **options: Any
) -> VocabularyPlan:
    return select_tokens(checkpoint, VOCABULARY, TEXT, counts, VocabularyOptions(**options), needed)


def tokens(plan: VocabularyPlan) -> list[str]:
    return [TOKENS[number] for number in plan.kept["tokens"]]


def test_seen_special_and_single_tokens_stay_with_what_makes_them(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint)
    assert tokens(made) == [token for token in TOKENS if token != "da"]
    assert made.parts == {
        "special and added": 2,
        "in the text": 3,
        "characters and bytes": 3,
        "on the way to them": 2,
    }
    assert made.renumbering.dropped == {"da"}
    assert made.renumbering.size == VOCAB
    assert made.share == 1  # "no token" is a piece that the vocabulary lacks
    assert made.renumbering.new_ids == {old: new for new, old in enumerate(made.kept["tokens"])}


def test_rarer_tokens_go(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, min_count=3)
    assert tokens(made) == [token for token in TOKENS if token not in ("da", "bc")]
    assert made.share == 6 / 8


def test_of_no_text_only_what_always_stays(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, TokenCounts({}))
    assert tokens(made) == ["<s>", "a", "b", "c", "d", "<mask>"]
    assert made.share == 1


def test_tokens_asked_for_stay_with_what_makes_them(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, TokenCounts({}), keep=("cd",))
    assert tokens(made) == ["<s>", "a", "b", "c", "d", "cd", "<mask>"]
    assert decided(checkpoint, TokenCounts({}), keep=("abcd",)).parts["on the way to them"] == 2


def test_ids_that_configs_name_stay(checkpoint: Checkpoint) -> None:
    """Even those of no token: rows beyond the tokenizer's."""
    made = decided(checkpoint, TokenCounts({}), needed=[9, 20, 0, VOCAB, -1])
    assert made.kept["tokens"] == (0, 1, 2, 3, 4, 9, 10, 20)
    assert made.parts["no token"] == 1


@pytest.mark.parametrize(("multiple", "count"), [(1, 6), (2, 6), (4, 8), (5, 10), (3, 6), (11, 11)])
def test_up_to_a_multiple(multiple: int, count: int, checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, TokenCounts({}), multiple_of=multiple)
    assert len(made.kept["tokens"]) == count
    kept = set(tokens(made))
    assert VOCABULARY.segmentation.closure(kept) == kept


def test_a_multiple_that_the_vocabulary_cannot_reach_keeps_all(checkpoint: Checkpoint) -> None:
    assert len(decided(checkpoint, multiple_of=64).kept["tokens"]) == len(TOKENS)


def test_history(checkpoint: Checkpoint) -> None:
    step = decided(checkpoint, min_count=2, keep=("da",)).step
    assert step["command"] == "trim-vocabulary"
    assert step["source"]["fingerprint"] == checkpoint.fingerprint
    assert step["arguments"] == {"split": ["val"], "langs": ["eng"], "min_count": 2}
    note = step["vocabulary"]
    assert (note["before"], note["after"], note["sentences"]) == (VOCAB, 11, 3)
    assert note["parts"]["asked for"] == 1
    assert note["text_sha256"] == TEXT.sha256


@pytest.mark.parametrize("options", [{"min_count": 0}, {"multiple_of": 0}])
def test_counts_below_one_are_refused(options: dict[str, int], checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        decided(checkpoint, **options)


def test_an_unknown_token_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(DataError, match="no token 'ba'"):
        decided(checkpoint, keep=("a", "ba"))


def test_a_tokenizer_that_the_embeddings_cannot_hold_is_refused(checkpoint: Checkpoint) -> None:
    larger = Vocabulary({"a": 0, "z": VOCAB}, frozenset(), VOCABULARY.segmentation)
    with pytest.raises(CheckpointError, match=f"'z' the id {VOCAB}, its embeddings have {VOCAB} rows"):
        select_tokens(checkpoint, larger, TEXT, COUNTS, VocabularyOptions())


def test_two_texts_of_one_hash_are_one() -> None:
    assert TEXT.sha256 == Text(("one",), (3,), files=("other",)).sha256
    assert len({Text(lines, (1,) * len(lines)).sha256 for lines in (("a", "b"), ("b", "a"), ("ab",))}) == 3


def test_files_have_names_alone(tmp_path: Path, checkpoint: Checkpoint) -> None:
    from prunecli.text.choice import TextChoice

    (tmp_path / "lines").write_text("a\n\na\nb\n")
    text = Text.of(TextChoice(files=(tmp_path / "lines",)).lines(), load_tokenizer(checkpoint.path))
    assert (text.lines, text.repeats, text.files) == (("a", "b"), (2, 1), ("lines",))
    assert text.sentences == 3
    assert (text.documents, text.messages, text.template) == (("a\n\na\nb\n",), (), ())


def test_tokens_of_the_chat_template_stay_however_rare(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, TokenCounts(COUNTS.counts, {"da"}), min_count=3)
    assert made.parts["chat template"] == 1
    assert "da" in tokens(made)


def test_a_long_document_is_cut_so_that_no_line_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PIECE", 10)
    monkeypatch.setattr(measure, "OVERLAP", 2)
    document = "\n".join(map(str, range(20)))
    pieces = list(measure._pieces(document))
    joints = {tuple(piece.splitlines()[n : n + 3]) for piece in pieces for n in range(20)}
    assert all((str(n), str(n + 1), str(n + 2)) in joints for n in range(18))
    assert 2 < len(pieces) < 10
    assert max(map(len, pieces)) < 15


def test_the_middle_of_a_long_message_is_left_out() -> None:
    first, last = "a " * 40, " b" * 40
    short = measure._ends(f"{first}gone{last}")
    assert "gone" not in short
    assert (short[:64], short[-64:]) == (first[:64], last[-64:])
    assert measure._ends(first) == first
