"""`prunecli bench-latency`: decoding speed and memory of checkpoints, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    CheckpointsArgument,
    ComputeDtypeOption,
    DataOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    PairsOption,
    QuietOption,
    TableOption,
)
from prunecli.commands.outputs import check_outputs, write_table, written
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.results.latency import Latency, Spread, Timed


def bench_latency(
    checkpoints: CheckpointsArgument = None,
    data: DataOption = None,
    split: Annotated[str, typer.Option("--split", help="Split of the text.")] = "test",
    pairs: PairsOption = None,
    sentences: Annotated[int, typer.Option("--sentences", min=1, help="Sentences per run.")] = 8,
    batch_size: Annotated[
        str,
        typer.Option("--batch-size", help="Sentences decoded at a time; a list for several.", metavar="N,…"),
    ] = "1",
    beam: Annotated[str, typer.Option("--beam", help="Beam size; a list for several.", metavar="N,…")] = "5",
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=2, help="Tokens generated per sentence, the same for all.")
    ] = 32,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Timed runs.")] = 5,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Runs before them that do not count.")] = 1,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="CPU threads; default: torch's choice.", show_default=False),
    ] = None,
    no_memory: Annotated[
        bool,
        typer.Option("--no-memory", help="Leave out load time and peak memory: each is a load of its own."),
    ] = False,
    device: DeviceOption = "auto",
    dtype: ComputeDtypeOption = "auto",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw tokens per second against batch size."),
    ] = None,
    table: TableOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The result.")] = Path("latency.json"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Time the decoding of the same sentences to the same length, checkpoint by checkpoint in turns.

    The first checkpoint is the baseline of the ratios.
    """
    from prunecli import demo
    from prunecli.commands.checkpoints import checkpoints_or_demo
    from prunecli.evaluation.latency import LatencyOptions
    from prunecli.evaluation.latency import bench_latency as run
    from prunecli.evaluation.options import labels_for
    from prunecli.tensors.documents import write_json
    from prunecli.text.choice import TextChoice

    options = LatencyOptions(
        sentences=sentences,
        beams=_numbers("--beam", beam),
        batch_sizes=_numbers("--batch-size", batch_size),
        runs=runs,
        warm_up=warm_up,
        new_tokens=new_tokens,
        threads=threads,
        device=device,
        dtype=dtype,
        memory=not no_memory,
    )
    check_outputs(output, plot, table, force=force)
    labels = labels_for(checkpoints_or_demo(checkpoints))
    choice = TextChoice(data=data, split=split, pairs=pairs, demo=demo.DATA)
    latency = run(labels, choice, options, console.progress(quiet), console.note)
    write_json(output, latency.to_json(), force=force)
    write_table(table, latency, force=force)
    if plot is not None:
        _draw(latency, plot)
    if json:
        console.print_json(latency.to_json())
    elif not quiet:
        _show(latency)
        console.note(written(output, plot, table))


def _draw(latency: Latency, plot: Path) -> None:
    from prunecli.analysis.plots import Speed, save_figure, speed_figure

    speeds = [
        Speed(
            result.checkpoint,
            timing.batch_size,
            timing.beam,
            timing.tokens_per_second.mean,
            timing.tokens_per_second.std,
        )
        for result in latency.results
        for timing in result.timings
    ]
    save_figure(speed_figure(speeds), plot)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} {text}: not a list of numbers of 1 or more", f"Write {option} 1,8.")
    return numbers


def _show(latency: Latency) -> None:
    title = f"{_count(latency.sentences, 'sentence')} of {latency.pair}, {latency.new_tokens} new tokens each"
    columns = ["checkpoint", "batch", "beam", "tokens/s", "s/sentence", "speed-up"]
    rows = []
    for index in range(len(latency.results[0].timings)):
        for result in latency.results:
            timing = result.timings[index]
            rows.append(
                [
                    result.checkpoint,
                    str(timing.batch_size),
                    str(timing.beam),
                    _spread(timing.tokens_per_second, 1),
                    _spread(timing.seconds_per_sentence, 3),
                    f"{timing.speedup.mean:.2f}x",
                ]
            )
    console.show(console.table(title, columns, rows, keys=3))
    console.show(console.table("Size", ["checkpoint", *_SIZES], [_sizes(row) for row in latency.results]))
    console.out(
        f"Mean ± deviation of {_count(latency.runs, 'run')} after {latency.warm_up} of warm-up, "
        f"{_count(latency.threads or 0, 'CPU thread')}, {latency.device}."
    )
    if not latency.interleaved:
        console.out("Not enough memory for all at once: the checkpoints were timed one after the other.")


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


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.mean:.{digits}f} ± {spread.std:.{digits}f}"
