"""Whether two systems' scores differ by more than chance: sacrebleu's paired bootstrap test."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import UsageError

SAMPLES = 1000
SEED = 12345
"""sacrebleu's own defaults."""
LEAST = 30
"""Examples from which tests are shown: on fewer neither resampling nor a t-test holds what it promises."""


@dataclass(frozen=True)
class Significance:
    """One score of one system beside the baseline's.

    Attributes:
        p_value: probability of a difference this large by chance (two-sided); None for the baseline itself; 1
            where the scores are equal (sacrebleu's count of larger differences would call that significant).
        mean: mean of the score over the resamples.
        ci95: half the width of its 95 % confidence interval.
    """

    p_value: float | None
    mean: float
    ci95: float


def too_few(examples: int, what: str) -> str | None:
    """What is said in the place of a test on so few examples; None where there are enough."""
    if examples >= LEAST:
        return None
    return f"{examples:,} {what} are too few for a test of significance: {LEAST} or more would do."


def check_bootstrap(samples: int, seed: int) -> None:
    """Refuse what `paired_bootstrap` cannot do.

    Raises:
        UsageError: `samples` or `seed` is less than 1.
    """
    if samples < 1 or seed < 1:
        raise UsageError(
            f"paired bootstrap with {samples} resamples and seed {seed}", "Both must be 1 or more."
        )


def paired_bootstrap(
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    metrics: Mapping[str, Any],
    samples: int = SAMPLES,
    seed: int = SEED,
) -> list[dict[str, Significance]]:
    """Test every system against the first (Koehn 2004, as in sacrebleu): the same resamples for all of them.

    Args:
        systems: outputs of each system, in the order of `references`.
        metrics: name -> sacrebleu metric.
        samples: resamples of the sentences, with replacement.
        seed: of the resamples; at least 1 (sacrebleu takes 0 for "none").

    Returns:
        Per system: metric -> significance.

    Raises:
        UsageError: `samples` or `seed` is less than 1.
    """
    check_bootstrap(samples, seed)
    from sacrebleu.significance import PairedTest

    tests: list[dict[str, Significance]] = [{} for _ in systems]
    named = [(str(index), list(outputs)) for index, outputs in enumerate(systems)]
    for name, metric in metrics.items():
        # One test per metric: sacrebleu keys them by the score's name, which BLEU and spBLEU share.
        with _sacrebleu_seed(seed):
            test = PairedTest(named, {name: metric}, [list(references)], "bs", n_samples=samples, n_jobs=1)
            _, table = test()
        results = next(column for key, column in table.items() if key != "System")
        for test_of, result in zip(tests, results, strict=True):
            p_value = None if result.p_value is None else float(result.p_value)
            if p_value is not None and result.score == results[0].score:
                p_value = 1.0
            test_of[name] = Significance(p_value, float(result.mean), float(result.ci))
    return tests


def bootstrap_of_means(
    systems: Sequence[NDArray[np.float64]], samples: int = SAMPLES, seed: int = SEED
) -> list[Significance]:
    """`paired_bootstrap` of a score that is the mean of the sentences' own.

    Args:
        systems: `[sentences]` of each system.
    """
    random = np.random.default_rng(seed)
    means = np.empty((len(systems), samples))
    for sample in range(samples):
        drawn = random.integers(len(systems[0]), size=len(systems[0]))
        means[:, sample] = [values[drawn].mean() for values in systems]
    found: list[Significance] = []
    for values, own in zip(systems, means, strict=True):
        p_value = None
        if found:
            difference, differences = values.mean() - systems[0].mean(), own - means[0]
            larger = np.abs(differences - differences.mean()) > abs(difference)
            p_value = 1.0 if difference == 0 else float((larger.sum() + 1) / (samples + 1))
        low, high = np.quantile(own, [0.025, 0.975])
        found.append(Significance(p_value, float(own.mean()), float(high - low) / 2))
    return found


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """sacrebleu reads its seed from the environment only."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
