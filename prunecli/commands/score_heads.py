"""`prunecli score-heads`: how much each attention head matters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prunecli
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
    options.check_outputs()
    if options.memory is not None:
        ask_huge_pages()
    choice = with_demo_text(options, options.checkpoint)
    with prunecli.open_model(checkpoint_or_demo(options.checkpoint)) as opened:
        layers = opened.layout.require_heads()  # an unknown family is refused before torch is imported

        scores = prunecli.score_heads(
            opened,
            choice,
            options,
            options.output,
            task=options.task,
            force=options.force,
            **console.listeners(),
        )

    def blocks() -> Iterator[Any]:
        yield from scores.head_blocks(layers)
        if scores.few is not None:
            console.warn(scores.few)

    changes = f"change of {scores.metric_title}" if scores.method == "ablation" else None
    options.finish(
        scores,
        blocks(),
        lambda draw: [draw.head_maps(scores, scores.shown_values, changes)],
        title=scores.title,
        is_written=True,
    )
