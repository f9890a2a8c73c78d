"""`prunecli bench-latency`: speed and memory of checkpoints, side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands import console
from prunecli.commands.checkpoints import DemoOption, checkpoints_or_demo, texts_or_demo
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import (
    AllOption,
    CheckpointsArgument,
    RunningDtypeOption,
    TaskOption,
)
from prunecli.commands.outputs import Outputs
from prunecli.commands.text_options import TextOptions
from prunecli.errors import UsageError
from prunecli.tensors.quantities import counted, whole_numbers

if TYPE_CHECKING:
    from prunecli.results.latency import Latency, Timed, Timing

USUAL = 8
"""Sentences of a run."""
MANY = 4
"""With more checkpoints than this in the folder, and none named, less is measured of each."""


@flattened
def bench_latency(
    checkpoints: CheckpointsArgument = None,
    texts: Annotated[
        TextOptions, Without({"source_file", "target_file", "langs", "max_sentences", "batch_tokens"})
    ] = TextOptions(split="test"),
    task: TaskOption = None,
    sentences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Sentences, examples or prompts per run. Default: {USUAL}.",
        ),
    ] = None,
    batch_size: Annotated[
        str,
        typer.Option(help="Sentences at a time; a list for several.", metavar="N,…"),
    ] = "1",
    beam: Annotated[
        str | None,
        typer.Option(
            help="Translation: beam size, a list for several; default: 5.",
            metavar="N,…",
        ),
    ] = None,
    new_tokens: Annotated[
        int,
        typer.Option(min=2, help="Tokens generated per sentence or prompt, the same for all."),
    ] = 32,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 5,
    warm_up: Annotated[int, typer.Option(min=0, help="Runs before them that do not count.")] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads. Default: one for small models, else as many as there are idle cores.",
        ),
    ] = None,
    no_memory: Annotated[
        bool,
        typer.Option("--no-memory", help="Leave out load time and peak memory: each is a load of its own."),
    ] = False,
    dtype: RunningDtypeOption = "auto",
    demo: DemoOption = "translation",
    everything: AllOption = False,
    outputs: Annotated[Outputs, Helps(plot="Draw the speed against batch size.")] = Outputs(
        output=Path("latency.json")
    ),
) -> None:
    """Time the decoding of the same sentences to the same length, checkpoint by checkpoint in turns.

    Classifiers (--labelled), embedding models and masked language models (--text) are timed by examples per second,
    language models (--text) by the tokens per second that they read of a prompt and generate after it.

    The first checkpoint is the baseline of the ratios.
    """
    from prunecli.evaluation.latency import bench_latency as run
    from prunecli.evaluation.options import labels_for
    from prunecli.evaluation.timing import LatencyOptions

    outputs.check()
    beams = None if beam is None else _numbers("--beam", beam)
    batch_sizes = _numbers("--batch-size", batch_size)
    labels = labels_for(checkpoints_or_demo(checkpoints, demo))
    if len(labels) > MANY and not (checkpoints or sentences or everything):
        sentences, no_memory = max(1, USUAL * MANY * 2 // len(labels)), True
        console.note(
            f"{counted(len(labels), 'checkpoint')}: {counted(sentences, 'sentence')} a run, without load times "
            "and peak memory, takes about a minute; --all takes everything."
        )
    options = LatencyOptions(
        sentences=sentences or USUAL,
        beams=beams,
        batch_sizes=batch_sizes,
        runs=runs,
        warm_up=warm_up,
        new_tokens=new_tokens,
        threads=threads,
        device=texts.device,
        dtype=dtype,
        memory=not no_memory,
    )
    files = () if texts.text else texts_or_demo(None, demo, "test", checkpoints)
    choice = texts.choice(
        checkpoints,
        files=texts.text or tuple(file.path for file in files),
        whole_files=texts.reads_whole(is_demo=bool(files)),
    )
    latency = run(labels, choice, options, console.progress(outputs.quiet), console.note, task=task)
    outputs.write(latency)
    if outputs.plot is not None:
        from prunecli.report.pictures import speed_pictures
        from prunecli.report.render import save_pictures

        save_pictures([speed_pictures(latency)], outputs.plot)
    outputs.show(latency.to_json, lambda: _show(latency))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(whole_numbers(text)))
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} {text}: not a list of numbers of 1 or more", f"Write {option} 1,8.")
    return numbers


def _show(latency: Latency) -> None:
    from prunecli.results.latency import NOISY

    cells = _cells(latency.results[0].timings[0])
    rows = [
        [result.checkpoint, *(cell(result.timings[index]) for cell in cells.values())]
        for index in range(len(latency.results[0].timings))
        for result in latency.results
    ]
    keys = 3 if latency.results[0].timings[0].setting else 2
    console.show(console.table(latency.described, ["checkpoint", *cells], rows, keys=keys))
    console.show(console.table("Size", ["checkpoint", *_SIZES], [_sizes(row) for row in latency.results]))
    console.out(
        f"Median ± deviation of {counted(latency.runs, 'run')} after {latency.warm_up} of warm-up, "
        f"{counted(latency.threads or 0, 'CPU thread')}, {latency.device}."
    )
    noisy = [result.checkpoint for result in latency.results if any(row.is_noisy for row in result.timings)]
    if noisy:
        console.out(f"Noisy, more than {NOISY:.0%} from run to run: {', '.join(noisy)}.")
        console.out(f"Repeat on a quiet machine, or with more runs: --runs {2 * latency.runs + 1}.")
    if not latency.interleaved:
        console.out("Not enough memory for all at once: the checkpoints were timed one after the other.")


def _cells(timing: Timing) -> dict[str, Callable[[Timing], str]]:
    """Column -> what it says of a timing like this one."""
    columns: dict[str, Callable[[Timing], str]] = {"batch": lambda row: str(row.batch_size)}
    if timing.beam is not None:
        columns["beam"] = lambda row: str(row.beam)
    if timing.phase is not None:
        columns["phase"] = lambda row: str(row.phase)
    if timing.examples_per_second is not None:
        columns["examples/s"] = lambda row: row.rate[1].text(1)
    columns["tokens/s"] = lambda row: row.tokens_per_second.text(1)
    if timing.examples_per_second is None:
        columns["s/sentence" if timing.phase is None else "s/prompt"] = lambda row: (
            row.seconds_per_sentence.text(3)
        )
    return {**columns, "speed-up": lambda row: f"{row.speedup.median:.2f}x"}


_SIZES = ("parameters", "on disk", "load", "peak memory", "peak on GPU")


def _sizes(result: Timed) -> list[str]:
    return [
        result.checkpoint,
        f"{result.parameters / 1e6:,.2f}M",
        console.bytes_text(result.checkpoint_bytes),
        "-" if result.load_s is None else f"{result.load_s:.1f} s",
        "-" if result.resident_peak is None else console.bytes_text(result.resident_peak),
        "-" if result.device_peak is None else console.bytes_text(result.device_peak),
    ]
