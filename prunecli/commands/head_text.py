"""What `score-heads` prints and draws of its scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.results.heads import HeadScores


def _values(scores: HeadScores) -> dict[str, Any]:
    """What is shown of every head: I_h, or the score's difference from that of the whole model."""
    if scores.method == "gradient":
        return scores.means()
    return {name: array - (scores.base or 0.0) for name, array in scores.values.items()}


_TITLES = {
    "gradient": "Importance (I_h of eq. 2{per}, not normalised)",
    "ablation": "Change of {metric} without the head",
    "all-but-one": "Change of {metric} with the head alone in its layer",
}


def _title(scores: HeadScores) -> str:
    per = ", per token" if scores.per == "token" else ""
    return _TITLES[scores.method].format(metric=_metric(scores), per=per)


def _metric(scores: HeadScores) -> str:
    from prunecli.commands.evaluation_table import TITLES

    return TITLES.get(str(scores.metric), str(scores.metric))


def draw(scores: HeadScores, layers: Any, path: Path) -> None:
    """The heat map of --plot."""
    from prunecli.analysis.heat_maps import head_figure
    from prunecli.analysis.plots import save_figure

    values = {name: array.tolist() for name, array in _values(scores).items()}
    save_figure(head_figure(values, layers, _title(scores)), path)


def show(scores: HeadScores, layers: Any) -> None:
    """The table, and what it says in words."""
    from prunecli.commands.head_table import head_table
    from prunecli.evaluation.significance import too_few
    from prunecli.methods.heads.effects import LEVEL

    console.show(head_table(_values(scores), layers, _title(scores)))
    if scores.method == "gradient":
        what = "the tokens of " if scores.per == "token" else ""
        console.out(f"Mean over {what}{scores.examples:,} examples of {scores.task}.")
        return
    console.out(f"{_metric(scores)} of the whole model: {scores.base:.4g}, on {scores.examples:,} examples.")
    reported = scores if scores.reported is None else scores.reported
    few = too_few(reported.examples, "examples")
    if scores.method != "ablation":
        _show_best(scores, None if few else LEVEL)
    elif few is None:
        _show_significant(scores, LEVEL)
    if few:
        console.warn(few)


def _show_significant(scores: HeadScores, level: float) -> None:
    import numpy as np

    gained = np.concatenate(
        [scores.sign * (array - (scores.base or 0.0)) for array in scores.values.values()]
    )
    sure = np.concatenate(list(scores.p_values.values())) < level
    console.out(
        f"Without one head: {int((sure & (gained < 0)).sum())} of {len(sure)} make it significantly worse, "
        f"{int((sure & (gained > 0)).sum())} better (p < {level})."
    )


def _show_best(scores: HeadScores, level: float | None) -> None:
    rows = []
    for best in scores.tables()["best"]:
        mark = "*" if level is not None and best["p_value"] < level else ""
        rows.append(
            [best["attention"], str(best["head"]), f"{best['only']:.4g}", f"{best['change']:+.4g}{mark}"]
        )
    where = "chosen on other text" if scores.reported is not None else "chosen on the same text"
    columns = ("attention", "head", _metric(scores), "change")
    console.show(console.table(f"The best single head of each layer, {where}", columns, rows))
    if level is not None:
        console.out(f"* differs from the whole model with p < {level}.")
