"""`evaluate --plot`: what was measured against how much of each checkpoint was removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation

SCORES = {
    "translation": {"chrf++": "chrF++", "bleu": "BLEU"},
    "lm": {"perplexity": "perplexity"},
    "mlm": {"loss": "loss of the hidden tokens, nats"},
    "classification": {"accuracy": "accuracy"},
}
"""Task -> score -> the title of its panel."""


def plot_evaluation(path: Path, evaluation: Evaluation, checkpoints: Mapping[str, Path]) -> None:
    """Draw evaluation.json; `checkpoints` are those of its labels."""
    from prunecli.analysis.plots import CurvePoint, save_figure, score_figure
    from prunecli.analysis.removed import removed
    from prunecli.model.checkpoint import open_model

    titles = SCORES[evaluation.task]
    unit, fractions = removed([open_model(checkpoints[one.checkpoint]) for one in evaluation.results])
    points = [
        CurvePoint(
            lost.fraction,
            {title: float((result.scores or result.mean)[name]) for name, title in titles.items()},
            lost.lines,
            lost.is_original,
        )
        for result, lost in zip(evaluation.results, fractions, strict=True)
    ]
    save_figure(score_figure(points, unit=unit), path)
