"""What checkpoints are called."""

from __future__ import annotations

from pathlib import Path

from prunecli.demo import CHECKPOINT
from prunecli.evaluation.options import labels_for


def test_labels_are_names_or_whole_paths_where_names_meet():
    assert labels_for([Path("/a/full"), Path("/b/small")]) == {
        "full": Path("/a/full"),
        "small": Path("/b/small"),
    }
    assert list(labels_for([Path("/a/x"), Path("/b/x")])) == ["/a/x", "/b/x"]


def test_the_bundled_model_is_called_demo():

    assert labels_for([CHECKPOINT, Path("small")]) == {"demo": CHECKPOINT, "small": Path("small")}
