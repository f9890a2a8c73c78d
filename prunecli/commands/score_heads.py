"""`prunecli score-heads`: how much each attention head matters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prunecli.commands import console
from prunecli.commands.checkpoints import (
    CHECKPOINT,
    TASK,
    checkpoint_or_demo,
    report_run,
    running_by_layer,
    with_demo_text,
)
from prunecli.commands.command import command
from prunecli.commands.outputs import OutputOptions, plot_option, result_option, write_table
from prunecli.methods.scoring import ScoreOptions
from prunecli.options import CheckpointPath
from prunecli.text.choice import TextChoice
from prunecli.text.tasks import TaskName


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
    from prunecli.commands.head_tables import draw, show
    from prunecli.model.checkpoint import open_model

    options.check_outputs()
    running_by_layer(options.memory)
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
            progress=console.progress(options.quiet),
            say=console.note,
            report=partial(report_run, back=True),
        )
    write_table(options.table, scores, force=options.force)
    if options.plot is not None:
        draw(scores, options.plot)
    options.show(scores.to_json, lambda: show(scores, layers))
