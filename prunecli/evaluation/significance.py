"""Paired tests: whether two systems' scores of the same examples differ by more than chance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import ArrayLike, NDArray

SAMPLES = 1000
SEED = 12345
"""sacrebleu's own defaults."""
LEAST = 30
"""Examples from which tests are shown: with fewer, neither resampling nor a t-test is reliable."""


@dataclass(frozen=True)
class Significance:
    """One score of one system compared with the baseline's.

    Attributes:
        p_value: two-sided probability of a difference this large by chance; None for the baseline. Equal scores have
            the p-value 1 (sacrebleu counts larger differences, and would report a significant one).
        mean: mean of the score over the resamples.
        ci95: half the width of the 95 % confidence interval.
    """

    p_value: float | None
    mean: float
    ci95: float


def too_few(examples: int, what: str) -> str | None:
    """The message that replaces a test on too few examples; None if there are enough."""
    if examples >= LEAST:
        return None
    return f"{examples:,} {what} are too few for a test of significance: {LEAST} or more would do."


def paired_bootstrap(
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    metrics: Mapping[str, Any],
    samples: int = SAMPLES,
    seed: int = SEED,
) -> list[dict[str, Significance]]:
    """Test every system against the first on the same resamples, by sacrebleu's paired bootstrap (Koehn 2004).

    Args:
        systems: outputs of each system, in the order of `references`.
        metrics: name -> sacrebleu metric.
        samples: number of resamples of the sentences, with replacement.
        seed: of the resamples; at least 1 (sacrebleu takes 0 for "none").

    Returns:
        For each system: metric -> significance.
    """
    from sacrebleu.significance import PairedTest

    tests: list[dict[str, Significance]] = [{} for _ in systems]
    named = [(str(index), list(outputs)) for index, outputs in enumerate(systems)]
    # sacrebleu reads its seed from the environment only.
    with patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        for name, metric in metrics.items():
            # One test for each metric: sacrebleu keys them by the score's name, which BLEU and spBLEU share.
            test = PairedTest(named, {name: metric}, [list(references)], "bs", n_samples=samples, n_jobs=1)
            _, results = test()[1].values()
            for found, result in zip(tests, results, strict=True):
                p_value = None if result.p_value is None else float(result.p_value)
                if p_value is not None and result.score == results[0].score:
                    p_value = 1.0
                found[name] = Significance(p_value, float(result.mean), float(result.ci))
    return tests


def bootstrap_of_means(
    systems: Sequence[NDArray[np.float64]], samples: int = SAMPLES, seed: int = SEED
) -> list[Significance]:
    """`paired_bootstrap` for a score that is the mean of the sentences' scores.

    Args:
        systems: `[sentences]` for each system.
    """
    count = len(systems[0])
    drawn = np.random.default_rng(seed).integers(count, size=(samples, count))
    found: list[Significance] = []
    baseline = systems[0][drawn].mean(axis=1)
    for values in systems:
        p_value, means = None, values[drawn].mean(axis=1)
        if found:
            difference, differences = values.mean() - systems[0].mean(), means - baseline
            larger = np.abs(differences - differences.mean()) > abs(difference)
            p_value = 1.0 if difference == 0 else float((larger.sum() + 1) / (samples + 1))
        low, high = np.quantile(means, [0.025, 0.975])
        found.append(Significance(p_value, float(means.mean()), float(high - low) / 2))
    return found


def paired_t_test(first: ArrayLike, second: ArrayLike) -> float | None:
    """Two-sided p-value of Student's t-test for paired samples; None for fewer than two examples."""
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    if len(differences) < 2:
        return None
    if np.all(differences == differences[0]):
        return 1.0 if differences[0] == 0 else 0.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def mcnemar_test(first: ArrayLike, second: ArrayLike) -> float:
    """Two-sided p-value of McNemar's exact test.

    Of the examples that only one of two models gets right, each falls to either model with probability 1/2 under the
    null hypothesis.

    Args:
        first, second: `[examples]` bool: whether each model is right.
    """
    from scipy.stats import binomtest

    a, b = np.asarray(first, bool), np.asarray(second, bool)
    differing = int(np.sum(a != b))
    return float(binomtest(int(np.sum(a & ~b)), differing).pvalue) if differing else 1.0
