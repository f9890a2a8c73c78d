"""`evaluate --plot`: what was measured against how much of each checkpoint was removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCORES = {
    "translation": {"chrf++": "chrF++", "bleu": "BLEU"},
    "lm": {"perplexity": "perplexity"},
    "mlm": {"loss": "loss of the hidden tokens, nats"},
    "classification": {"accuracy": "accuracy"},
}
"""Task -> score -> the title of its panel."""


def plot_evaluation(path: Path, payload: Mapping[str, Any], checkpoints: Mapping[str, Path]) -> None:
    """Draw the payload of evaluation.json; `checkpoints` are those of its labels."""
    from prunecli.analysis.plots import CurvePoint, save_figure, score_figure
    from prunecli.analysis.removed import removed
    from prunecli.model.checkpoint import open_model

    titles = SCORES[payload["task"]]
    key = "mean" if payload["task"] == "translation" else "scores"
    unit, fractions = removed([open_model(checkpoints[row["checkpoint"]]) for row in payload["results"]])
    points = [
        CurvePoint(
            lost.fraction,
            {title: float(row[key][name]) for name, title in titles.items()},
            lost.lines,
            lost.is_original,
        )
        for row, lost in zip(payload["results"], fractions, strict=True)
    ]
    save_figure(score_figure(points, unit=unit), path)
