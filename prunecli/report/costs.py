"""The sections of what checkpoints cost: their sizes, their speed and memory, and the training of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prunecli.model.inventory import PARTS, Amount
from prunecli.model.parts import describe_parts
from prunecli.report.charts import Bar, Point, Series, StackedBar, bars, chart, stacked_bars
from prunecli.report.collect import CheckpointEntry, ReportData
from prunecli.report.markup import Html, element, join, maybe, millions, row_of, table
from prunecli.results.latency import Latency, Timed, Timing
from prunecli.results.rewriting import LoggedStep, Training
from prunecli.tensors.quantities import bytes_text, counted

MOST_POINTS = 300
"""A longer log is drawn by every so-manieth line of it."""


def sizes_section(data: ReportData) -> Html | None:
    """Tables and a drawing of the checkpoints' sizes, those that lie elsewhere first; None without any."""
    checkpoints = [*data.elsewhere, *data.checkpoints]
    if not checkpoints:
        return None
    parts = [part for part in PARTS if any(part in entry.inventory.parts for entry in checkpoints)]
    amounts: dict[str, Callable[[Amount], str]] = {
        "Parameters by part": lambda amount: f"{amount.parameters:,}",
        "Bytes by part": lambda amount: bytes_text(amount.bytes),
    }
    overview = table(
        "The checkpoints, counted from their headers",
        checkpoints,
        {
            "checkpoint": lambda entry: entry.name,
            "family": lambda entry: entry.checkpoint.model_type,
            "FFN": lambda entry: (
                describe_parts(entry.inventory.ffns, entry.checkpoint.structure.widths) or None
            ),
            "attention": lambda entry: describe_parts(entry.inventory.attentions, {}) or None,
            "parameters": lambda entry: millions(entry.inventory.total.parameters),
            "of the original": _share,
            "size": lambda entry: bytes_text(entry.inventory.total.bytes),
            "type": lambda entry: ", ".join(entry.inventory.dtypes),
            "layers": lambda entry: _kept(
                [(len(stack.layers), stack.original_layers) for stack in entry.inventory.stacks]
            ),
            "tokens": _tokens,
            "experts": lambda entry: _kept(
                [(layer.num_experts, layer.original_experts) for layer in entry.inventory.layers]
            ),
            "heads": lambda entry: _kept(
                [(layer.num_heads, layer.original_heads) for layer in entry.inventory.attentions]
            ),
        },
        text_columns=4,
    )
    return join(
        [
            overview,
            stacked_bars(
                "Bytes of weights by part", [_stacked_bar(entry, parts) for entry in checkpoints], parts
            ),
            *(table(caption, checkpoints, _by_part(parts, shown)) for caption, shown in amounts.items()),
        ]
    )


def _by_part(
    parts: Sequence[str], shown: Callable[[Amount], str]
) -> dict[str, Callable[[CheckpointEntry], str | None]]:
    """The columns of a table of parts, each amount as `shown`."""
    cells = {part: lambda entry, part=part: maybe(shown, entry.inventory.parts.get(part)) for part in parts}
    total = {"total": lambda entry: shown(entry.inventory.total)}
    return {"checkpoint": lambda entry: entry.name} | cells | total


def _share(entry: CheckpointEntry) -> str | None:
    size = entry.checkpoint.structure.original_size
    return None if size is None else f"{entry.inventory.total.parameters / size[0]:.1%}"


def _tokens(entry: CheckpointEntry) -> str | None:
    """Entries of the vocabulary, and how many the original had if the history states that."""
    tables, history = entry.inventory.tables, entry.history
    counts = [step["vocabulary"] for step in history if isinstance(step.get("vocabulary"), dict)]
    before = counts[0].get("before") if counts else None
    return (
        None
        if tables is None
        else _kept([(tables.vocabulary, before if isinstance(before, int) else tables.vocabulary)])
    )


def _kept(layers: Sequence[tuple[int, int]]) -> str | None:
    """'288 of 1,536', or '1,536' where all are left; None without layers."""
    if not layers:
        return None
    kept, original = (sum(counts) for counts in zip(*layers, strict=True))
    return f"{kept:,}" if kept == original else f"{kept:,} of {original:,}"


def _stacked_bar(entry: CheckpointEntry, parts: Sequence[str]) -> StackedBar:
    sizes = {part: entry.inventory.parts[part].bytes for part in parts if part in entry.inventory.parts}
    titles = {part: f"{entry.name}, {part}: {bytes_text(size)}" for part, size in sizes.items()}
    own = tuple((titles.get(part, ""), sizes.get(part, 0)) for part in parts)
    return StackedBar(entry.name, own, bytes_text(entry.inventory.total.bytes))


def latency_part(name: str, latency: Latency) -> Html:
    """A chart and tables of a latency.json."""
    runs = f"{counted(latency.runs, 'run')} after {latency.warm_up} of warm-up"
    about = f"{latency.described}; median ± deviation of {runs}; {latency.device}"
    threads = "" if latency.threads is None else f", {counted(latency.threads, 'CPU thread')}"
    timings = [timing for result in latency.results for timing in result.timings]
    settings = dict.fromkeys(timing.setting for timing in timings)
    speed = "Decoding speed" if latency.task == "translation" else f"Speed at {latency.task}"
    return join(
        [
            element("h3", name),
            element("p", f"{about}{threads}."),
            row_of(*(_speeds(latency.results, setting) for setting in settings)),
            table(
                f"{speed}; speed-up against {latency.results[0].checkpoint}",
                [(result.checkpoint, timing) for result in latency.results for timing in result.timings],
                {
                    "checkpoint": lambda row: row[0],
                    "batch": lambda row: str(row[1].batch_size),
                    **_columns(timings),
                    "tokens/s": lambda row: row[1].tokens_per_second.text(1),
                    "s/sentence": lambda row: row[1].seconds_per_sentence.text(3),
                    "speed-up": lambda row: row[1].speedup.text(2),
                    "remark": lambda row: "noisy" if row[1].is_noisy else None,
                },
            ),
            table(
                "Size, load time and memory",
                latency.results,
                {
                    "checkpoint": lambda result: result.checkpoint,
                    "parameters": lambda result: millions(result.parameters),
                    "on disk": lambda result: bytes_text(result.checkpoint_bytes),
                    "load": lambda result: maybe(lambda seconds: f"{seconds:.1f} s", result.load_s),
                    "peak memory": lambda result: maybe(bytes_text, result.resident_peak),
                    "peak on GPU": lambda result: maybe(bytes_text, result.device_peak),
                },
            ),
        ]
    )


def _columns(timings: Sequence[Timing]) -> dict[str, Callable[[tuple[str, Timing]], str | None]]:
    """Those that only some tasks have."""
    columns: dict[str, Callable[[tuple[str, Timing]], str | None]] = {
        "beam": lambda row: maybe(str, row[1].beam),
        "phase": lambda row: row[1].phase,
        "examples/s": lambda row: maybe(lambda spread: spread.text(1), row[1].examples_per_second),
    }
    return {
        name: cell
        for name, cell in columns.items()
        if any(cell(("", timing)) is not None for timing in timings)
    }


def _speeds(results: Sequence[Timed], setting: str) -> Html:
    """Tokens or examples per second against batch size, or a bar each where there is one size."""
    timings = {
        result.checkpoint: [timing for timing in result.timings if timing.setting == setting]
        for result in results
    }
    unit = next(timing.rate[0] for own in timings.values() for timing in own)
    caption = ", ".join(filter(None, [unit.capitalize(), setting]))
    if all(len(own) <= 1 for own in timings.values()):
        speeds = {name: own[0].rate[1] for name, own in timings.items() if own}
        rows = [
            Bar(name, one.median, one.median - one.deviation, one.median + one.deviation, one.text(1))
            for name, one in speeds.items()
        ]
        return bars(f"{caption}; whiskers: one deviation", rows, unit)
    points = {
        name: [
            Point(timing.batch_size, timing.rate[1].median, f"{name}, batch {timing.batch_size}")
            for timing in sorted(own, key=lambda timing: timing.batch_size)
        ]
        for name, own in timings.items()
    }
    series = [Series(name, tuple(own), joined=True) for name, own in points.items()]
    return chart(f"{caption}, against batch size", series, "batch size", unit, named=False, zero="xy")


def training_section(data: ReportData) -> Html | None:
    """Curves and figures of every OUTPUT.training.json; None where there is none."""
    files = data.of(Training)
    if not files:
        return None
    overview = table(
        "Trainings; losses and chrF++ are those of validation",
        files,
        {
            "file": lambda file: file[0],
            "result": lambda file: file[1].output,
            "updates": lambda file: f"{file[1].steps:,}",
            "tokens": lambda file: f"{file[1].tokens:,}",
            "tokens/s": lambda file: f"{file[1].tokens_per_second:,.0f}",
            "best at": lambda file: (
                f"{best:,}" if isinstance(best := (file[1].best or {}).get("step"), int) else None
            ),
            "last loss": lambda file: maybe(lambda step: f"{step.loss:.4f}", _last(file[1])),
            "last chrF++": lambda file: (
                None if (step := _last(file[1])) is None else maybe("{:.2f}".format, step.chrf)
            ),
        },
        text_columns=2,
    )
    return join([overview, *(_training(name, training) for name, training in files)])


def _last(training: Training) -> LoggedStep | None:
    return training.validation[-1] if training.validation else None


def _training(name: str, training: Training) -> Html:
    """Losses; chrF++ where it was measured."""
    losses = [
        Series("training", _losses(training.training, "training"), joined=True),
        Series("validation", _losses(training.validation, "validation"), joined=True),
    ]
    drawn = []
    if any(series.points for series in losses):
        drawn.append(chart(f"Loss of {training.output}", losses, "update", "loss", named=False))
    scores = tuple(
        Point(step.step, step.chrf, "validation") for step in training.validation if step.chrf is not None
    )
    if scores:
        series = [Series("chrF++", scores, joined=True)]
        drawn.append(chart(f"chrF++ of {training.output}", series, "update", "chrF++"))
    return join([element("h3", name), row_of(*drawn)])


def _losses(steps: Sequence[LoggedStep], name: str) -> tuple[Point, ...]:
    every = max(1, -(-len(steps) // MOST_POINTS))
    return tuple(Point(step.step, step.loss, name) for step in steps[::every])
