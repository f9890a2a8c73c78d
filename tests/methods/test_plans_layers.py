"""Which layers go: against a slow restatement, and by hand."""

import numpy as np
import pytest

from prunecli.errors import UsageError
from prunecli.methods.plans import best_runs, parse_layers

DEPTHS = {"encoder": 6, "decoder": 4}


def test_a_run_is_the_one_whose_ends_are_nearest():
    """Runs of two layers have the distances 0.4 (0 to 2), 0.2 (1 to 3), 0.3 (2 to 4)."""
    distances = np.zeros((5, 5))
    distances[0, 2], distances[1, 3], distances[2, 4] = 0.4, 0.2, 0.3
    assert best_runs(distances, 2).tolist() == [0.4, 0.2, 0.2, 0.3]


@pytest.mark.parametrize(
    ("text", "depths", "expected"),
    [
        ("encoder:0,2-4", DEPTHS, {"encoder": (0, 2, 3, 4)}),
        ("decoder:3,encoder:1,1, 0", DEPTHS, {"decoder": (3,), "encoder": (0, 1)}),
        ("3,1", {"decoder": 4}, {"decoder": (1, 3)}),
    ],
)
def test_numbers_of_layers_are_read(text, depths, expected):
    assert parse_layers("--remove", text, depths) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "=3`: no layer"),
        ("encoder:6", "It has the layers encoder:0-5"),
        ("encoder:3-1", "no layer"),
        ("encoder:x", "no layer"),
        ("", "no layer"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_layers("--remove", text, DEPTHS)
