"""`prunecli collect-gates`: what the experts of a model do, per language pair or per text."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import DemoOption, checkpoint_or_demo, texts_or_demo
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.memory_options import MemoryOption, SpillDirOption, ask_huge_pages, report_run
from prunecli.commands.options import (
    CheckpointArgument,
    ComputeDtypeOption,
    NamedTextOption,
)
from prunecli.commands.outputs import Outputs
from prunecli.commands.text_options import TextOptions
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.results.gates import GateStatistics

ROWS_SHOWN = 12


Mode = Literal["forced", "beam"]


@flattened
def collect_gates(
    checkpoint: CheckpointArgument = None,
    texts: Annotated[TextOptions, Without({"text", "labelled"})] = TextOptions(),
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="forced: run on the reference, fast; beam: search. Default: forced.",
        ),
    ] = None,
    beam: Annotated[int, typer.Option(min=2, help="Beams per sentence with --mode beam.")] = 4,
    text: NamedTextOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Use only the first N tokens of each --text name."),
    ] = None,
    mean_outputs: Annotated[
        bool,
        typer.Option(
            "--mean-outputs",
            help="Of language models: also write OUTPUT.outputs.safetensors, for prune-experts --constant-experts.",
        ),
    ] = False,
    memory: MemoryOption = None,
    spill_dir: SpillDirOption = None,
    demo: DemoOption = "translation",
    dtype: ComputeDtypeOption = "auto",
    outputs: Annotated[Outputs, Without({"plot", "table"}), Helps(output="The statistics.")] = Outputs(
        output=Path("gates.json")
    ),
) -> None:
    """Collect gate statistics: how often, and how surely, each expert is chosen for each language pair or text.

    Of language models (--text) also how large its outputs are.

    The file holds sums over real tokens, so files of several runs add up. An interrupted run goes on where it stopped
    when it is started again with the same arguments. A model that does not fit is run layer by layer.

    Several processes share the text: torchrun --nproc-per-node 2 -m prunecli collect-gates ….
    """
    from prunecli.model.checkpoint import open_model
    from prunecli.tensors.quantities import parse_size
    from prunecli.text.plain import read_corpora

    ask_huge_pages()  # though --memory be left out: a model that does not fit is run by layers too
    budget = None if memory is None else parse_size(memory)
    choice = texts.choice(checkpoint, whole_files=None, context=None)
    files = texts_or_demo(text, demo, "val", checkpoint)
    of_translation = {
        **choice.given,
        "--max-sentences": texts.max_sentences is not None,
        "--mode": mode is not None,
    }
    of_text = {
        "--whole-files": texts.whole_files,
        "--lines": texts.whole_files is False,
        "--context": texts.context,
        "--max-tokens": max_tokens,
        "--mean-outputs": mean_outputs,
    }
    for name, is_given in (of_translation if files else of_text).items():
        if is_given and files:
            raise UsageError(
                f"{name} goes with models that translate, --text with language models", "Give one."
            )
        if is_given:
            raise UsageError(f"{name} goes with --text", "Give --text NAME=FILE, or leave it out.")
    with processes.together() as process_group, ExitStack() as stack:
        with process_group.in_step():
            if process_group.is_main:  # before a model is fetched
                outputs.check()
            opened = stack.enter_context(open_model(checkpoint_or_demo(checkpoint, demo)))

            from prunecli.methods.experts.batches import CollectOptions
            from prunecli.methods.experts.collect import collect_gates as collect

            options = CollectOptions(
                mode or "forced", beam, texts.batch_tokens, texts.context, max_tokens, mean_outputs
            )
            whole_files = texts.reads_whole(is_demo=text is None)
            corpora = None
            if files:
                corpora = read_corpora(
                    files, whole_files=whole_files is not False, max_tokens=max_tokens, say=console.note
                )
        collected = collect(
            opened,
            corpora or choice,
            options,
            outputs.output,
            force=outputs.force,
            device=texts.device,
            dtype=dtype,
            memory=budget,
            spill_directory=spill_dir,
            process_group=process_group,
            progress=console.progress(outputs.quiet),
            say=console.note,
        )
    if collected.report is not None:
        report_run(collected.report)
    if not process_group.is_main:
        return
    statistics = collected.statistics

    def document() -> dict[str, Any]:
        return {name: value for name, value in statistics.to_json().items() if name != "entries"}

    outputs.show(document, lambda: _show(statistics))


def _show(statistics: GateStatistics) -> None:
    """Per entry: tokens, and how many of a layer's experts rank first for nine tokens in ten."""
    import numpy as np

    from prunecli.results.gates import side_of

    is_text = statistics.mode == "text"
    sides = np.array([side_of(layer) for layer in statistics.layers])
    rows: list[tuple[str, ...]] = []
    for name, sums in list(statistics.entries.items())[:ROWS_SHOWN]:
        running = np.cumsum(-np.sort(-sums.top1, axis=1), axis=1)
        busy = (running < 0.9 * running[:, -1:]).sum(axis=1) + 1
        shares = [
            f"{busy[sides == side].mean():.1f}" if side in sides else "-" for side in ("encoder", "decoder")
        ]
        first, last = f"{int(sums.tokens[0]):,}", f"{int(sums.tokens[-1]):,}"
        if is_text:
            shown = " / ".join(share for share in shares if share != "-")
            rows.append((name, first, shown, f"{int((sums.routed == 0).sum()):,} of {sums.routed.size:,}"))
        else:
            rows.append((name, first, last, *shares))
    columns: tuple[str, ...] = (
        "pair",
        "encoder tokens",
        "decoder tokens",
        "busy experts, encoder",
        "decoder",
    )
    if is_text:
        columns = ("text", "tokens", "busy experts", "experts without a token")
    console.show(console.table("Gate statistics", columns, rows))
    hidden = len(statistics.entries) - len(rows)
    more = f"{hidden} more {columns[0]}s in the file. " if hidden else ""
    both = "; of the encoder / of the decoder" if is_text and "/" in rows[0][2] else ""
    console.out(
        f"{more}Busy: those that take 90% of a layer's first choices, of {statistics.num_experts}; mean over layers"
        f"{both}."
    )
