"""Which tokens stay, by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

import pytest

from prunecli.errors import CheckpointError, DataError
from prunecli.methods.vocabulary import measure
from prunecli.methods.vocabulary.plan import VocabularyOptions, select_tokens
from prunecli.methods.vocabulary.tokenizer import Vocabulary
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.selection.selection import Selection
from prunecli.text.choice import Lines
from tests.families import tiny_family
from tests.tiny import VOCAB

TOKENS = ("<s>", "a", "b", "c", "d", "ab", "cd", "abcd", "bc", "da", "<mask>")
RANKS = {("a", "b"): 0, ("c", "d"): 1, ("ab", "cd"): 2, ("b", "c"): 3, ("d", "a"): 4}
VOCABULARY = Vocabulary(
    frozenset("abcd"),
    (lambda left, right: RANKS.get((left, right)),),
    {token: number for number, token in enumerate(TOKENS)},
    frozenset({"<s>", "<mask>"}),
)
LINES = Lines(("one",) * 3, ("val",), (), ("eng",), None)
COUNTS = {"abcd": 5, "bc": 2, "a": 1, "no token": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tiny_family(tmp_path_factory.mktemp("model") / "tiny", "gpt2")
    with open_model(path) as opened:
        yield opened


def decided(
    checkpoint: Checkpoint,
    counts: Mapping[str, int] = COUNTS,
    needed: Any = (),
    template: Set[str] = frozenset(),
    **options: Any,
) -> Selection:
    return select_tokens(
        checkpoint, VOCABULARY, LINES, counts, VocabularyOptions(**options), needed, template
    )


def tokens(plan: Selection) -> list[str]:
    return [TOKENS[number] for number in plan.kept["tokens"]]


def test_seen_special_and_single_tokens_stay_with_what_makes_them(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint)
    assert tokens(made) == [token for token in TOKENS if token != "da"]
    assert made.details["parts"] == {
        "special and added": 2,
        "in the text": 3,
        "characters and bytes": 3,
        "on the way to them": 2,
    }
    assert made.details["text"]["share_kept"] == 1  # "no token" is a piece that the vocabulary lacks


def test_rarer_tokens_go(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, min_count=3)
    assert tokens(made) == [token for token in TOKENS if token not in ("da", "bc")]
    assert made.details["text"]["share_kept"] == 6 / 8


def test_of_no_text_only_what_always_stays(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, {})
    assert tokens(made) == ["<s>", "a", "b", "c", "d", "<mask>"]
    assert made.details["text"]["share_kept"] == 1


def test_tokens_asked_for_stay_with_what_makes_them(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, {}, keep=("cd",))
    assert tokens(made) == ["<s>", "a", "b", "c", "d", "cd", "<mask>"]
    assert decided(checkpoint, {}, keep=("abcd",)).details["parts"]["on the way to them"] == 2


def test_ids_that_configs_name_stay(checkpoint: Checkpoint) -> None:
    """Even those of no token: rows beyond the tokenizer's."""
    made = decided(checkpoint, {}, needed=[9, 20, 0, VOCAB, -1])
    assert made.kept["tokens"] == (0, 1, 2, 3, 4, 9, 10, 20)
    assert made.details["parts"]["no token"] == 1


@pytest.mark.parametrize(("multiple", "count"), [(1, 6), (4, 8), (11, 11)])
def test_up_to_a_multiple(multiple: int, count: int, checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, {}, multiple_of=multiple)
    assert len(made.kept["tokens"]) == count
    kept = set(tokens(made))
    assert VOCABULARY.closure(kept) == kept


def test_an_unknown_token_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(DataError, match="no token 'ba'"):
        decided(checkpoint, keep=("a", "ba"))


def test_a_tokenizer_that_the_embeddings_cannot_hold_is_refused(checkpoint: Checkpoint) -> None:
    larger = replace(VOCABULARY, ids={"a": 0, "z": VOCAB})
    with pytest.raises(CheckpointError, match=f"'z' the id {VOCAB}, its embeddings have {VOCAB} rows"):
        select_tokens(checkpoint, larger, LINES, COUNTS, VocabularyOptions())


def test_tokens_of_the_chat_template_stay_however_rare(checkpoint: Checkpoint) -> None:
    made = decided(checkpoint, template={"da"}, min_count=3)
    assert made.details["parts"]["chat template"] == 1
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
