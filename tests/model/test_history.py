"""What the history of checkpoints says of the languages that they were pruned for."""

import json
from pathlib import Path
from typing import Any

import pytest

from prunecli.model.history import pruned_pairs, written_checkpoints
from tests.tiny import write_files

ENGLISH, FRENCH, GERMAN = "eng_Latn", "fra_Latn", "deu_Latn"


def checkpoint(name: str, config: Any) -> Path:
    write_files(name, {"config.json": json.dumps(config)})
    return Path(name)


def pruned(name: str, *arguments: Any) -> Path:
    return checkpoint(name, {"prunecli": {"history": [{"arguments": each} for each in arguments]}})


def test_pairs_of_a_checkpoint_are_those_it_was_pruned_for():
    pairs = [(a, b) for a in (ENGLISH, FRENCH, GERMAN) for b in (ENGLISH, FRENCH, GERMAN) if a != b]
    once = pruned("once", {"source": [ENGLISH, FRENCH], "target": [GERMAN]})
    assert pruned_pairs([once], pairs) == ((ENGLISH, GERMAN), (FRENCH, GERMAN))
    twice = pruned(
        "twice", {"source": [ENGLISH]}, {"ratio": 0.2}, "damaged", {"source": 1, "target": [GERMAN]}
    )
    assert pruned_pairs([once, twice], pairs) == ((ENGLISH, GERMAN),)


@pytest.mark.parametrize("history", [None, ["prune-experts", None]])
def test_a_damaged_history_prunes_for_nothing(history):
    path = checkpoint("a", {"prunecli": {"history": history}})
    assert written_checkpoints(Path()) == [path]
    assert pruned_pairs([path], [(ENGLISH, FRENCH)]) == ((ENGLISH, FRENCH),)
    other = checkpoint("b", {"prunecli": history})
    assert pruned_pairs([other], [(ENGLISH, FRENCH)]) == ((ENGLISH, FRENCH),)
