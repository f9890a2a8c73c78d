"""The scores of many variants of a model on the same examples, and which differences chance alone would not make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunecli.evaluation.paired import paired_t_test
from prunecli.evaluation.scoring import make_metrics
from prunecli.evaluation.significance import SAMPLES, SEED, paired_bootstrap
from prunecli.methods.names import EffectMetric

TEXT_METRICS: tuple[EffectMetric, ...] = ("chrf++", "bleu")
LEVEL = 0.01
"""A difference counts as significant below this p-value (Tables 1 to 3)."""


@dataclass(frozen=True)
class Effects:
    """The scores of a whole model and of variants of it, on the same examples.

    Attributes:
        metric: what they are scores of; a loss is better when it is lower.
        base: that of the whole model.
        values: that of each variant.
        p_values: of each variant's difference from the whole model.
    """

    metric: EffectMetric
    base: float
    values: tuple[float, ...]
    p_values: tuple[float, ...]


def mean_effects(metric: EffectMetric, outcomes: Sequence[Sequence[float]]) -> Effects:
    """Means over the examples, compared by a paired t-test, two-sided.

    Args:
        outcomes: of the whole model and of each variant, `[1 + variants][examples]`.
    """
    base, *others = (np.asarray(scores, dtype=np.float64) for scores in outcomes)
    return Effects(
        metric,
        float(base.mean()),
        tuple(float(scores.mean()) for scores in others),
        tuple(_known(paired_t_test(base, scores)) for scores in others),
    )


def text_effects(
    outcomes: Sequence[Sequence[str]], references: Sequence[str], samples: int = SAMPLES, seed: int = SEED
) -> dict[EffectMetric, Effects]:
    """Corpus scores of translations, compared by the paired bootstrap (Koehn 2004).

    Args:
        outcomes: of the whole model and of each variant, `[1 + variants][examples]`.
        samples: resamples of the examples.
        seed: of the resamples.

    Raises:
        UsageError: `samples` or `seed` is less than 1.
    """
    known = make_metrics(None)
    metrics: dict[str, Any] = {metric: known[metric] for metric in TEXT_METRICS}
    tests = paired_bootstrap(outcomes, references, metrics, samples, seed) if len(outcomes) > 1 else []
    effects: dict[EffectMetric, Effects] = {}
    for metric in TEXT_METRICS:
        base, *values = (float(metrics[metric].corpus_score(texts, [references]).score) for texts in outcomes)
        p_values = tuple(_known(test[metric].p_value) for test in tests[1:])
        effects[metric] = Effects(metric, base, tuple(values), p_values)
    return effects


def _known(p_value: float | None) -> float:
    """1 where there is nothing to test with: a single example."""
    return 1.0 if p_value is None else p_value
