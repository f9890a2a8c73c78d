"""`prunecli collect-gates` and `score-heads`: how often experts are chosen, and how much attention heads matter."""

from pathlib import Path
from typing import Any

import prunecli
from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    CHECKPOINT,
    DEMO,
    TASK,
    DemoName,
    ask_huge_pages,
    checkpoint_or_demo,
    reads_whole,
    texts_or_demo,
    with_demo_text,
)
from prunecli.commands.command import OutputOptions, command, plot_option, result_option
from prunecli.evaluation.on_text import RunOptions
from prunecli.methods.scoring import CollectOptions, ScoreOptions
from prunecli.options import COMPUTE_DTYPE, CheckpointPath, ComputeDtype
from prunecli.text.choice import NAMED_TEXT, NamedText, TaskName, TextChoice


class CollectGates(OutputOptions, TextChoice, RunOptions, CollectOptions):
    """Options of the command."""

    LEFT_OUT = ("files", "labelled", "plot", "table")

    checkpoint: CheckpointPath | None = CHECKPOINT
    text: tuple[NamedText, ...] = NAMED_TEXT
    dtype: ComputeDtype = COMPUTE_DTYPE
    demo_model: DemoName = DEMO
    output: Path = result_option("gates.json", "File of the statistics.")


@command
def collect_gates(options: CollectGates) -> None:
    """Collect gate statistics: how often, and how surely, each expert is chosen for each language pair or text.

    The file holds sums, so that files of several runs add up. The same command resumes an interrupted run. A model
    that does not fit in memory runs layer by layer.

    Several processes share the text: torchrun --nproc-per-node 2 -m prunecli collect-gates ….
    """
    from prunecli.text.plain import read_corpora

    ask_huge_pages()  # without --memory too: a model that does not fit runs layer by layer
    files = texts_or_demo(options.text, options.demo_model, "val", options.checkpoint)
    if files:
        of_pairs = ("data", "source_file", "target_file", "langs", "pairs", "max_sentences", "mode")
        options.refuse(of_pairs, "goes with models that translate, `text` with language models", "Give one.")
    else:
        of_text = ("whole_files", "context", "max_tokens", "mean_outputs")
        options.refuse(of_text, "goes with `text`", "Give `text=NAME=FILE`, or leave it out.")
    choice = with_demo_text(options, options.checkpoint)
    with processes.together() as process_group:
        with process_group.in_step():
            if process_group.is_main:  # before a model is fetched
                options.check_outputs()
            opened = prunecli.open_model(checkpoint_or_demo(options.checkpoint, options.demo_model))
            corpora = None
            if files:
                whole_files = reads_whole(options, is_demo=not options.text)
                corpora = read_corpora(
                    files,
                    whole_files=whole_files is not False,
                    max_tokens=options.max_tokens,
                    say=console.note,
                )
        collected = prunecli.collect_gates(
            opened,
            corpora or choice,
            options,
            options.output,
            force=options.force,
            device=options.device,
            dtype=options.dtype,
            memory=options.memory,
            spill_directory=options.spill_directory,
            process_group=process_group,
            **console.listeners(),
        )
    if collected.report is not None:
        console.note(collected.report.line())
    if not process_group.is_main:
        return
    statistics = collected.statistics

    def document() -> dict[str, Any]:
        return {name: value for name, value in statistics.to_json().items() if name != "entries"}

    options.show(document, statistics.blocks)


class ScoreHeads(OutputOptions, TextChoice, ScoreOptions):
    """Options of the command."""

    checkpoint: CheckpointPath | None = CHECKPOINT
    task: TaskName | None = TASK
    output: Path = result_option("heads.json", "File of the scores.")
    plot: Path | None = plot_option("Draw a heat map, layers by heads; for ablation also a histogram")


@command
def score_heads(options: ScoreHeads) -> None:
    """Score attention heads: what the model loses without each of them.

    The gradient metric stores sums over examples, so that prune-heads can add up the files of several texts.
    """
    options.check_outputs()
    if options.memory is not None:
        ask_huge_pages()
    choice = with_demo_text(options, options.checkpoint)
    opened = prunecli.open_model(checkpoint_or_demo(options.checkpoint))
    layers = opened.layout.require_heads()  # an unknown family is refused before torch is imported
    scores = prunecli.score_heads(
        opened, choice, options, options.output, task=options.task, force=options.force, **console.listeners()
    )

    def blocks() -> console.Blocks:
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
