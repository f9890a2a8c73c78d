"""The paired bootstrap test, stated slowly: every resample is scored as a corpus of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def paired_p_value(
    metric: Any,
    baseline: Sequence[str],
    system: Sequence[str],
    references: Sequence[str],
    samples: int,
    seed: int,
) -> float:
    """Share of the resamples whose centred difference exceeds the real one, with one added to both counts.

    Koehn (2004), in the form of Moses' bootstrap-hypothesis-difference-significance.pl.
    """

    def score(outputs: Sequence[str], chosen: Sequence[int]) -> float:
        return metric.corpus_score([outputs[i] for i in chosen], [[references[i] for i in chosen]]).score

    every = list(range(len(references)))
    real = abs(score(baseline, every) - score(system, every))
    draws = np.random.default_rng(seed).choice(len(references), size=(samples, len(references)), replace=True)
    differences = np.array([abs(score(system, row) - score(baseline, row)) for row in draws.tolist()])
    centred = differences - differences.mean()
    return float((np.sum(centred > real) + 1) / (samples + 1))
