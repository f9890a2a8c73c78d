"""Value of each expert by a metric: of gate statistics, or of the weights alone.

Metrics of gates (2212.09811, 4.1), with n the tokens of a layer, per expert e: top1(e) = top1 / n;
top2(e) = (top1 + top2) / n; mean(e) = gate_sum / n; conf(e) = conf1_sum / top1, 0 where no token ranks e first.

Metrics of gates and outputs, which are collected of language models: sums over the n_e tokens that are routed to e, of
its gate g as applied and the norm ‖f‖ of its output, S(b, a, c) = [1 / n_e if b] sum g^a ‖f‖^c (2606.15716). They are 0
of an expert that no token is routed to.

AIMER needs no text and runs no model, and so serves layers that no plain forward pass enters. It reads the weights
once, a few blocks in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import CheckpointError, StatisticsError, UsageError
from prunecli.methods.experts.names import Granularity
from prunecli.model.axes import Axis, axis_name
from prunecli.model.sparse_layer import SparseLayer, parts_of
from prunecli.progress import Progress, silent
from prunecli.results.gates import (
    ANY,
    SUMS,
    GateStatistics,
    GateSums,
    merge,
    ratio,
    read_gates,
    side_of,
    split_pair,
)
from prunecli.results.matching import match_gates, read_matching
from prunecli.tensors.dtypes import itemsize, numpy_dtype
from prunecli.tensors.reader import TensorReader
from prunecli.text.files import near_names

if TYPE_CHECKING:
    from prunecli.methods.experts.options import ExpertOptions
    from prunecli.model.checkpoint import Checkpoint

Values = NDArray[np.float64]
RANDOM = "random"
"""The baseline that needs no statistics."""
AIMER = "aimer"
"""The metric of weights alone."""
WITHOUT_STATISTICS = (AIMER, RANDOM)
MOST_ALONE = 16
"""Largest number of languages or texts for which a decision says what each alone would keep."""
BLOCK_ELEMENTS = 1 << 18
"""Values that are read and summed at a time; sums depend on it in their last bits."""
THREADS = 8
"""Largest number of threads that read and sum, 5 MiB each; the number changes no bit."""
PLAIN = ("F16", "BF16", "F32", "F64")
"""Types of weights that are no codes."""


Part = tuple[str, int, int]
"""Values of one tensor: its name, the first value, the number of values."""


class Metric(NamedTuple):
    """One metric: names of the sums that it needs, and the function from `GateSums` to `[layers, experts]`."""

    needs: tuple[str, ...]
    values: Callable[[GateSums], Values]


def top1(sums: GateSums) -> Values:
    """top1(e): share of tokens that rank e first. `[layers, experts]`."""
    return ratio(sums.top1, sums.tokens[:, None])


def confidence(sums: GateSums) -> Values:
    """conf(e): mean gate of e over the tokens that rank it first, or 0. `[layers, experts]`."""
    return ratio(sums.conf1_sum, sums.top1)


def total(name: str, *besides: str) -> Metric:
    """S(0, a, c): a sum over the tokens that are routed to an expert; `besides` names sums that must exist too."""
    return Metric((name, *besides), lambda sums: np.asarray(getattr(sums, name), np.float64))


def mean(name: str) -> Metric:
    """S(1, a, c): the mean of the terms of a sum over the tokens that are routed to an expert."""
    return Metric(("routed", name), lambda sums: ratio(getattr(sums, name), sums.routed))


METRICS: Mapping[str, Metric] = {
    # eq. 4 and eq. 3 of 2212.09811, and LB(e) = top1(e) x mean(e)
    "importance": Metric(("top1", "conf1_sum"), lambda sums: top1(sums) * np.exp(confidence(sums))),
    "importance-vanilla": Metric(("top1", "conf1_sum"), lambda sums: top1(sums) * confidence(sums)),
    "top1": Metric(("top1",), top1),
    "top2": Metric(("top1", "top2"), lambda sums: ratio(sums.top1 + sums.top2, sums.tokens[:, None])),
    "load-balance": Metric(
        ("top1", "gate_sum"), lambda sums: top1(sums) * ratio(sums.gate_sum, sums.tokens[:, None])
    ),
    "reap": mean("gate_norm_sum"),  # eq. 9 of 2510.13999
    "ean": total("norm_sum"),  # eq. 13 of 2510.13999
    "frequency": total("routed"),  # S(0, 0, 0)
    "seer": total("gate_sum", "routed"),  # S(0, 1, 0); without "routed" the sum is over all tokens
    "man": mean("norm_sum"),  # S(1, 0, 1)
    "msan": mean("norm_sq_sum"),  # S(1, 0, 2)
    "weighted-ean": total("gate_norm_sum"),  # S(0, 1, 1)
}


def metric_named(name: str) -> Metric:
    """The metric of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in METRICS:
        is_other = name in WITHOUT_STATISTICS
        raise UsageError(
            f"The metric {name!r} takes no statistics." if is_other else f"No metric {name!r}.",
            f"Choose one of {', '.join((*METRICS, *WITHOUT_STATISTICS))}.",
        )
    return METRICS[name]


def default_metric(statistics: GateStatistics) -> str:
    """The metric for statistics of this kind where none is asked for: as published, of language models REAP."""
    return "reap" if statistics.mode == "text" else "importance"


def metric_values(name: str, sums: GateSums, statistics: GateStatistics) -> dict[str, Values]:
    """Name of the axis -> `[experts]`, the metric of every original expert, not yet normalised.

    Args:
        name: one of METRICS.
        sums: what to compute it from, of the layers of `statistics`.
        statistics: gives the names of the axes and which sums they hold.

    Raises:
        UsageError: no such metric.
        StatisticsError: they lack what the metric needs.
    """
    metric = metric_named(name)
    held = {*statistics.names} - statistics.lacks
    if missing := sorted({*metric.needs} - held):
        usable = [other for other, candidate in METRICS.items() if held.issuperset(candidate.needs)]
        raise StatisticsError(
            f"The statistics lack what the metric {name!r} needs ({', '.join(missing)}).",
            f"Choose --metric {' or '.join(usable)}." if usable else "Collect the gates with prunecli.",
        )
    return {axis.name: own for axis, own in zip(statistics.axes, metric.values(sums), strict=True)}


def aggregate(
    statistics: GateStatistics,
    granularity: str,
    sources: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> GateSums:
    """The sums that a selection by languages is made from (2212.09811, 4.2), `[layers, experts]`.

    - global: all pairs.
    - pair: the pairs of the given sources with the given targets; a side left out stands for all its
      languages.
    - language: in the encoder all pairs with a given source, in the decoder all with a given target; a side
      left out is summed over all pairs.

    In published files the entries `SOURCE-X` and `X-TARGET` stand for all pairs of that source or target, and
    ratios are averaged where sums are added.

    Raises:
        UsageError: languages that the granularity does not take, or none where it needs them.
        StatisticsError: a language or a pair that the statistics lack.
    """
    pairs = {name: split_pair(name) for name in statistics.entries}
    known = [
        [*dict.fromkeys(pair[position] for pair in pairs.values() if pair[position] != ANY)]
        for position in (0, 1)
    ]
    if granularity == "global":
        if sources or targets:
            raise UsageError(
                "--granularity global sums over all languages; it takes no --source and no --target.",
                "Leave them out, or choose --granularity language or pair.",
            )
    elif not sources and not targets:
        names = sorted({*known[0], *known[1]})
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UsageError(
            f"--granularity {granularity} needs --source or --target.",
            f"Known: {', '.join(names[:8])}{more}.",
        )
    for role, collected, asked in zip(("source", "target"), known, (sources, targets), strict=True):
        if unknown := [language for language in asked if language not in collected]:
            raise StatisticsError(
                f"The statistics hold no {role} language {unknown[0]!r}.",
                near_names(unknown[0], collected, "Collected"),
            )
    if granularity == "pair":
        return statistics.combined(sorted(_pairs(pairs, sources, targets)))

    def of(position: int, asked: Sequence[str]) -> GateSums:
        """Of each language the one entry that stands for all of its pairs, `SOURCE-X` or `X-TARGET`, else those."""
        entries: list[str] = []
        for language in dict.fromkeys(asked or known[position] or [ANY]):
            whole = (f"{language}-{ANY}", f"{ANY}-{language}")[position]
            own = [name for name, pair in pairs.items() if pair[position] == language]
            entries += [whole] if whole in pairs else own
        return statistics.combined(sorted(entries))

    encoder, decoder = of(0, sources), of(1, targets)
    sums = decoder.of_layers(range(len(statistics.layers)))
    rows = [row for row, layer in enumerate(statistics.layers) if side_of(layer) == "encoder"]
    for name in SUMS:
        getattr(sums, name)[rows] = getattr(encoder, name)[rows]
    return sums


def _pairs(
    pairs: Mapping[str, tuple[str, str]], sources: Sequence[str], targets: Sequence[str]
) -> Sequence[str]:
    """Entries of the given sources with the given targets, a language with itself left out."""
    if sources and targets:
        asked = [f"{s}-{t}" for s in dict.fromkeys(sources) for t in dict.fromkeys(targets) if s != t]
        if not asked:
            raise UsageError(f"{sources[0]} to {targets[0]} is no translation.", "Name two languages.")
    else:
        asked = [
            name
            for name, (source, target) in pairs.items()
            if ANY not in (source, target) and (source in sources or target in targets)
        ]
    missing = [pair for pair in asked if pair not in pairs]
    if missing or not asked:
        raise StatisticsError(
            f"The statistics lack the pair {missing[0]}."
            if missing
            else "The statistics hold no pairs of these.",
            "Collect its gates and give both files, or choose --granularity language.",
        )
    return asked


def aggregate_texts(statistics: GateStatistics, texts: Sequence[str] = ()) -> GateSums:
    """The sums of some texts together, by default of all, `[layers, experts]`; every token weighs alike.

    Raises:
        StatisticsError: a text that the statistics lack.
    """
    if unknown := [text for text in texts if text not in statistics.entries]:
        raise StatisticsError(
            f"The statistics hold no text {unknown[0]!r}.",
            near_names(unknown[0], list(statistics.entries), "Collected"),
        )
    return statistics.combined(sorted(set(texts or statistics.entries)))


@dataclass(frozen=True)
class Measured:
    """The part of statistics that experts are chosen by.

    Attributes:
        statistics: the statistics, which may hold more languages or texts.
        sums: sums of this part.
        texts: names of the languages or texts; if there are many, their number.
        alone: language or text, if there are several -> its own sums, and the side where they count (None: both).
        granularity: how languages are summed. None for texts.
    """

    statistics: GateStatistics
    sums: GateSums
    texts: Sequence[str]
    alone: Mapping[str, tuple[GateSums, str | None]]
    granularity: Granularity | None = None

    @property
    def tokens(self) -> dict[str, int]:
        """Layer's name -> number of routed tokens; empty for published ratios, which do not say it."""
        if self.statistics.mode == "published":
            return {}
        return dict(zip(self.statistics.layers, self.sums.tokens.tolist(), strict=True))

    def few(self, axes: Sequence[Axis], min_tokens: int) -> dict[str, tuple[int, ...]]:
        """Layer's name -> experts that it holds and that received fewer than `min_tokens` tokens of the texts."""
        routed = dict(zip(self.statistics.layers, self.sums.routed, strict=False))
        return {
            axis.module: experts
            for axis in axes
            if axis.module in routed
            and (experts := tuple(expert for expert in axis.ids if routed[axis.module][expert] < min_tokens))
        }


def measure_languages(
    statistics: GateStatistics,
    granularity: Granularity | None,
    sources: Sequence[str],
    targets: Sequence[str],
) -> Measured:
    """The sums of languages of a translation model.

    Alone, a source counts in the encoder and a target in the decoder; with granularity "pair", a pair counts in both.

    Args:
        granularity: see `aggregate`. If None, "language" with sources or targets, else "global".

    Raises:
        UsageError: languages that the granularity does not take.
        StatisticsError: a language that the statistics lack.
    """
    granularity = granularity or ("language" if sources or targets else "global")
    texts = [*statistics.entries]
    if sources or targets:
        texts = [f"{', '.join(sources) or 'any'} to {', '.join(targets) or 'any'}, by {granularity}"]
    alone: dict[str, tuple[GateSums, str | None]] = {}
    if granularity == "pair":
        pairs = [(source, target) for source in sources for target in targets if source != target]
        for source, target in pairs if 1 < len(pairs) <= MOST_ALONE else ():
            alone[f"{source}-{target}"] = aggregate(statistics, granularity, (source,), (target,)), None
    elif len(sources) + len(targets) <= MOST_ALONE:
        for source in sources if len(sources) > 1 else ():
            alone[f"from {source}"] = aggregate(statistics, granularity, (source,)), "encoder"
        for target in targets if len(targets) > 1 else ():
            alone[f"into {target}"] = aggregate(statistics, granularity, (), (target,)), "decoder"
    sums = aggregate(statistics, granularity, sources, targets)
    return Measured(statistics, sums, texts, alone, granularity)


def measure_texts(statistics: GateStatistics, texts: Sequence[str]) -> Measured:
    """The sums of texts of a language model; all texts if none is named.

    Raises:
        StatisticsError: a text that the statistics lack.
    """
    sums, names = aggregate_texts(statistics, texts), sorted(set(texts or statistics.entries))
    alone = {name: (statistics.entries[name], None) for name in names if 1 < len(names) <= MOST_ALONE}
    return Measured(statistics, sums, names, alone)


def read_all(
    checkpoint: Checkpoint,
    gates: GateStatistics | Sequence[Path],
    layers: Sequence[SparseLayer],
) -> GateStatistics:
    """The statistics, or those of several files merged, of this checkpoint or of one that it was made from.

    Raises:
        StatisticsError: damaged files, of another model, or that do not go together.
    """
    if isinstance(gates, GateStatistics):
        return match_gates(gates, checkpoint)
    names, experts = [layer.name for layer in layers], max(layer.original_experts for layer in layers)
    parts = read_matching(
        gates,
        lambda path: read_gates(path, names, experts),
        lambda statistics: match_gates(statistics, checkpoint),
        "Collect it first: prunecli collect-gates.",
    )
    return merge(parts, [str(path) for path in gates])


def random_values(axes: Sequence[Axis], seed: int) -> dict[str, Values]:
    """Name of each axis -> `[original experts]` uniform in (0, 1], the baseline."""
    generator = np.random.default_rng(seed)
    return {axis.name: 1.0 - generator.random(axis.original) for axis in axes}


def aimer_bytes(checkpoint: Checkpoint, options: ExpertOptions) -> int:
    """Bytes of experts that `plan_experts` reads with these options."""
    if options.keep is not None or options.metric == RANDOM:
        return 0
    read = tuple(
        layer
        for layer in checkpoint.require_mixtures()
        if (options.mtp == "prune" if layer.is_predicting else options.metric == AIMER)
    )
    return sum(checkpoint.stored_bytes(name) for name, part in parts_of(read) if part == "experts")


def aimer_values(
    checkpoint: Checkpoint, layers: Sequence[SparseLayer], *, progress: Progress = silent
) -> dict[str, NDArray[np.float64]]:
    """Name of the axis -> `[original experts]`, 1 / AIMER of each expert that it holds, so that the lowest goes first.

    AIMER(e) = (sum |w| / N) / sqrt(sum w² / N) over the N weights of an expert's projections, biases left out; experts
    with the highest are pruned. It is 1 where all weights are of one size, sqrt(2 / pi) of normal ones, and less the
    more of the norm lies on few weights. An expert of zeros alone has the value 0.

    Args:
        checkpoint: the weights; quantised weights count as the numbers that they stand for.
        layers: mixtures of the checkpoint.

    Raises:
        StatisticsError, UnsupportedModelError: the weights are quantised in an unknown way.
        CheckpointError: a file ends early, or holds NaN or infinity.
    """
    reader = checkpoint
    if layers and checkpoint.quantised:
        import torch

        from prunecli.modules.dequantised import as_run

        reader = as_run(checkpoint, torch.float32)
        decoded = {layer.name: layer for layer in reader.mixtures}
        layers = [decoded[layer.name] for layer in layers]
    found = {axis_name(layer.name, "expert"): np.zeros(layer.original_experts) for layer in layers}
    places = [(axis_name(layer.name, "expert"), expert) for layer in layers for expert in layer.experts]
    work = [parts for layer in layers for parts in parts_of_layer(reader, layer)]
    for parts in work:
        for name, *_ in parts:
            reader.open_files(name)
    pool = ThreadPoolExecutor(THREADS if reader.is_remote else min(THREADS, os.cpu_count() or 1))
    try:
        with progress("reading experts", len(work), "experts") as advance:
            values = pool.map(partial(inverse_aimer, reader), work)
            for (name, expert), value in zip(places, values, strict=True):
                found[name][expert] = value
                advance(1)
    except BaseException:
        reader.interrupt()
        raise
    finally:  # after an error or Ctrl-C: running threads finish their expert, the rest never starts
        pool.shutdown(cancel_futures=True)
    return found


def parts_of_layer(reader: TensorReader, layer: SparseLayer) -> list[list[Part]]:
    """Where the weights of each expert of a layer are."""
    return [
        parts_of_expert(
            reader,
            [layer.expert_tensor(place, suffix) for suffix in layer.expert_tensors],
            layer.stacked_tensors,
            place,
            layer.num_experts,
        )
        for place in range(layer.num_experts)
    ]


def parts_of_expert(
    reader: TensorReader, own: Sequence[str], stacked: Sequence[str] = (), place: int = 0, held: int = 1
) -> list[Part]:
    """Where the weights of an expert lie, biases left out.

    Args:
        reader: of the weights.
        own: full names of the tensors of this expert alone.
        stacked: full names of those of all experts, with as many entries for each on the first axis.
        place: its number in those.
        held: how many experts there are.

    Raises:
        StatisticsError: they are quantised.
    """
    parts = []
    for name in (*own, *stacked):
        info = reader.info(name)
        if info.dtype not in PLAIN:
            raise StatisticsError(
                f"{reader.path}: {name} is quantised ({info.dtype}); aimer takes weights as they are.",
                "Choose a metric of gate statistics, or give the model before it was quantised.",
            )
        shape = info.shape
        if name in stacked:
            shape = shape[1:] if shape[0] == held else (shape[0] // held, *shape[1:])
        if len(shape) > 1:
            values = math.prod(shape)
            parts.append((name, place * values if name in stacked else 0, values))
    return parts


def inverse_aimer(reader: TensorReader, parts: Sequence[Part]) -> float:
    """sqrt(N sum w²) / sum |w| over all values of the parts; 0 where all are 0.

    Raises:
        CheckpointError: a file ends early, or holds what is no number.
    """
    count, absolute, square = 0, 0.0, 0.0
    for name, first, values in parts:
        dtype = reader.info(name).dtype
        size = itemsize(dtype)
        fill = reader.reading(name, first * size, values * size)
        for start in range(0, values, BLOCK_ELEMENTS):
            raw = np.empty(min(BLOCK_ELEMENTS, values - start), numpy_dtype(dtype))
            fill(raw.view(np.uint8).data)
            block = np.abs(raw.astype(np.float64))
            absolute += float(block.sum())
            square += float(np.square(block, out=block).sum())
        count += values
        if not (math.isfinite(absolute) and math.isfinite(square)):
            raise CheckpointError(f"{reader.path}: {name} holds NaN or infinity, or values too large")
    return math.sqrt(count * square) / absolute if absolute else 0.0
