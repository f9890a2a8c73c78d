"""`prunecli score-heads`: how much each attention head matters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from prunecli.commands import console
from prunecli.commands.groups import Helps, flattened
from prunecli.commands.memory_options import MemoryOption, SpillDirOption, memory_bytes, report_run
from prunecli.commands.options import (
    CheckpointArgument,
    ComputeDtypeOption,
    SeedOption,
    TaskOption,
    refuse_absent_text,
)
from prunecli.commands.outputs import Outputs, write_table
from prunecli.commands.text_options import TextOptions
from prunecli.methods.names import EffectMetric

MethodName = Literal["gradient", "ablation", "all-but-one"]


ImportanceName = Literal["example", "token"]


@flattened
def score_heads(
    checkpoint: CheckpointArgument = None,
    texts: TextOptions = TextOptions(),
    task: TaskOption = None,
    method: Annotated[
        MethodName,
        typer.Option(
            help="gradient: one forward and backward pass; ablation: the score without each head; all-but-one: "
            "with each head alone in its layer.",
        ),
    ] = "gradient",
    importance: Annotated[
        ImportanceName | None,
        typer.Option(
            help="What gradient takes the absolute value of: the sum over each example's tokens, as eq. 2 says, or "
            "each token, as the authors' code does; default: example.",
        ),
    ] = None,
    metric: Annotated[
        EffectMetric | None,
        typer.Option(
            help="The score of ablation and all-but-one; default: chrf++, accuracy, cosine or loss, by task; loss is "
            "fast.",
        ),
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beams per sentence for chrf++ and bleu.")] = 4,
    select_data: Annotated[
        Path | None,
        typer.Option(
            callback=refuse_absent_text,
            help="all-but-one: choose the best heads on this text (a directory as --data, or a file as --text or "
            "--labelled), report them on the other.",
        ),
    ] = None,
    select_split: Annotated[
        str | None,
        typer.Option(help="The same, by split of the text."),
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(min=1, help="Resamples of the significance test of chrf++ and bleu.")
    ] = 1000,
    seed: SeedOption = 12345,
    memory: MemoryOption = None,
    spill_dir: SpillDirOption = None,
    dtype: ComputeDtypeOption = "auto",
    outputs: Annotated[
        Outputs,
        Helps(plot="Draw the heat map, layers by heads; of ablation also a histogram.", output="The scores."),
    ] = Outputs(output=Path("heads.json")),
) -> None:
    """Score attention heads: what the model loses without each.

    The gradient method's file holds sums over examples, so files of several texts merge in prune-heads.
    """
    from prunecli.commands.checkpoints import checkpoint_or_demo
    from prunecli.commands.head_tables import draw, show
    from prunecli.model.checkpoint import open_model

    outputs.check()
    budget = memory_bytes(memory, spill_dir)
    choice = texts.choice(checkpoint)
    with open_model(checkpoint_or_demo(checkpoint)) as opened:
        layers = (
            opened.layout.own_attentions
        )  # a family that is not declared is refused before anything heavy

        from prunecli.methods.heads.score import ScoreOptions
        from prunecli.methods.heads.score import score_heads as run

        options = ScoreOptions(
            method=method,
            per=importance,
            metric=metric,
            beam=beam,
            batch_tokens=texts.batch_tokens,
            samples=bootstrap,
            seed=seed,
            select_data=select_data,
            select_split=select_split,
            device=texts.device,
            dtype=dtype,
            memory=budget,
            spill_directory=spill_dir,
        )
        scores = run(
            opened,
            choice,
            options,
            outputs.output,
            task=task,
            force=outputs.force,
            progress=console.progress(outputs.quiet),
            say=console.note,
            report=partial(report_run, back=True),
        )
    write_table(outputs.table, scores, force=outputs.force)
    if outputs.plot is not None:
        draw(scores, outputs.plot)
    outputs.show(scores.to_json, lambda: show(scores, layers))
