"""Options of `prune-experts`, and what depends on the kind of model: translation, or language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from prunecli.architectures.classes import SEQ2SEQ
from prunecli.choices import Choices, paths
from prunecli.errors import UsageError
from prunecli.methods.experts.budget import MIN_PER_LAYER, default_balance, least_experts
from prunecli.methods.experts.metrics import WITHOUT_STATISTICS
from prunecli.methods.experts.names import MIN_TOKENS, Granularity, MetricName, Predicting, Strategy
from prunecli.model.mixtures import predicting_tensors
from prunecli.model.sparse_layer import SparseLayer
from prunecli.results.gates import GateStatistics
from prunecli.selection.select import Budget

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

DEFAULT_RATIO = 0.8
"""Of translation models: the published choice."""
DEFAULT_TEXT_RATIO = 0.25
"""Of language models: the most that costs their tasks little (2510.13999, Table 2)."""
SCOPES: Mapping[Strategy, Literal["axis", "side", "model"]] = {
    "per-layer": "axis",
    "side-threshold": "side",
    "global-threshold": "model",
}
"""Strategy -> `Budget.scope`."""


@dataclass(frozen=True)
class Amount:
    """How many experts go; at most one is given, none means DEFAULT_RATIO or DEFAULT_TEXT_RATIO.

    Attributes:
        ratio: fraction of the experts that the checkpoint holds to remove.
        fit: bytes of memory that the result must fit in.
        per_layer: side -> experts to keep in each of its layers.
        count: experts to remove, in all layers together.
    """

    ratio: float | None = None
    fit: int | None = None
    per_layer: Mapping[str, int] | None = None
    count: int | None = None


@dataclass(frozen=True)
class ExpertOptions(Choices):
    """Options of `prune-experts`.

    Attributes:
        gates: statistics, or one file of them or several, merged; not looked at for the metrics `random` and `aimer`.
        keep: a file of expert ids, instead of statistics and amount.
        amount: how many experts go.
        metric: a name of METRICS, `aimer` or `random`; None: `importance`, or `reap` of language models.
        strategy: the algorithm of 4.3.
        balance: encoder experts per decoder expert; None: by the experts of a layer (`default_balance`).
        least: experts to keep in each layer; None: the router's top-k, or 4 under a threshold.
        granularity: None: by language where a source or target is given, else global.
        sources: languages to translate from.
        targets: languages to translate into.
        texts: of language models, whose statistics count; none: all.
        min_tokens: of language models, how many an expert must have seen to be judged by; of those that saw fewer a
            warning tells.
        multiple_of: experts that a layer keeps are a multiple of it.
        mtp: what becomes of layers that predict further tokens: their experts are pruned too, or the layers dropped.
        active: experts that the router picks for a token from now on; None: as many as before.
        constant: whether experts that go leave their mean output behind; see `rewrite_constant`.
        dtype: type of the result; None: as stored. `fit` reckons with it.
        seed: of the metric `random`.
        load: `batch`, `beam` and `length` that `fit` reckons with.
    """

    COMMAND: ClassVar[str] = "prune-experts"
    UNITS: ClassVar[str] = "experts"
    DEFAULT_RATIO: ClassVar[float] = DEFAULT_TEXT_RATIO
    has_amount = True  # the default depends on the model, see `default_ratio`

    gates: GateStatistics | Path | str | Sequence[Path | str] = "gates.json"
    keep: Path | str | None = None
    amount: Amount = field(default_factory=Amount)
    metric: MetricName | None = None
    strategy: Strategy = "per-layer"
    balance: Fraction | None = None
    least: int | None = None
    granularity: Granularity | None = None
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    min_tokens: int = MIN_TOKENS
    multiple_of: int = 1
    mtp: Predicting = "prune"
    active: int | None = None
    constant: bool = False
    dtype: str | None = None
    seed: int = 0
    load: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of statistics; none where they are given themselves."""
        return () if isinstance(self.gates, GateStatistics) else paths(self.gates)


def of_language_model(checkpoint: Checkpoint) -> bool:
    """Whether its statistics are of texts, not of pairs of languages: of every family but those that translate."""
    return checkpoint.architecture is None or checkpoint.architecture.auto_class != SEQ2SEQ


def default_ratio(checkpoint: Checkpoint) -> float:
    """Fraction of the experts that goes where no amount is given."""
    return DEFAULT_TEXT_RATIO if of_language_model(checkpoint) else DEFAULT_RATIO


def layers_of(checkpoint: Checkpoint, options: ExpertOptions) -> tuple[SparseLayer, ...]:
    """The layers that experts are chosen in, with the experts per token of the result.

    Raises:
        UsageError: the model has no layers that `--mtp drop` removes, or `--active` is more than now.
    """
    layers = checkpoint.require_mixtures()
    if options.mtp == "drop":
        layers = tuple(layer for layer in layers if not layer.is_predicting)
        if not predicting_tensors(checkpoint, checkpoint.resolved.sizes):
            raise UsageError(
                f"{checkpoint.path} has no layers that predict further tokens.", "Leave --mtp drop out."
            )
    if options.active is None:
        return layers
    mixture, top_k = checkpoint.resolved.family.mixture, layers[0].top_k
    if mixture is None or isinstance(mixture.top_k, int):
        raise UsageError(
            f"--active {options.active}: a router of type {checkpoint.model_type} always picks {top_k}.",
            "Leave --active out.",
        )
    if not 1 <= options.active <= top_k:
        raise UsageError(
            f"--active {options.active}: the router picks {top_k} experts for each token.",
            f"Give a number from 1 to {top_k}.",
        )
    return tuple(replace(layer, top_k=options.active) for layer in layers)


def request_of(checkpoint: Checkpoint, options: ExpertOptions, layers: Sequence[SparseLayer]) -> Budget:
    """The budget of the options; with `fit`, its ratio is the default one.

    Args:
        layers: see `layers_of`.

    Raises:
        UsageError: several amounts, or a minimum that leaves the router too few experts.
    """
    amount, per_layer = options.amount, options.strategy == "per-layer"
    if sum(each is not None for each in vars(amount).values()) > 1:
        raise UsageError(
            "Give one of --ratio, --count, --fit, --experts-per-layer.", "Each says how many experts stay."
        )
    needed = max(least_experts(layer.top_k, layer.groups) for layer in layers)
    minimum = options.least
    if minimum is None:
        minimum = needed if per_layer else max(needed, MIN_PER_LAYER)
    if minimum < needed:
        raise UsageError(f"--min {minimum}: the router picks {needed} experts for each token.")
    balance = options.balance
    if balance is None and not of_language_model(checkpoint):
        balance = default_balance(layer.original_experts for layer in layers)
    groups = layers[0].groups.count
    return Budget(
        default_ratio(checkpoint) if amount.ratio is None and amount.count is None else amount.ratio,
        amount.count,
        amount.per_layer,
        SCOPES[options.strategy],
        balance or Fraction(1),
        minimum,
        lcm(groups, options.multiple_of),
        groups=groups,
    )


def check_kind(options: ExpertOptions, is_text: bool) -> None:
    """Refuse what only the other kind of model takes.

    Raises:
        UsageError: with what this kind takes instead.
    """
    if options.multiple_of > 1 and options.strategy != "per-layer":
        raise UsageError(
            f"--multiple-of {options.multiple_of} rounds the number of each layer; --strategy {options.strategy} gives "
            "none.",
            "Use --strategy per-layer.",
        )
    chosen = options.texts or options.sources or options.targets or options.granularity
    if chosen and options.metric in WITHOUT_STATISTICS and not options.constant:
        raise UsageError(
            f"--for, --source, --target and --granularity choose statistics; --metric {options.metric} reads none.",
            "Leave one of them out.",
        )
    if options.constant and not is_text:
        raise UsageError("--constant-experts is of language models; this one translates.", "Leave it out.")
    if not is_text:
        if options.texts:
            raise UsageError(
                "--for names texts of language models; statistics of translation are by pairs of languages.",
                "Name languages with --source and --target.",
            )
        return
    if options.sources or options.targets or options.granularity or options.balance:
        raise UsageError(
            "--source, --target, --granularity and --balance are of translation; this is a language model.",
            "Name the texts whose statistics count with --for.",
        )
    if options.strategy == "side-threshold":
        raise UsageError(
            "--strategy side-threshold is of encoders and decoders; this is a language model.",
            "Use --strategy global-threshold.",
        )
    if options.texts and options.keep is not None and not options.constant:
        raise UsageError("--for chooses statistics; --keep takes none.", "Leave one of them out.")
    counts = options.amount.per_layer
    if counts is not None and len(set(counts.values())) > 1:
        raise UsageError(
            "--experts-per-layer E,D is of encoders and decoders; this is a language model.",
            "Give one number.",
        )
