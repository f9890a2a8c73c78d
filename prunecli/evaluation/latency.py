"""Decoding speed of several checkpoints, run in turns so that a machine's drift hits all of them alike.

Every checkpoint decodes the same sentences to the same number of tokens (end-of-sentence is held back), so
that a model that stops early does not look fast. The mean of 5 runs, batch 1 and beam 5 are from 2309.01826, section 3.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.evaluation.decoding import generate
from prunecli.evaluation.hardware import device_name, fit_together, model_sizes
from prunecli.model.checkpoint import Checkpoint, directory_of
from prunecli.model.history import pruned_pairs
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.lengths import max_positions
from prunecli.text.choice import TextChoice
from prunecli.text.parallel import pair_name
from prunecli.text.tokens import encode, language_id, languages, load_tokenizer

if TYPE_CHECKING:
    from prunecli.evaluation.memory import Cost
    from prunecli.results.latency import Latency, Timing


@dataclass(frozen=True)
class LatencyOptions:
    """How speed is measured.

    Attributes:
        sentences: of a run; more where they do not fill the largest batch.
        beams, batch_sizes: every combination is measured.
        runs: timed repetitions.
        warm_up: repetitions before them that are not counted.
        new_tokens: tokens generated per sentence.
        threads: of the CPU, or None for torch's choice.
        device, dtype: as in `load_model`.
        memory: measure load time and peak memory, in a process of its own per checkpoint.
    """

    sentences: int = 8
    beams: tuple[int, ...] = (5,)
    batch_sizes: tuple[int, ...] = (1,)
    runs: int = 5
    warm_up: int = 1
    new_tokens: int = 32
    threads: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    memory: bool = True


@dataclass(frozen=True)
class Subject:
    """One checkpoint with its sentences as its own tokenizer sees them."""

    label: str
    checkpoint: Checkpoint
    sources: tuple[tuple[int, ...], ...]
    pad_id: int
    forced_id: int | None


Setting = tuple[int, int]
"""(batch size, beam)."""


def bench_latency(
    checkpoints: Mapping[str, Checkpoint | Path | str],
    choice: TextChoice,
    options: LatencyOptions | None = None,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Latency:
    """Measure the speed of each checkpoint on sentences of the first pair of `choice` that all were pruned for.

    Args:
        checkpoints: label -> an open model, a directory or a name of the hub, the baseline first.
        choice: of parallel text.
        say: hears what is chosen by itself, and why.

    Returns:
        latency.json; nothing is written.

    Raises:
        PruneError: a checkpoint, text or language that cannot be used.
    """
    options = options or LatencyOptions()
    directories = {label: directory_of(model, say) for label, model in checkpoints.items()}
    text, pairs = choice.parallel(say)
    pair = (pruned_pairs(list(directories.values()), pairs) or pairs)[0]
    # A batch is full at every size, so that its speed is that of the size.
    largest = max(options.batch_sizes)
    lines = text.first(-(-options.sentences // largest) * largest).sentences[pair[0]]
    return time_decoding(directories, lines, pair, options, progress, say)


def time_decoding(
    checkpoints: Mapping[str, Path],
    sentences: Sequence[str],
    pair: tuple[str, str],
    options: LatencyOptions,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Latency:
    """Measure the speed of each checkpoint (label -> directory, the baseline first) on `sentences`.

    Args:
        say: hears of the type that all are computed in, where it is not what is stored.

    Returns:
        latency.json; nothing is written.

    Raises:
        PruneError: a checkpoint or language that cannot be used.
    """
    from prunecli.model.checkpoint import open_model

    with _threads(options.threads):
        subjects = [
            _subject(label, open_model(path), sentences, pair, options.new_tokens)
            for label, path in checkpoints.items()
        ]
        options = replace(options, dtype=_dtype(subjects, options, say))
        costs = _costs(subjects, options, progress) if options.memory else {}
        runner = _Runner(subjects, options)
        seconds = _measure(runner, subjects, options, progress)
        return _latency(runner, subjects, pair, costs, seconds, options)


def _dtype(subjects: Sequence[Subject], options: LatencyOptions, say: Say) -> str:
    """The type of all models: speeds of two types say nothing of the models."""
    from prunecli.model.cost import Load
    from prunecli.modules.loading import choose_device
    from prunecli.modules.precision import decoding, dtype_name, fitting_dtype

    longest = max(len(ids) for subject in subjects for ids in subject.sources)
    load = Load(max(options.batch_sizes), max(options.beams), max(longest, options.new_tokens))
    opened = {subject.label: subject.checkpoint for subject in subjects}
    device = choose_device(options.device)
    return dtype_name(fitting_dtype(opened, device, options.dtype, beside=decoding(load), say=say))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _costs(subjects: Sequence[Subject], options: LatencyOptions, progress: Progress) -> dict[str, Cost]:
    import torch

    from prunecli.evaluation.memory import MemoryTask, measure_cost

    costs = {}
    with progress("loading each by itself", len(subjects), "checkpoints") as advance:
        for subject in subjects:
            task = MemoryTask(
                checkpoint=str(subject.checkpoint.path),
                device=options.device,
                dtype=options.dtype,
                threads=torch.get_num_threads(),
                sources=subject.sources[: max(options.batch_sizes)],
                beam=max(options.beams),
                new_tokens=options.new_tokens,
                pad_id=subject.pad_id,
                forced_id=subject.forced_id,
            )
            costs[subject.label] = measure_cost(task)
            advance(1)
    return costs


def _latency(
    runner: _Runner,
    subjects: Sequence[Subject],
    pair: tuple[str, str],
    costs: Mapping[str, Cost],
    seconds: Mapping[Setting, Mapping[str, Sequence[float]]],
    options: LatencyOptions,
) -> Latency:
    import torch

    from prunecli.results.header import header
    from prunecli.results.latency import Latency, Timed

    sentences = len(subjects[0].sources)
    first = subjects[0].label
    results = [
        Timed(
            checkpoint=subject.label,
            dtype=options.dtype,
            **runner.sizes[subject.label],
            checkpoint_bytes=subject.checkpoint.total_bytes,
            **(asdict(costs[subject.label]) if subject.label in costs else {}),
            timings=[
                _timing(setting, by_label[subject.label], by_label[first], sentences, options)
                for setting, by_label in seconds.items()
            ],
        )
        for subject in subjects
    ]
    return Latency(
        **header(Latency.FORMAT, [subject.checkpoint for subject in subjects], None),
        pair=pair_name(*pair),
        sentences=sentences,
        new_tokens=options.new_tokens,
        runs=options.runs,
        warm_up=options.warm_up,
        device=runner.device_name,
        dtype=options.dtype,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        interleaved=runner.together,
        results=results,
    )


def _subject(
    label: str, checkpoint: Checkpoint, sentences: Sequence[str], pair: tuple[str, str], new_tokens: int
) -> Subject:
    _require_generation(checkpoint)
    tokenizer = load_tokenizer(checkpoint.path)
    forced = language_id(tokenizer, pair[1]) if languages(tokenizer) else None
    limit, shared = _positions(checkpoint)
    if limit is not None and new_tokens >= limit:
        raise UsageError(
            f"{checkpoint.path}: {new_tokens} new tokens were asked for, the model has {limit} positions",
            f"Ask for at most --new-tokens {limit - 1}.",
        )
    ids = encode(tokenizer, sentences, pair[0], max_length=limit)
    if limit is not None and shared:
        ids = [row[: limit - new_tokens] for row in ids]
    pad_id = tokenizer.pad_token_id
    return Subject(label, checkpoint, tuple(map(tuple, ids)), pad_id if pad_id is not None else 0, forced)


def _positions(checkpoint: Checkpoint) -> tuple[int | None, bool]:
    """How many the model has (None: nothing bounds them), and whether a prompt and what follows share them."""
    config: Any = SimpleNamespace(**checkpoint.config)
    if checkpoint.architecture is not None:
        from prunecli.modules.building import stock_config

        config = stock_config(checkpoint)  # which knows the families' own names and defaults
    return max_positions(config), not getattr(config, "is_encoder_decoder", False)


def _require_generation(checkpoint: Checkpoint) -> None:
    if checkpoint.architecture is None:  # known once it is loaded
        return
    from prunecli.modules.building import model_class

    found = model_class(checkpoint)
    if not found.can_generate():
        raise UnsupportedModelError(
            f"{checkpoint.path}: the model is a {found.__name__}, which generates no text",
            "Name a checkpoint of a translation or language model.",
        )


def decode(
    model: Any,
    sources: Sequence[Sequence[int]],
    beam: int,
    new_tokens: int,
    pad_id: int,
    forced_id: int | None,
) -> None:
    """Generate exactly `new_tokens` tokens for each of `sources`, one batch; they are read back from the device."""
    settings = {"num_beams": beam, "do_sample": False, "max_length": None, "min_new_tokens": new_tokens}
    if forced_id is not None:
        settings["forced_bos_token_id"] = forced_id
    generate(model, sources, pad_id, settings, new_tokens)


class _Runner:
    """Holds all models where memory allows, else the one at hand."""

    def __init__(self, subjects: Sequence[Subject], options: LatencyOptions) -> None:
        from prunecli.modules.loading import choose_device
        from prunecli.modules.precision import COMPUTE

        self._options = options
        self._models: dict[str, Any] = {}
        self.sizes: dict[str, dict[str, int]] = {}
        self.device_name = ""
        self.together = fit_together(
            [subject.checkpoint for subject in subjects],
            choose_device(options.device),
            COMPUTE[options.dtype],
        )

    def seconds(self, subject: Subject, batch_size: int, beam: int) -> float:
        """Time of one pass over the sentences."""
        model = self._model(subject)
        start = time.perf_counter()
        for first in range(0, len(subject.sources), batch_size):
            batch = subject.sources[first : first + batch_size]
            decode(model, batch, beam, self._options.new_tokens, subject.pad_id, subject.forced_id)
        return time.perf_counter() - start

    def _model(self, subject: Subject) -> Any:
        if subject.label not in self._models:
            from prunecli.modules.loading import load_for_decoding

            if not self.together:
                self._models.clear()
                gc.collect()
            path = subject.checkpoint.path
            model = load_for_decoding(path, device=self._options.device, dtype=self._options.dtype)
            self._models[subject.label] = model
            self.sizes[subject.label] = model_sizes(model)
            self.device_name = device_name(model.device)
        return self._models[subject.label]


def _measure(
    runner: _Runner, subjects: Sequence[Subject], options: LatencyOptions, progress: Progress
) -> dict[Setting, dict[str, list[float]]]:
    """Seconds of every run: (batch size, beam) -> label -> one per run."""
    configs = [(size, beam) for size in options.batch_sizes for beam in options.beams]
    seconds: dict[Setting, dict[str, list[float]]] = {
        config: {subject.label: [] for subject in subjects} for config in configs
    }
    passes = options.warm_up + options.runs
    with progress("timing", len(configs) * len(subjects) * passes, "runs") as advance:
        for config, subject, number in _order(configs, subjects, passes, runner.together):
            elapsed = runner.seconds(subject, *config)
            if number >= options.warm_up:
                seconds[config][subject.label].append(elapsed)
            advance(1)
    return seconds


def _order(
    configs: Sequence[Setting], subjects: Sequence[Subject], passes: int, together: bool
) -> list[tuple[Setting, Subject, int]]:
    if together:
        return [(config, s, number) for config in configs for number in range(passes) for s in subjects]
    return [(config, s, number) for s in subjects for config in configs for number in range(passes)]


def _timing(
    setting: Setting,
    seconds: Sequence[float],
    baseline: Sequence[float],
    sentences: int,
    options: LatencyOptions,
) -> Timing:
    from prunecli.results.latency import Spread, Timing

    tokens = sentences * options.new_tokens
    return Timing(
        batch_size=setting[0],
        beam=setting[1],
        seconds=[round(value, 6) for value in seconds],
        tokens_per_second=Spread.of([tokens / value for value in seconds]),
        seconds_per_sentence=Spread.of([value / sentences for value in seconds]),
        # Run i against run i of the baseline: what slows the machine for a while cancels out.
        speedup=Spread.of([base / value for base, value in zip(baseline, seconds, strict=True)]),
    )
