"""Token ids in configs, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prunecli.errors import UsageError
from prunecli.methods.vocabulary.ids import Renumbering, named_ids, renumbered, with_defaults

CHANGE = Renumbering({0: 0, 2: 1, 5: 2, 9: 3}, frozenset({"b", "d"}), 10)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("pad_token_id", 2, 1),
        ("eos_token_id", [2, 5], [1, 2]),
        ("forced_bos_token_id", 9, 3),
        ("pad_token_id", -1, -1),
        ("bos_token_id", None, None),
        ("pad_token_id", 10, 10),  # beyond the embeddings: no token's id
        ("forced_decoder_ids", [[3, 9], [4, None]], [[3, 3], [4, None]]),
        ("force_words_ids", [[2, 5]], [[1, 2]]),
        ("suppress_tokens", [1, 2, 3, 5], [1, 2]),
        ("begin_suppress_tokens", [1], None),
        ("suppress_tokens", [], []),
        ("bad_words_ids", [[5], [2, 3], [2, 9]], [[2], [1, 3]]),
        ("bad_words_ids", [[3]], None),
        ("sequence_bias", [[[2, 5], -1.5], [[3], 2.0]], [[[1, 2], -1.5]]),
        ("max_length", 9, 9),
        ("num_labels", 5, 5),
    ],
)
def test_renumbered(key: str, value: Any, wanted: Any) -> None:
    assert renumbered({key: value}, CHANGE) == {key: wanted}


def test_configs_inside_are_entered_but_not_labels_or_history() -> None:
    document = {
        "decoder": {"pad_token_id": 5},
        "prunecli": {"pad_token_id": 5},
        "id2label": {"pad_token_id": 5},
    }
    wanted = {**document, "decoder": {"pad_token_id": 2}}
    assert renumbered(document, CHANGE) == wanted
    assert list(named_ids(document)) == [5]


def test_named_ids_are_those_that_must_stay() -> None:
    document = {
        "eos_token_id": [2, 5],
        "decoder_start_token_id": 9,
        "bos_token_id": None,
        "forced_decoder_ids": [[7, 3]],
        "suppress_tokens": [1],
        "bad_words_ids": [[4]],
    }
    assert sorted(named_ids(document)) == [2, 3, 5, 9]


@pytest.mark.parametrize("key", ["pad_token_id", "forced_eos_token_id", "force_words_ids"])
def test_an_id_that_would_go_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="id 3 is special, and would go"):
        renumbered({key: [3] if key.endswith("ids") else 3}, CHANGE)


def test_defaults_are_written_out() -> None:
    config = {"eos_token_id": 3}
    defaults = {"eos_token_id": 7, "pad_token_id": 8, "bos_token_id": None, "vocab_size": 9}
    assert with_defaults(config, defaults) == {"eos_token_id": 3, "pad_token_id": 8}
