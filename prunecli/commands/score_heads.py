"""`prunecli score-heads`: how much each attention head matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.commands.checkpoints import (
    CHECKPOINT,
    TASK,
    ask_huge_pages,
    checkpoint_or_demo,
    with_demo_text,
)
from prunecli.commands.command import OutputOptions, command, plot_option, result_option
from prunecli.methods.scoring import ScoreOptions
from prunecli.options import CheckpointPath
from prunecli.text.choice import TaskName, TextChoice

if TYPE_CHECKING:
    from prunecli.model.parts import AttentionLayer
    from prunecli.results.unit_scores import Scores


class ScoreHeads(OutputOptions, TextChoice, ScoreOptions):
    """Options of the command."""

    checkpoint: CheckpointPath | None = CHECKPOINT
    task: TaskName | None = TASK
    output: Path = result_option("heads.json", "File of the scores.")
    plot: Path | None = plot_option("Draw a heat map, layers by heads; for ablation also a histogram")


@command(ScoreHeads)
def score_heads(options: ScoreHeads) -> None:
    """Score attention heads: what the model loses without each of them.

    The gradient metric stores sums over examples, so that prune-heads can add up the files of several texts.
    """
    from prunecli.model.checkpoint import open_model

    options.check_outputs()
    if options.memory is not None:
        ask_huge_pages()
    choice = with_demo_text(options, options.checkpoint)
    with open_model(checkpoint_or_demo(options.checkpoint)) as opened:
        layers = opened.layout.require_heads()  # an unknown family is refused before torch is imported

        from prunecli.methods.heads.score import score_heads as run

        scores = run(
            opened,
            choice,
            options,
            options.output,
            task=options.task,
            force=options.force,
            progress=console.progress(),
            say=console.note,
        )
    changes = f"change of {_metric(scores)}" if scores.method == "ablation" else None
    options.finish(
        scores,
        lambda: show(scores, layers),
        lambda draw: [draw.head_maps(scores, _shown(scores), changes)],
        title=_title(scores),
        is_written=True,
    )


LEVEL = 0.01
"""A difference counts as significant below this p-value (1905.10650, Tables 1 to 3)."""


def head_table(
    values: Mapping[str, Sequence[float]],
    layers: Sequence[AttentionLayer],
    title: str,
) -> None:
    """Print one row for each attention, one column for each head of the original model; pruned heads have no value.

    Args:
        values: attention's name -> a value for each head that it holds.
        layers: the attentions, in the order of the rows; those without values are left out.
        title: above the table.
    """
    rows = []
    for layer in layers:
        if layer.name in values:
            by_head = dict(zip(layer.heads, values[layer.name], strict=True))
            cells = {
                str(head) if head else "head 0": f"{by_head[head]:.3g}" if head in by_head else None
                for head in range(layer.original_heads)
            }
            rows.append({"attention": layer.kind, "layer": str(layer.layer), **cells})
    console.table(title, rows, keys=2)


def _shown(scores: Scores) -> Mapping[str, Any]:
    """Axis -> the shown value of every head: I_h, or the difference of the score from the whole model's."""
    return scores.means() if scores.method == "gradient" else scores.changes()


_TITLES = {
    "gradient": "Importance (I_h of eq. 2{per}, not normalised)",
    "ablation": "Change of {metric} without the head",
    "all-but-one": "Change of {metric} with the head alone in its layer",
}


def _title(scores: Scores) -> str:
    per = ", per token" if scores.per == "token" else ""
    return _TITLES[scores.method].format(metric=_metric(scores), per=per)


def _metric(scores: Scores) -> str:
    from prunecli.results.evaluation import SCORES

    known = SCORES["translation"].get(str(scores.metric))
    return str(scores.metric) if known is None else known.title


def show(scores: Scores, layers: Any) -> None:
    """The table, and what it says in words."""
    import numpy as np

    from prunecli.model.axes import module_of
    from prunecli.results.evaluation import too_few

    values = {module_of(name): own.tolist() for name, own in _shown(scores).items()}
    head_table(values, layers, _title(scores))
    if scores.method == "gradient":
        what = "the tokens of " if scores.per == "token" else ""
        console.out(f"Mean over {what}{scores.examples:,} examples of {scores.task}.")
        return
    console.out(f"{_metric(scores)} of the whole model: {scores.base:.4g}, on {scores.examples:,} examples.")
    reported = scores if scores.reported is None else scores.reported
    few = too_few(reported.examples, "examples")
    if scores.method != "ablation":
        _show_best(scores, tested=few is None)
    elif few is None:
        gains = scores.sign * np.concatenate([*scores.changes().values()])
        sure = np.concatenate([*scores.p_values.values()]) < LEVEL
        worse, better = np.sum(sure & (gains < 0)), np.sum(sure & (gains > 0))
        console.out(
            f"Without one head: {worse} of {len(sure)} make it significantly worse, {better} better (p < {LEVEL})."
        )
    if few:
        console.warn(few)


def _show_best(scores: Scores, *, tested: bool) -> None:
    """Print the best single head of each layer; if `tested`, with a mark for significant changes."""
    metric, rows = _metric(scores), []
    for best in scores.tables()["best"]:
        mark = "*" if tested and best["p_value"] < LEVEL else ""
        rows.append(
            {
                "attention": best["attention"],
                "head": str(best["head"]),
                metric: f"{best['only']:.4g}",
                "change": f"{best['change']:+.4g}{mark}",
            }
        )
    where = "chosen on other text" if scores.reported is not None else "chosen on the same text"
    console.table(f"The best single head of each layer, {where}", rows)
    if tested:
        console.out(f"* differs from the whole model with p < {LEVEL}.")
