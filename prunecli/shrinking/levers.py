"""The kinds of units that `shrink` removes: which shares of each can go, and which units these are.

And the parts of the text that units are scored on, mixtures chosen on, and results reported on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from math import floor, gcd, lcm
from pathlib import Path
from typing import Any, get_args

from prunecli.errors import DataError, PruneError, UsageError
from prunecli.evaluation.quality_check import characters_of, part_of
from prunecli.methods.experts.batches import Translation
from prunecli.methods.experts.collect import collect_gates
from prunecli.methods.experts.options import layers_of, of_language_model, request_of
from prunecli.methods.experts.plan import plan_experts
from prunecli.methods.layers.score import measure_layers
from prunecli.methods.measuring import GRADIENT, NORMS, measure_activations, measure_gradients
from prunecli.methods.options import (
    ExpertOptions,
    HeadOptions,
    LayerOptions,
    NarrowOptions,
    VocabularyOptions,
)
from prunecli.methods.plans import GROUPED, plan_heads, plan_layers, plan_widths
from prunecli.methods.scoring import CollectOptions
from prunecli.methods.units import Ranking, TextRun, drawn, plan
from prunecli.methods.vocabulary.plan import plan_vocabulary
from prunecli.model.axes import Axis, Kind
from prunecli.model.cache import stated_count
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import text_config
from prunecli.model.find_axes import axes_of
from prunecli.model.probe import head_counts
from prunecli.model.stock import stock_support, uniform_heads
from prunecli.progress import Progress, Say
from prunecli.results.gates import GateStatistics
from prunecli.results.unit_scores import Scores
from prunecli.selection.cut import Selection, cut, kind_of
from prunecli.selection.select import Budget, held_in
from prunecli.shrinking.options import ChannelOptions, LeverName, ShrinkOptions
from prunecli.tensors.transaction import Store
from prunecli.text.choice import Dataset, Lines, TextChoice
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import Corpus, PlainText

KINDS: tuple[LeverName, ...] = get_args(LeverName)
DEFAULT = tuple(name for name in KINDS if name != "channels")
"""The levers that are used if none are named."""
GATES = "gates"
STEPS = 64
"""Shares of hidden units are multiples of 1 / STEPS, of channels perhaps of more."""
COUNTS = (1, 2, 4)
"""Occurrences that a token needs to be kept."""
TOKEN_STEPS = 8
"""Steps from all tokens to those of the text."""
ENDS = (0.0, 0.6, 0.8, 1.0)
"""Ends of the parts of the text: units are scored on the first, mixtures chosen on the second, results reported on the
third."""
CONTEXT = 512
"""Tokens of a window of plain text, if none is given."""


@dataclass(frozen=True)
class Lever:
    """One kind of units.

    Attributes:
        axes: the axes that lose units.
        shares: fractions of the units that can be removed, ascending, 0 first.
        metrics: metrics that the units can be ranked by; which is better is tried.
        select: from a share and a metric to the units that stay.
    """

    axes: tuple[Axis, ...]
    shares: tuple[float, ...]
    metrics: tuple[str, ...]
    select: Callable[[float, str], Selection]


@dataclass
class Levers:
    """Finds the levers of a checkpoint, and scores their units when a score is needed.

    Attributes:
        data: the part of the text that units are scored on.
        lines: the part of the text that tokens are counted in.
        store: keeps scores for a run that resumes this one.
    """

    checkpoint: Checkpoint
    data: Dataset
    lines: Lines
    options: ShrinkOptions
    store: Store
    progress: Progress
    say: Say
    _scored: dict[Kind, Sequence[Axis]] = field(default_factory=dict)

    @cached_property
    def _is_stock(self) -> bool:
        """Whether the result has to be a stock model: it is asked for, and the checkpoint is one."""
        return self.options.uniform and stock_support(self.checkpoint, self.checkpoint.structure).is_stock

    @property
    def _by_layer(self) -> bool:
        return self.options.memory is not None

    def find(self) -> dict[str, Lever]:
        """The levers that the model has, or that `only` names.

        Raises:
            UsageError: there is none.
            PruneError: one that `only` names cannot be used.
        """
        found: dict[str, Lever] = {}
        for name in KINDS:
            if name not in (self.options.only or DEFAULT):
                continue
            try:
                lever: Lever = getattr(self, f"_{name}")()
                if len(lever.shares) < 2:
                    raise UsageError(
                        f"no smaller number of {name} is the same in every layer and can be stated in config.json"
                    )
                selection = lever.select(lever.shares[-1 if name == "tokens" else 1], "random")
                support = stock_support(self.checkpoint, cut(self.checkpoint, selection).structure)
                if self._is_stock and not support.is_stock:
                    raise UsageError(f"{support.reason}.", "Allow such results with `uniform=False`.")
                found[name] = lever
            except PruneError as error:
                if self.options.only:
                    raise
                self.say(f"Not removed: {name} ({error.message.removeprefix(f'{self.checkpoint.path}: ')})")
        if not found:
            raise UsageError("The model has nothing that shrink can remove.", "See prunecli inspect.")
        self._scored = {
            kind_of(name): lever.axes
            for name, lever in found.items()
            if not {GRADIENT, NORMS}.isdisjoint(lever.metrics)
        }
        return found

    def _layers(self) -> Lever:
        axes = axes_of(self.checkpoint, "layer")
        count = held_in(axes)
        other = "embedding" if self.data.task == "embedding" else "cosine"
        return Lever(
            axes,
            _shares(count, range(len(axes), count)),
            (GRADIENT,) if self._by_layer else (GRADIENT, other),
            lambda share, metric: plan_layers(
                self.checkpoint, LayerOptions(ratio=share, **self._ranked("layers", metric))
            ),
        )

    def _heads(self) -> Lever:
        axes = axes_of(self.checkpoint, "head")
        held = max(axis.count for axis in axes)
        return Lever(
            axes,
            _shares(held, uniform_heads(self.checkpoint) if self._is_stock else range(1, held)),
            (GRADIENT,),
            lambda share, metric: plan_heads(
                self.checkpoint,
                HeadOptions(ratio=share, uniform=self._is_stock, **self._ranked("heads", metric)),
            ),
        )

    def _units(self) -> Lever:
        axes = self._unit_axes()
        if not axes:
            raise UsageError("The model has no FFN that could get narrower.")
        width, of_experts = min(axis.count for axis in axes), bool(axes[0].keys)
        steps = min(STEPS, width // gcd(width, GROUPED) if of_experts else width)
        return Lever(
            axes,
            _shares(steps, range(1, steps)),
            (GRADIENT,) if self._by_layer and of_experts else (GRADIENT, "activation-norm"),
            lambda share, metric: plan_widths(
                self.checkpoint,
                NarrowOptions(
                    ratio=share,
                    experts=of_experts,
                    dense_only=not of_experts,
                    uniform=self.options.uniform or of_experts or metric == "random",
                    **self._ranked("units", metric),
                ),
            ),
        )

    def _unit_axes(self) -> tuple[Axis, ...]:
        """Hidden units of the experts, or of dense FFNs if the experts have none that can go."""
        every = axes_of(self.checkpoint, "unit")
        return tuple(axis for axis in every if axis.keys) or every

    def _experts(self) -> Lever:
        self.checkpoint.require_mixtures()
        axes = axes_of(self.checkpoint, "expert")
        layers = layers_of(self.checkpoint, ExpertOptions())
        held = min(axis.count for axis in axes)
        # A stock model has the same number of experts on both sides.
        balance = None if of_language_model(self.checkpoint) else Fraction(1)

        def select(share: float, metric: str) -> Selection:
            if metric == GRADIENT:
                options = ExpertOptions(ratio=share, balance=balance)
                budget = request_of(self.checkpoint, options, layers)
                arguments = {"ratio": share, "metric": metric}
                return plan(
                    self.checkpoint, options, axes, budget, self._ranking("experts", axes, metric), arguments
                )
            how = {"gates": self._scores("experts", metric)} if metric == GATES else {"metric": metric}
            return plan_experts(self.checkpoint, ExpertOptions(ratio=share, balance=balance, **how))

        least = request_of(self.checkpoint, ExpertOptions(balance=balance), layers).least
        metrics = (GATES,) if self._by_layer else (GRADIENT, GATES)
        return Lever(axes, _shares(held, range(least, held)), metrics, select)

    def _channels(self) -> Lever:
        if self._by_layer:
            raise UsageError("With `memory`, channels are not scored.")
        axes = axes_of(self.checkpoint, "channel")
        held = axes[0].count
        # Some classes refuse a size that the heads do not divide.
        heads = head_counts(self.checkpoint.config).values()
        step = lcm(1 << max((held // STEPS).bit_length() - 1, 0), *filter(None, heads))
        return Lever(
            axes,
            _shares(held, range(step, held, step)),
            (NORMS,),
            lambda share, metric: plan(
                self.checkpoint,
                ChannelOptions(ratio=share),
                axes,
                Budget(ratio=share, multiple=step),
                self._ranking("channels", axes, metric),
                {"only": "channels", "share removed": share, "ranked by": metric},
            ),
        )

    def _ranking(self, name: str, axes: Sequence[Axis], metric: str) -> Ranking:
        """The units of a lever by their scores, or at random."""
        if metric == "random":
            return drawn(axes, 0)
        scores = self._scores(name, metric)
        return Ranking(scores.picked(axes), metric, origin=scores.origin)

    def _tokens(self) -> Lever:
        axes = axes_of(self.checkpoint, "token")
        size = axes[0].count

        @cache
        def trimmed(min_count: int, kept: int) -> Selection:
            options = VocabularyOptions(min_count=min_count, multiple_of=kept)
            return plan_vocabulary(self.checkpoint, self.lines, options, self.progress)

        # More than the tokens of the text are kept by filling up with the lowest ids, which tokenizers learn first.
        fewest = {count: len(trimmed(count, 1).kept[axes[0].name]) for count in COUNTS}
        sizes = [size - (size - fewest[1]) * step // TOKEN_STEPS for step in range(1, TOKEN_STEPS)]
        ways = [*((1, kept, kept) for kept in sizes), *((count, 1, kept) for count, kept in fewest.items())]
        made = {1 - kept / size: (count, multiple) for count, multiple, kept in ways if kept < size}
        return Lever(
            axes,
            (0.0, *sorted(made)),
            ("count",),
            lambda share, _metric: trimmed(*made[share]),
        )

    def _ranked(self, name: str, metric: str) -> dict[str, Any]:
        """Options that say what units are ranked by."""
        return {"metric": metric} if metric == "random" else {"scores": self._scores(name, metric)}

    def _scores(self, name: str, metric: str) -> Any:
        """The scores of the units of a lever, measured once, or by the run that this one resumes."""
        key = f"scores {name} {metric}"
        if key not in self.store.records:
            if metric in (GRADIENT, NORMS):  # of all levers in one pass
                scored = measure_gradients(
                    self.checkpoint, self.data, self._scored, self.options, self.progress
                )
                found = {f"scores {part}s {own.method}": own for part, own in scored.items()}
            else:
                found = {key: self._measure(metric)}
            for label, scores in found.items():
                self.store.put(label, scores.to_json())
        kind = GateStatistics if metric == GATES else Scores
        return kind.from_json(self.store.records[key], Path(key))

    def _measure(self, metric: str) -> Any:
        """Scores by a method of the single commands."""
        run = TextRun(TextChoice(), self.options, None, self.progress, self.say)
        if metric == "activation-norm":
            experts = tuple(axis for axis in self._unit_axes() if axis.keys)
            return measure_activations(self.checkpoint, self.data, run, metric, experts)
        if metric != GATES:
            return measure_layers(self.checkpoint, self.data, run, metric)  # type: ignore[arg-type]
        text = self.data.text
        return collect_gates(
            self.checkpoint,
            Translation(text, self.data.pairs)
            if isinstance(text, ParallelText)
            else [Corpus("text", text.files, text.texts, isinstance(text, PlainText) and text.whole_files)],
            CollectOptions(context=self.data.context),
            device=self.options.device,
            memory=self.options.memory,
            spill_directory=self.options.spill_directory,
            progress=self.progress,
        ).statistics


def _shares(held: int, kept: Sequence[int]) -> tuple[float, ...]:
    """Fractions that leave these numbers of `held` units, rounded down such that a ratio removes no unit more."""
    return (0.0, *sorted(floor((1 - number / held) * 1e4) / 1e4 for number in kept if number < held))


def named(selection: Selection, target: str) -> Selection:
    """The selection with an argument in its history entry that names `shrink` and its target."""
    arguments = {**selection.step["arguments"], "by shrink": target}
    return replace(selection, step={**selection.step, "arguments": arguments})


def parts(data: Dataset) -> tuple[Dataset, Dataset, Dataset]:
    """The text in its three parts, in its order.

    Raises:
        DataError: a part would be empty.
    """
    first, second, third = (replace(data, text=part_of(data.text, *ends)) for ends in pairwise(ENDS))
    if not all(map(characters_of, (first, second, third))):
        raise DataError("The text is too short to be divided.", "Give at least five lines of text.")
    return first, second, third


def windowed(data: Dataset, config: Mapping[str, Any]) -> Dataset:
    """The text of a language model in windows of `CONTEXT` tokens, or of its positions, if none are asked for."""
    if data.task != "lm" or data.context is not None:
        return data
    positions = stated_count(
        text_config(config), "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"
    )
    return replace(data, context=min(CONTEXT, positions or CONTEXT))
