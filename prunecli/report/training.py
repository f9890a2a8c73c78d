"""The section of training: the curves of each finetuning."""

from __future__ import annotations

from collections.abc import Sequence

from prunecli.report.charts import Point, Series, chart
from prunecli.report.collect import Material
from prunecli.report.markup import NOTHING, Html, element, join, table
from prunecli.results.schemas import Finetune, LoggedStep

MOST_POINTS = 300
"""A longer log is drawn by every so-manieth line of it."""


def training_section(material: Material) -> Html | None:
    """Curves and figures of every OUTPUT.finetune.json; None where there is none."""
    files = material.of(Finetune)
    return join([_overview(files), *(_training(name, found) for name, found in files)]) if files else None


def _overview(files: Sequence[tuple[str, Finetune]]) -> Html:
    rows = []
    for name, found in files:
        best = (found.best or {}).get("step")
        last = found.validation[-1] if found.validation else None
        rows.append(
            [
                name,
                found.output,
                f"{found.steps:,}",
                f"{found.tokens:,}",
                f"{found.tokens_per_second:,.0f}",
                f"{best:,}" if isinstance(best, int) else NOTHING,
                NOTHING if last is None else f"{last.loss:.4f}",
                NOTHING if last is None or last.chrf is None else f"{last.chrf:.2f}",
            ]
        )
    columns = ["file", "result", "updates", "tokens", "tokens/s", "best at", "last loss", "last chrF++"]
    return table("Trainings; losses and chrF++ are those of validation", columns, rows, text_columns=2)


def _training(name: str, found: Finetune) -> Html:
    """Losses; chrF++ where it was measured."""
    curves = [
        Series("training", _points(found.training, "training"), joined=True),
        Series("validation", _points(found.validation, "validation"), joined=True),
    ]
    drawn = []
    if any(curve.points for curve in curves):
        drawn.append(chart(f"Loss of {found.output}", curves, "update", "loss", named=False))
    scored = [step for step in found.validation if step.chrf is not None]
    if scored:
        points = tuple(Point(step.step, step.chrf or 0.0, "validation") for step in scored)
        drawn.append(chart(f"chrF++ of {found.output}", [Series("chrF++", points, True)], "update", "chrF++"))
    return join([element("h3", name), element("div", *drawn, class_="charts")])


def _points(steps: Sequence[LoggedStep], name: str) -> tuple[Point, ...]:
    every = max(1, -(-len(steps) // MOST_POINTS))
    return tuple(Point(step.step, step.loss, name) for step in steps[::every])
