"""Metrics of experts: the value of each expert, from gate statistics or from the weights alone.

Metrics of gates (2212.09811, 4.1), with n the tokens of a layer, per expert e: top1(e) = top1 / n;
top2(e) = (top1 + top2) / n; mean(e) = gate_sum / n; conf(e) = conf1_sum / top1, 0 where no token ranks e first.

Metrics of gates and outputs, which are collected of language models: sums over the n_e tokens that are routed to e, of
its gate g as applied and the norm ‖f‖ of its output, S(b, a, c) = [1 / n_e if b] sum g^a ‖f‖^c (2606.15716). They are 0
of an expert that no token is routed to.

AIMER needs no text and runs no model, and so serves layers that no plain forward pass enters. It reads the weights
once, a few blocks in memory at a time.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from prunecli.errors import CheckpointError, StatisticsError, UsageError
from prunecli.methods.options import ExpertOptions, Granularity
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Floats
from prunecli.model.sparse_layer import SparseLayer, parts_of
from prunecli.progress import Progress, silent
from prunecli.results.gates import (
    ANY,
    SUMS,
    GateStatistics,
    GateSums,
    ratio,
    read_gates,
    side_of,
    split_pair,
)
from prunecli.results.matching import match_gates, matching
from prunecli.tensors.dtypes import itemsize, numpy_dtype
from prunecli.tensors.reader import TensorReader
from prunecli.tensors.stream import REMOTE_ELEMENTS
from prunecli.text.files import near_names

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


Metric = Callable[[GateSums], Floats]
"""`[layers, experts]` from sums; a metric raises an AttributeError if a sum is missing."""


def _top1(sums: GateSums) -> Floats:
    return ratio(sums.top1, sums.tokens[:, None])


def _conf(sums: GateSums) -> Floats:
    return ratio(sums.conf1_sum, sums.top1)


METRICS: Mapping[str, Metric] = {
    # eq. 4 and eq. 3 of 2212.09811, and LB(e) = top1(e) x mean(e)
    "importance": lambda sums: _top1(sums) * np.exp(_conf(sums)),
    "importance-vanilla": lambda sums: _top1(sums) * _conf(sums),
    "top1": _top1,
    "top2": lambda sums: ratio(sums.top1 + sums.top2, sums.tokens[:, None]),
    "load-balance": lambda sums: _top1(sums) * ratio(sums.gate_sum, sums.tokens[:, None]),
    "reap": lambda sums: ratio(sums.gate_norm_sum, sums.routed),  # eq. 9 of 2510.13999
    "ean": lambda sums: sums.norm_sum,  # eq. 13 of 2510.13999
    "frequency": lambda sums: sums.routed.astype(np.float64),  # S(0, 0, 0)
    # S(0, 1, 0): without "routed" the sum is over all tokens.
    "seer": lambda sums: np.where(sums.routed, sums.gate_sum, 0.0),
    "man": lambda sums: ratio(sums.norm_sum, sums.routed),  # S(1, 0, 1)
    "msan": lambda sums: ratio(sums.norm_sq_sum, sums.routed),  # S(1, 0, 2)
    "weighted-ean": lambda sums: sums.gate_norm_sum,  # S(0, 1, 1)
}


def default_metric(statistics: GateStatistics) -> str:
    """The metric for statistics of this kind where none is asked for: as published, of language models REAP."""
    return "reap" if statistics.mode == "text" else "importance"


def metric_values(name: str, sums: GateSums, statistics: GateStatistics) -> dict[str, Floats]:
    """Name of the axis -> `[experts]`, the metric of every original expert, not yet normalised.

    Args:
        name: one of METRICS.
        sums: the sums to compute the metric from, for the layers of `statistics`.
        statistics: gives the names of the axes and which sums they hold.

    Raises:
        UsageError: no such metric.
        StatisticsError: they lack what the metric needs.
    """
    if name not in METRICS:
        is_other = name in WITHOUT_STATISTICS
        raise UsageError(
            f"The metric {name!r} takes no statistics." if is_other else f"No metric {name!r}.",
            f"Choose one of {', '.join((*METRICS, *WITHOUT_STATISTICS))}.",
        )
    held = GateSums({key: own for key, own in sums.items() if key not in statistics.lacks})
    values = _computed(name, held)
    if isinstance(values, str):
        usable = [other for other in METRICS if not isinstance(_computed(other, held), str)]
        raise StatisticsError(
            f"The statistics lack what the metric {name!r} needs ({values}).",
            f"Choose `metric={' or '.join(usable)}`." if usable else "Collect the gates with prunecli.",
        )
    return {axis.name: own for axis, own in zip(statistics.axes, values, strict=True)}


def _computed(name: str, sums: GateSums) -> Floats | str:
    """The values of a metric, or the name of a sum that it needs and that is missing."""
    try:
        return METRICS[name](sums)
    except AttributeError as error:
        return str(error)


def aggregate(
    statistics: GateStatistics,
    granularity: str,
    sources: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> GateSums:
    """The sums that a selection by languages is made from (2212.09811, 4.2), `[layers, experts]`.

    - global: all pairs.
    - pair: the pairs of the given sources with the given targets; a side left out stands for all its languages.
    - language: in the encoder all pairs with a given source, in the decoder all with a given target; a side left out is
      summed over all pairs.

    In published files the entries `SOURCE-X` and `X-TARGET` stand for all pairs of that source or target, and ratios
    are averaged where sums are added.

    Raises:
        UsageError: languages that the granularity does not take, or none where it needs them.
        StatisticsError: a language or a pair that the statistics lack.
    """
    pairs = {name: split_pair(name) for name in statistics.entries}
    asked = (sources, targets)
    known = [[*dict.fromkeys(pair[end] for pair in pairs.values() if pair[end] != ANY)] for end in (0, 1)]
    if granularity == "global":
        if sources or targets:
            raise UsageError(
                "`granularity=global` sums over all languages; it takes no `sources` and no `targets`.",
                "Leave them out, or choose `granularity=language` or `granularity=pair`.",
            )
    elif not sources and not targets:
        raise UsageError(
            f"`granularity={granularity}` needs `sources` or `targets`.",
            near_names("", (*known[0], *known[1])),
        )
    for role, collected, languages in zip(("source", "target"), known, asked, strict=True):
        for language in languages:
            if language not in collected:
                raise StatisticsError(
                    f"The statistics hold no {role} language {language!r}.",
                    near_names(language, collected, "Collected"),
                )
    if granularity == "pair":
        every = product(sources or known[0], targets or known[1])
        wanted = {f"{source}-{target}" for source, target in every if source != target}
        lacking = sorted(wanted - pairs.keys())
        if sources and targets and lacking:
            raise StatisticsError(
                f"The statistics lack the pair {lacking[0]}.",
                "Collect its gates and give both files, or choose `granularity=language`.",
            )
        # A side left out stands for the languages that were collected with the other side.
        if not (held := wanted & pairs.keys()):
            raise UsageError(
                f"{', '.join((*sources, *targets))}: no translation that was collected.",
                "Name two languages.",
            )
        return statistics.combined(sorted(held))

    def of(end: int) -> GateSums:
        """The entries of each language: the one for all of its pairs if there is one, else one for each pair."""
        entries = []
        for language in dict.fromkeys(asked[end] or known[end] or [ANY]):
            whole = (f"{language}-{ANY}", f"{ANY}-{language}")[end]
            own = [name for name, pair in pairs.items() if pair[end] == language]
            entries += [whole] if whole in pairs else own
        return statistics.combined(sorted(entries))

    encoder, sums = of(0), of(1).of_layers(range(len(statistics.layers)))
    rows = [row for row, layer in enumerate(statistics.layers) if side_of(layer) == "encoder"]
    for name in SUMS:
        sums[name][rows] = encoder[name][rows]
    return sums


@dataclass(frozen=True)
class Measured:
    """The part of statistics that experts are chosen by.

    Attributes:
        sums: sums of this part.
        texts: names of the languages or texts.
        alone: language or text, if there are several -> its own sums, and the side where they count (None: both).
        granularity: granularity of the sums of languages. None for texts.
    """

    sums: GateSums
    texts: Sequence[str]
    alone: Mapping[str, tuple[GateSums, str | None]]
    granularity: Granularity | None = None


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
    one: dict[str, tuple[Sequence[str], Sequence[str], str | None]]
    if granularity == "pair":
        one = {
            f"{source}-{target}": ((source,), (target,), None)
            for source, target in product(sources, targets)
            if source != target
        }
    else:
        one = {f"from {name}": ((name,), (), "encoder") for name in sources if len(sources) > 1}
        one |= {f"into {name}": ((), (name,), "decoder") for name in targets if len(targets) > 1}
    alone = {
        name: (aggregate(statistics, granularity, source, target), side)
        for name, (source, target, side) in one.items()
        if 1 < len(one) <= MOST_ALONE
    }
    sums = aggregate(statistics, granularity, sources, targets)
    return Measured(sums, texts, alone, granularity)


def measure_texts(statistics: GateStatistics, texts: Sequence[str]) -> Measured:
    """The sums of texts of a language model, every token weighing alike; of all texts if none is named.

    Raises:
        StatisticsError: a text that the statistics lack.
    """
    for text in texts:
        if text not in statistics.entries:
            raise StatisticsError(
                f"The statistics hold no text {text!r}.",
                near_names(text, list(statistics.entries), "Collected"),
            )
    names = sorted(set(texts or statistics.entries))
    alone = {name: (statistics.entries[name], None) for name in names if 1 < len(names) <= MOST_ALONE}
    return Measured(statistics.combined(names), names, alone)


def read_all(
    checkpoint: Checkpoint,
    gates: GateStatistics | Sequence[Path],
    layers: Sequence[SparseLayer],
) -> GateStatistics:
    """The statistics, or those of several files merged, of this checkpoint or of one that it was made from.

    Raises:
        StatisticsError: damaged files, of another model, or that do not go together.
    """
    experts = max(layer.original_experts for layer in layers)
    return matching(
        gates,
        lambda path: read_gates(path, [layer.name for layer in layers], experts),
        lambda statistics: match_gates(statistics, checkpoint),
        "Collect it first: prunecli collect-gates.",
    )


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
) -> dict[str, Floats]:
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
    work = {}
    for layer in layers:
        for place, expert in enumerate(layer.experts):
            own = [layer.expert_tensor(place, suffix) for suffix in layer.expert_tensors]
            parts = parts_of_expert(reader, own, layer.stacked_tensors, place, layer.num_experts)
            work[axis_name(layer.name, "expert"), expert] = parts
    pool = ThreadPoolExecutor(THREADS if reader.is_remote else min(THREADS, os.cpu_count() or 1))
    try:
        with progress("reading experts", len(work), "experts") as advance:
            values = pool.map(partial(inverse_aimer, reader), work.values())
            for (name, expert), value in zip(work, values, strict=True):
                found[name][expert] = value
                advance(1)
    finally:  # after an error or Ctrl-C: running threads finish their expert, the rest never starts
        pool.shutdown(cancel_futures=True)
    return found


def parts_of_expert(
    reader: TensorReader, own: Sequence[str], stacked: Sequence[str] = (), place: int = 0, held: int = 1
) -> list[Part]:
    """The parts of tensors that hold the weights of an expert, without biases.

    Args:
        reader: reads the weights.
        own: full names of the tensors of this expert alone.
        stacked: full names of the tensors of all experts, with the same number of rows for each.
        place: number of the expert in the stacked tensors.
        held: number of experts in the stacked tensors.

    Raises:
        StatisticsError: the weights are quantised.
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
        step = REMOTE_ELEMENTS if reader.is_remote else BLOCK_ELEMENTS
        for start in range(first, first + values, step):
            raw = np.empty(min(step, first + values - start), numpy_dtype(dtype))
            reader.read_range(name, start * size, raw.view(np.uint8).data)
            block = np.abs(raw.astype(np.float64))
            absolute += float(block.sum())
            square += float(np.square(block, out=block).sum())
        count += values
        if not (math.isfinite(absolute) and math.isfinite(square)):
            raise CheckpointError(f"{reader.path}: {name} holds NaN or infinity, or values too large")
    return math.sqrt(count * square) / absolute if absolute else 0.0
