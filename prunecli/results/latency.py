"""latency.json: speed by batch size and beam, and size and memory of each checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from prunecli.results.document import Count, Document, Number, Record
from prunecli.results.tabled import Row, Tables, picked

UNITS = {
    "load_s": "load_seconds",
    "resident_peak": "resident_peak_bytes",
    "device_peak": "device_peak_bytes",
}
"""Key of the file -> column."""


class Spread(Record):
    """Mean and deviation."""

    mean: Number
    std: Number = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and sample standard deviation (0 for a single value)."""
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(mean=round(statistics.fmean(values), 6), std=round(deviation, 6))


class Timing(Record):
    """One checkpoint's speed at one batch size and beam; `speedup` is run by run against the first checkpoint."""

    batch_size: Count
    beam: Count
    seconds: list[Number] = Field(default_factory=list)
    tokens_per_second: Spread
    seconds_per_sentence: Spread
    speedup: Spread


class Timed(Record):
    """One checkpoint's speed and size; without a measurement of memory no `load_s` and no peaks."""

    checkpoint: str
    dtype: str = ""
    parameters: Count
    parameter_bytes: Count | None = None
    checkpoint_bytes: Count
    load_s: Number | None = None
    resident_before: Count | None = None
    resident_peak: Count | None = None
    device_peak: Count | None = None
    timings: list[Timing] = Field(min_length=1)


class Latency(Document):
    """latency.json; the first of the results is the baseline."""

    FORMAT: ClassVar[str] = "prunecli.latency/1"

    pair: str
    sentences: Count
    new_tokens: Count
    runs: Count
    warm_up: Count = 0
    device: str
    dtype: str = ""
    threads: Count | None = None
    torch: str = ""
    interleaved: bool = True
    results: list[Timed] = Field(min_length=1)

    def _tables(self) -> Tables:
        """`speed`, in the terminal's order, and `size`."""
        speed = [
            {
                "checkpoint": result.checkpoint,
                "batch_size": result.timings[index].batch_size,
                "beam": result.timings[index].beam,
                **_spread("tokens_per_second", result.timings[index].tokens_per_second),
                **_spread("seconds_per_sentence", result.timings[index].seconds_per_sentence),
                **_spread("speedup", result.timings[index].speedup),
            }
            for index in range(len(self.results[0].timings))
            for result in self.results
        ]
        size = []
        for result in self.results:
            fields = result.to_json()
            row = picked(fields, ("checkpoint", "dtype", "parameters", "checkpoint_bytes"))
            size.append({**row, **{column: fields[key] for key, column in UNITS.items() if key in fields}})
        return {"speed": speed, "size": size}


def _spread(name: str, spread: Spread) -> Row:
    return {f"{name}_mean": spread.mean, f"{name}_std": spread.std}
