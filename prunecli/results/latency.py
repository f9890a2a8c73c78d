"""latency.json: speed by batch size and beam or phase, and size and memory of each checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pydantic import AliasChoices, Field

from prunecli.results.document import Count, Document, Json, Number, Record, Row, Shown, Tables, scalars
from prunecli.tensors.quantities import counted

UNITS = {"load_s": "load_seconds", "resident_peak": "resident_peak_bytes", "device_peak": "device_peak_bytes"}
"""Key of the file -> column."""

NOISY = 0.2
"""Deviation above this share of the median: the figure says little."""


class Spread(Record):
    """Values of several runs: the median, and 1.4826 times the median distance from the median; mean and `std` too.

    In a normal distribution both pairs are alike; a few runs that a busy machine slowed down move mean and `std` alone.
    Files of 0.2.0 and before have one of the two pairs, which is read as median and deviation.
    """

    median: Number = Field(validation_alias=AliasChoices("median", "mean"))
    deviation: Number = Field(default=0.0, validation_alias=AliasChoices("deviation", "std"))
    mean: Number | None = None
    std: Number | None = None

    def text(self, digits: int) -> str:
        """'1,250.5 ± 3.2'."""
        return f"{self.median:,.{digits}f} ± {self.deviation:,.{digits}f}"

    @property
    def ends(self) -> tuple[float, float]:
        """The median less and plus the deviation."""
        return self.median - self.deviation, self.median + self.deviation

    @property
    def is_noisy(self) -> bool:
        """Whether the deviation is above `NOISY` of the median."""
        return self.deviation > NOISY * abs(self.median)

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value; the sample standard deviation of a single value is 0."""
        middle = statistics.median(values)
        distance = statistics.median(abs(value - middle) for value in values)
        return cls(
            median=round(middle, 6),
            deviation=round(1.4826 * distance, 6),
            mean=round(statistics.fmean(values), 6),
            std=round(statistics.stdev(values), 6) if len(values) > 1 else 0.0,
        )


class Timing(Record):
    """One checkpoint's speed at one batch size.

    Attributes:
        beam: of translation.
        phase: of a language model: `prefill` reads the prompts, `decode` goes on from them.
        examples_per_second: where nothing is generated.
        tokens_per_second: those that are generated, or else read.
        seconds_per_sentence: or per example, or prompt.
        speedup: of each run over the same run of the first checkpoint.
    """

    batch_size: Count
    beam: Count | None = None
    phase: str | None = None
    seconds: list[Number] = []
    examples_per_second: Spread | None = None
    tokens_per_second: Spread
    seconds_per_sentence: Spread
    speedup: Spread

    @property
    def setting(self) -> str:
        """`beam 5`, `prefill`; nothing where there is neither."""
        return self.phase or ("" if self.beam is None else f"beam {self.beam}")

    @property
    def rate(self) -> tuple[str, Spread]:
        """The figure that counts at this task, with its name."""
        if self.examples_per_second is not None:
            return "examples per second", self.examples_per_second
        return "tokens per second", self.tokens_per_second

    @property
    def is_noisy(self) -> bool:
        """Whether the speed or the speed-up differs much from run to run."""
        return self.rate[1].is_noisy or self.speedup.is_noisy


class Timed(Record):
    """One checkpoint's speed and size; without a measurement of memory no `load_s` and no peaks.

    Attributes:
        devices: that its layers are spread over, where there are several; `device_peak` is that of all of them.
    """

    checkpoint: str
    dtype: str = ""
    parameters: Count
    parameter_bytes: Count | None = None
    checkpoint_bytes: Count
    devices: list[str] | None = None
    load_s: Number | None = None
    resident_before: Count | None = None
    resident_peak: Count | None = None
    device_peak: Count | None = None
    timings: list[Timing] = Field(min_length=1)


class Latency(Document):
    """latency.json; the first of the results is the baseline.

    Attributes:
        pair: of translation.
        data: of the other tasks: `files`, `sha256`.
        context: tokens of a text, where they were asked for.
        sentences: of a run; or examples, or prompts.
        new_tokens: where any are generated.
    """

    FORMAT = "prunecli.latency/1"

    task: str = "translation"
    pair: str | None = None
    data: Json = {}
    context: Count | None = None
    sentences: Count
    new_tokens: Count | None = None
    runs: Count
    warm_up: Count = 0
    device: str
    dtype: str = ""
    threads: Count | None = None
    torch: str = ""
    interleaved: bool = True
    results: list[Timed] = Field(min_length=1)

    @property
    def described(self) -> str:
        """`8 sentences of eng_Latn-fra_Latn, 32 new tokens each`."""
        unit = {"translation": "sentence", "lm": "prompt"}.get(self.task, "example")
        files = self.data.get("files")
        source = self.pair or (", ".join(map(str, files)) if isinstance(files, list) else "") or self.task
        text = f"{counted(self.sentences, unit)} of {source}"
        if self.context is not None:
            text += f", {counted(self.context, 'token')} {'each' if self.task == 'lm' else 'at most'}"
        return text if self.new_tokens is None else f"{text}, {counted(self.new_tokens, 'new token')} each"

    @property
    def about(self) -> str:
        """See `Document`."""
        runs = f"{counted(self.runs, 'run')} after {self.warm_up} of warm-up"
        threads = "" if self.threads is None else f", {counted(self.threads, 'CPU thread')}"
        return f"Median ± deviation of {runs}{threads}, {self.device}."

    @property
    def shown(self) -> Iterator[Shown]:
        """Yield the speed of each checkpoint at each batch size, and its size, load time and memory."""
        spread = "{{{0}_median:,.{1}f}} ± {{{0}_deviation:,.{1}f}}".format
        first, tables = self.results[0], self._tables()
        speed = {
            "checkpoint": "{checkpoint}",
            "batch": "{batch_size}",
            "beam": "{beam}",
            "phase": "{phase}",
            "examples/s": spread("examples_per_second", 1),
            "tokens/s": spread("tokens_per_second", 1),
            "s/prompt" if self.task == "lm" else "s/sentence": spread("seconds_per_sentence", 3),
            "speed-up": spread("speedup", 2),
            "remark": "{remark}",
        }
        if first.timings[0].examples_per_second:
            del speed["s/sentence"]
        size = {
            "checkpoint": "{checkpoint}",
            "parameters": "{parameters!m}",
            "on disk": "{checkpoint_bytes!b}",
            "load": "{load_seconds:.1f} s",
            "peak memory": "{resident_peak_bytes!b}",
            "peak on GPU": "{device_peak_bytes!b}",
        }
        speeds = [
            {**row, "remark": "noisy" if timing.is_noisy else None}
            for row, (_, timing) in zip(tables["speed"], self._timings(), strict=True)
        ]
        title = f"{self.described}; speed-up against {first.checkpoint}"
        yield Shown.of(title, speeds, speed, keys=3 if first.timings[0].setting else 2)
        yield Shown.of("Size, load time and memory", tables["size"], size)

    def _timings(self) -> Iterator[tuple[Timed, Timing]]:
        """The timings of all checkpoints at each setting together."""
        for at in range(max(len(result.timings) for result in self.results)):
            for result in self.results:
                yield from ((result, timing) for timing in result.timings[at : at + 1])

    def _tables(self) -> Tables:
        """`speed`, in the terminal's order, and `size`."""
        speed = [{"checkpoint": result.checkpoint, **_speed(timing)} for result, timing in self._timings()]
        size = [
            {UNITS.get(key, key): value for key, value in scalars(result.to_json()).items()}
            for result in self.results
        ]
        return {"speed": speed, "size": size}


def _speed(timing: Timing) -> Row:
    row: Row = {}
    for name, value in timing.model_dump(exclude={"seconds"}, exclude_none=True).items():
        figures = value if isinstance(value, dict) else {}
        row |= {f"{name}_{figure}": number for figure, number in figures.items()} or {name: value}
    return row
