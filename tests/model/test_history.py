"""What the history of checkpoints says of the languages that they were pruned for."""

from pathlib import Path
from typing import Any

import pytest

from prunecli.model.history import pruned_pairs, written_checkpoints
from tests.tiny import write_json

ENGLISH, FRENCH, GERMAN = "eng_Latn", "fra_Latn", "deu_Latn"


def checkpoint(path: Path, config: Any) -> Path:
    path.mkdir()
    write_json(path / "config.json", config)
    return path


def pruned(path: Path, *arguments: Any) -> Path:
    return checkpoint(path, {"prunecli": {"history": [{"arguments": each} for each in arguments]}})


def test_pairs_of_a_checkpoint_are_those_it_was_pruned_for(tmp_path):
    pairs = [(a, b) for a in (ENGLISH, FRENCH, GERMAN) for b in (ENGLISH, FRENCH, GERMAN) if a != b]
    as_text = pruned(tmp_path / "text", {"source": f"{ENGLISH}, {FRENCH}", "target": GERMAN})
    as_list = pruned(tmp_path / "list", {"source": [ENGLISH, FRENCH], "target": [GERMAN]})
    expected = ((ENGLISH, GERMAN), (FRENCH, GERMAN))
    assert pruned_pairs([as_text], pairs) == pruned_pairs([as_list], pairs) == expected
    twice = pruned(
        tmp_path / "twice", {"source": ENGLISH}, {"ratio": 0.2}, "damaged", {"source": 1, "target": [GERMAN]}
    )
    assert pruned_pairs([as_text, twice], pairs) == ((ENGLISH, GERMAN),)


@pytest.mark.parametrize("history", [None, ["prune-experts", None]])
def test_a_damaged_history_prunes_for_nothing(tmp_path, history):
    path = checkpoint(tmp_path / "a", {"prunecli": {"history": history}})
    assert written_checkpoints(tmp_path) == [path]
    assert pruned_pairs([path], [(ENGLISH, FRENCH)]) == ((ENGLISH, FRENCH),)
    other = checkpoint(tmp_path / "b", {"prunecli": history})
    assert pruned_pairs([other], [(ENGLISH, FRENCH)]) == ((ENGLISH, FRENCH),)
