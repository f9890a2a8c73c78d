"""`prunecli collect-gates`: what the experts of a model do, per language pair or per text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prunecli
from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    CHECKPOINT,
    DEMO,
    DemoName,
    ask_huge_pages,
    checkpoint_or_demo,
    reads_whole,
    texts_or_demo,
    with_demo_text,
)
from prunecli.commands.command import OutputOptions, command, result_option
from prunecli.errors import UsageError
from prunecli.evaluation.on_text import RunOptions
from prunecli.methods.scoring import CollectOptions
from prunecli.options import COMPUTE_DTYPE, CheckpointPath, ComputeDtype
from prunecli.text.choice import NAMED_TEXT, NamedText, TextChoice

if TYPE_CHECKING:
    from prunecli.results.gates import GateStatistics

ROWS_SHOWN = 12


class CollectGates(OutputOptions, TextChoice, RunOptions, CollectOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"files", "labelled", "plot", "table"})

    checkpoint: CheckpointPath | None = CHECKPOINT
    text: tuple[NamedText, ...] = NAMED_TEXT
    dtype: ComputeDtype = COMPUTE_DTYPE
    demo_model: DemoName = DEMO
    output: Path = result_option("gates.json", "File of the statistics.")


@command(CollectGates)
def collect_gates(options: CollectGates) -> None:
    """Collect gate statistics: how often, and how surely, each expert is chosen for each language pair or text.

    The file holds sums, so that files of several runs add up. The same command resumes an interrupted run. A model
    that does not fit in memory runs layer by layer.

    Several processes share the text: torchrun --nproc-per-node 2 -m prunecli collect-gates ….
    """
    from prunecli.text.plain import read_corpora

    ask_huge_pages()  # without --memory too: a model that does not fit runs layer by layer
    files = texts_or_demo(options.text, options.demo_model, "val", options.checkpoint)
    _check(options, is_text=bool(files))
    choice = with_demo_text(options, options.checkpoint)
    with processes.together() as process_group, ExitStack() as stack:
        with process_group.in_step():
            if process_group.is_main:  # before a model is fetched
                options.check_outputs()
            opened = stack.enter_context(
                prunecli.open_model(checkpoint_or_demo(options.checkpoint, options.demo_model))
            )

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
            progress=console.progress(),
            say=console.note,
        )
    if collected.report is not None:
        console.note(collected.report.line())
    if not process_group.is_main:
        return
    statistics = collected.statistics

    def document() -> dict[str, Any]:
        return {name: value for name, value in statistics.to_json().items() if name != "entries"}

    options.show(document, _blocks(statistics))


def _check(options: CollectGates, *, is_text: bool) -> None:
    """Refuse options for the other kind of model.

    Raises:
        UsageError: one is given.
    """
    of_pairs = ("data", "source_file", "target_file", "langs", "pairs", "max_sentences", "mode")
    of_text = ("whole_files", "context", "max_tokens", "mean_outputs")
    for name in of_pairs if is_text else of_text:
        if name not in options.model_fields_set:
            continue
        if is_text:
            raise UsageError(
                f"`{name}` goes with models that translate, `text` with language models", "Give one."
            )
        raise UsageError(f"`{name}` goes with `text`", "Give `text=NAME=FILE`, or leave it out.")


def _blocks(statistics: GateStatistics) -> Iterator[Any]:
    """Per entry: tokens, and how many of a layer's experts rank first for nine tokens in ten."""
    import numpy as np

    from prunecli.results.gates import side_of

    is_text = statistics.mode == "text"
    sides = np.array([side_of(layer) for layer in statistics.layers])
    rows: list[dict[str, str | None]] = []
    for name, sums in list(statistics.entries.items())[:ROWS_SHOWN]:
        running = np.cumsum(-np.sort(-sums.top1, axis=1), axis=1)
        busy = (running < 0.9 * running[:, -1:]).sum(axis=1) + 1
        first, last = f"{int(sums.tokens[0]):,}", f"{int(sums.tokens[-1]):,}"
        tokens = {"text": name, "tokens": first}
        if not is_text:
            tokens = {"pair": name, "encoder tokens": first, "decoder tokens": last}
        shares = {
            f"busy experts, {side}": f"{busy[sides == side].mean():.1f}" if side in sides else None
            for side in ("encoder", "decoder")
        }
        idle = f"{int((sums.routed == 0).sum()):,} of {sums.routed.size:,}" if is_text else None
        rows.append({**tokens, **shares, "experts without a token": idle})
    yield console.table("Gate statistics", rows)
    hidden = len(statistics.entries) - len(rows)
    more = f"{hidden} more {'text' if is_text else 'pair'}s in the file. " if hidden else ""
    yield (
        f"{more}Busy: those that take 90% of a layer's first choices, of {statistics.num_experts}; mean over layers."
    )
