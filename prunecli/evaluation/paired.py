"""Whether two models' values of the same examples differ by more than chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def paired_t_test(
    first: Sequence[float] | NDArray[np.float64], second: Sequence[float] | NDArray[np.float64]
) -> float | None:
    """Two-sided p-value of Student's t-test for paired samples; None for fewer than two examples."""
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    if len(differences) < 2:
        return None
    if np.all(differences == differences[0]):
        return 1.0 if differences[0] == 0 else 0.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def mcnemar_test(
    first: Sequence[bool] | NDArray[np.bool_], second: Sequence[bool] | NDArray[np.bool_]
) -> float:
    """Two-sided p-value of McNemar's exact test: of the examples that one model alone gets right, how many are whose.

    Under the null hypothesis each of the b + c such examples falls to either model with probability 1/2:
    `p = min(1, 2 P(X <= min(b, c)))`, X binomial with b + c trials.
    """
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    lost, won = int(np.sum(a & ~b)), int(np.sum(~a & b))
    from scipy.stats import binom

    return min(1.0, 2 * float(binom.cdf(min(lost, won), lost + won, 0.5))) if lost + won else 1.0
