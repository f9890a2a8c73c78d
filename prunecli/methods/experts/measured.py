"""What files of statistics say of a checkpoint's experts: the value of each, and how well it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.methods.experts.granularity import aggregate, aggregate_texts
from prunecli.methods.experts.metrics import Values, default_metric, metric_values
from prunecli.methods.experts.names import Granularity
from prunecli.model.axes import Axis, axis_name
from prunecli.model.sparse_layer import SparseLayer
from prunecli.results.gate_sums import GateSums, Mode
from prunecli.results.gates import GateStatistics, merge, side_of
from prunecli.results.matching import match_gates, read_matching
from prunecli.results.published import read_gates
from prunecli.selection.select import Kept

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

MIN_TOKENS = 100
"""Fewer than this are too few to judge an expert by. In a small Qwen3-MoE (6 layers of 32 experts) g‖f‖ spreads over an
expert's tokens by its mean, and neighbours in the order by REAP differ by 7 to 8 %: judged by 10 successive tokens of
its own, an expert is 22 to 29 % off and moves by 2 to 4 places of 32, by 100 of them 7 to 13 % and 1 to 2 places."""
LAYERS_SHOWN = 6
MOST_ALONE = 16
"""Languages or texts whose values alone are told beside those of all; of more, none are."""


@dataclass(frozen=True)
class Measured:
    """The values that experts are chosen by.

    Attributes:
        values: name of the axis -> `[original experts]`, their metric; after `held`, `[experts]` of the checkpoint.
        metric: what they are.
        mode: how the statistics were collected; None: there are none.
        granularity: that languages were summed by; None: of texts, or without statistics.
        few: layer's name -> experts that it holds and that fewer than the least number of tokens were routed to.
        of: fingerprint of the model that was run, where the checkpoint is a quantised copy of it; else None.
        texts: pairs of languages, languages, or texts that were summed.
        split: of the text, where it is known.
        tokens: layer's name -> that were routed, where they were counted.
        alone: language or text of several that were asked for -> the values that it alone gives, of the layers that it
            counts in.
        unseen: names of layers that predict further tokens: no text enters them, so that their values are AIMER's.
        mixed: see `GateStatistics`.
    """

    values: Mapping[str, Values]
    metric: str
    mode: Mode | None = None
    granularity: Granularity | None = None
    few: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    of: str | None = None
    texts: tuple[str, ...] = ()
    split: str | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    alone: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    unseen: frozenset[str] = frozenset()
    mixed: bool = False

    def held(self, axes: Sequence[Axis]) -> Measured:
        """The values of the experts that the checkpoint holds, in the order of `Axis.ids`."""

        def of(values: Mapping[str, Values]) -> dict[str, Values]:
            return {axis.name: values[axis.name][list(axis.ids)] for axis in axes if axis.name in values}

        alone = {name: of(values) for name, values in self.alone.items()}
        return replace(self, values=of(self.values), alone=alone)


def measure_languages(
    statistics: GateStatistics,
    metric: str | None,
    granularity: Granularity | None,
    sources: Sequence[str],
    targets: Sequence[str],
) -> Measured:
    """By languages of translation; `metric` and `granularity` None: the default ones.

    Raises:
        UsageError: no such metric or granularity, languages that it does not take.
        StatisticsError: a language or sums that the statistics lack.
    """
    granularity = granularity or ("language" if sources or targets else "global")
    metric = metric or default_metric(statistics)
    sums = aggregate(statistics, granularity, sources, targets)
    texts = tuple(statistics.entries)
    if sources or targets:
        texts = (f"{', '.join(sources) or 'any'} to {', '.join(targets) or 'any'}, by {granularity}",)
    return Measured(
        metric_values(metric, sums, statistics),
        metric,
        statistics.mode,
        granularity,
        texts=_named(texts),
        split=statistics.split,
        tokens={} if statistics.mode == "published" else _tokens(statistics, sums),
        alone=_languages_alone(statistics, metric, granularity, sources, targets),
    )


def _languages_alone(
    statistics: GateStatistics,
    metric: str,
    granularity: Granularity,
    sources: Sequence[str],
    targets: Sequence[str],
) -> dict[str, dict[str, Values]]:
    """By language, the encoder's layers for each source and the decoder's for each target; by pair, all for each."""
    found: dict[str, dict[str, Values]] = {}
    if granularity == "pair":
        pairs = [(source, target) for source in sources for target in targets if source != target]
        for source, target in pairs if 1 < len(pairs) <= MOST_ALONE else ():
            sums = aggregate(statistics, granularity, (source,), (target,))
            found[f"{source}-{target}"] = metric_values(metric, sums, statistics)
    elif granularity == "language" and len(sources) + len(targets) <= MOST_ALONE:
        for side, word, names in (("encoder", "from", sources), ("decoder", "into", targets)):
            for name in names if len(names) > 1 else ():
                sums = aggregate(
                    statistics, granularity, *((name,), ()) if side == "encoder" else ((), (name,))
                )
                values = metric_values(metric, sums, statistics)
                found[f"{word} {name}"] = {of: own for of, own in values.items() if side_of(of) == side}
    return found


def _tokens(statistics: GateStatistics, sums: GateSums) -> dict[str, int]:
    return {layer: int(count) for layer, count in zip(statistics.layers, sums.tokens, strict=True)}


def _named(texts: Sequence[str]) -> tuple[str, ...]:
    """The names, or of many how many there are."""
    return tuple(texts) if len(texts) <= MOST_ALONE else (f"{len(texts):,} pairs or texts",)


def measure_texts(
    statistics: GateStatistics,
    metric: str | None,
    texts: Sequence[str],
    axes: Sequence[Axis],
    min_tokens: int,
) -> Measured:
    """By texts of language models; `metric` None: the default one.

    Raises:
        UsageError: no such metric.
        StatisticsError: a text or sums that the statistics lack.
    """
    metric = metric or default_metric(statistics)
    sums = aggregate_texts(statistics, texts)
    routed = dict(zip(statistics.layers, sums.routed, strict=True))
    few = {
        axis.module: experts
        for axis in axes
        if axis.module in routed
        and (experts := tuple(expert for expert in axis.ids if routed[axis.module][expert] < min_tokens))
    }
    names = sorted(set(texts or statistics.entries))
    alone = {name: metric_values(metric, aggregate_texts(statistics, (name,)), statistics) for name in names}
    return Measured(
        metric_values(metric, sums, statistics),
        metric,
        statistics.mode,
        few=few,
        texts=_named(names),
        split=statistics.split,
        tokens=_tokens(statistics, sums),
        alone=alone if 1 < len(names) <= MOST_ALONE else {},
        mixed=statistics.mixed,
    )


def scarcity_warning(few: Mapping[str, Sequence[int]], kept: Kept, held: int, min_tokens: int) -> str | None:
    """What to say before experts go that the text hardly reached: nothing is known of them, not that they are useless.

    Args:
        few: layer's name -> experts that fewer than `min_tokens` were routed to.
        kept: name of the axis -> experts that stay.
        held: experts of the model.
    """
    if not few:
        return None
    lost = sum(
        expert not in kept[axis_name(name, "expert")] for name, experts in few.items() for expert in experts
    )
    named = [f"{name} {len(experts)}" for name, experts in few.items()]
    more = f", {len(named) - LAYERS_SHOWN} more layers" if len(named) > LAYERS_SHOWN else ""
    return (
        f"{sum(map(len, few.values()))} of {held} experts saw fewer than {min_tokens} tokens of this text, too few to "
        f"judge them by; {lost} of these go ({', '.join(named[:LAYERS_SHOWN])}{more}). Collect more text, or lower "
        "--min-tokens."
    )


def read_all(
    checkpoint: Checkpoint, paths: Sequence[Path], layers: Sequence[SparseLayer] | None = None
) -> GateStatistics:
    """The statistics of several files, merged, of this checkpoint or of one that it was made from.

    Raises:
        StatisticsError: damaged files, of another model, or that do not go together.
    """
    layers = checkpoint.require_mixtures() if layers is None else layers
    names, experts = [layer.name for layer in layers], max(layer.original_experts for layer in layers)
    parts = read_matching(
        paths,
        lambda path: read_gates(path, names, experts),
        lambda statistics: match_gates(statistics, checkpoint),
        "Collect it first: prunecli collect-gates.",
    )
    return merge(parts, [str(path) for path in paths])
