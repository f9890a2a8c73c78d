"""The section of speed and memory."""

from __future__ import annotations

from collections.abc import Sequence

from prunecli.report.charts import Bar, Point, Series, bars, chart
from prunecli.report.collect import Material
from prunecli.report.markup import NOTHING, Html, counted, element, join, millions, table
from prunecli.results.schemas import Latency, Spread, Timed
from prunecli.tensors.quantities import bytes_text


def speed_section(material: Material) -> Html | None:
    """For each latency.json a chart and tables; None where there is none."""
    files = material.of(Latency)
    return join([_latency(name, found) for name, found in files]) if files else None


def _latency(name: str, latency: Latency) -> Html:
    about = (
        f"{counted(latency.sentences, 'sentence')} of {latency.pair}, {counted(latency.new_tokens, 'new token')} each; "
        f"mean ± deviation of {counted(latency.runs, 'run')} after {latency.warm_up} of warm-up; {latency.device}"
    )
    threads = "" if latency.threads is None else f", {counted(latency.threads, 'CPU thread')}"
    return join(
        [
            element("h3", name),
            element("p", f"{about}{threads}."),
            element("div", *_charts(latency), class_="charts"),
            _times(latency.results),
            _costs(latency.results),
        ]
    )


def _charts(latency: Latency) -> list[Html]:
    """By beam: tokens per second against batch size, or a bar each where there is one size."""
    beams = dict.fromkeys(timing.beam for result in latency.results for timing in result.timings)
    made = []
    for beam in beams:
        of_beam = [
            (result, [timing for timing in result.timings if timing.beam == beam])
            for result in latency.results
        ]
        caption = f"Tokens per second, beam {beam}"
        if any(len(timings) > 1 for _, timings in of_beam):
            series = [
                Series(
                    result.checkpoint,
                    tuple(
                        Point(
                            t.batch_size,
                            t.tokens_per_second.mean,
                            f"{result.checkpoint}, batch {t.batch_size}",
                        )
                        for t in sorted(timings, key=lambda t: t.batch_size)
                    ),
                    joined=True,
                )
                for result, timings in of_beam
            ]
            made.append(
                chart(
                    f"{caption}, against batch size",
                    series,
                    "batch size",
                    "tokens per second",
                    named=False,
                    zero="xy",
                )
            )
        else:
            rows = [
                _bar(result.checkpoint, timings[0].tokens_per_second)
                for result, timings in of_beam
                if timings
            ]
            made.append(bars(f"{caption}; whiskers: one deviation", rows, "tokens per second"))
    return made


def _bar(name: str, spread: Spread) -> Bar:
    text = f"{spread.mean:,.1f} ± {spread.std:,.1f}"
    return Bar(name, spread.mean, spread.mean - spread.std, spread.mean + spread.std, text)


def _times(results: Sequence[Timed]) -> Html:
    rows = [
        [
            result.checkpoint,
            str(timing.batch_size),
            str(timing.beam),
            _spread(timing.tokens_per_second, 1),
            _spread(timing.seconds_per_sentence, 3),
            _spread(timing.speedup, 2),
        ]
        for result in results
        for timing in result.timings
    ]
    columns = ["checkpoint", "batch", "beam", "tokens/s", "s/sentence", "speed-up"]
    return table(f"Decoding speed; speed-up against {results[0].checkpoint}", columns, rows)


def _costs(results: Sequence[Timed]) -> Html:
    rows = [
        [
            result.checkpoint,
            millions(result.parameters),
            bytes_text(result.checkpoint_bytes),
            NOTHING if result.load_s is None else f"{result.load_s:.1f} s",
            NOTHING if result.resident_peak is None else bytes_text(result.resident_peak),
            NOTHING if result.device_peak is None else bytes_text(result.device_peak),
        ]
        for result in results
    ]
    columns = ["checkpoint", "parameters", "on disk", "load", "peak memory", "peak on GPU"]
    return table("Size, load time and memory", columns, rows)


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.mean:,.{digits}f} ± {spread.std:,.{digits}f}"
