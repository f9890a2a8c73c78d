"""What `prune-experts` is asked, and what goes by the kind of model: translation, or language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.architectures.classes import SEQ2SEQ
from prunecli.choices import Choices, paths
from prunecli.errors import UsageError
from prunecli.methods.experts.metrics import MIN_TOKENS, WITHOUT_STATISTICS
from prunecli.methods.experts.names import Granularity, MetricName, Predicting, Strategy
from prunecli.results.gates import GateStatistics

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

DEFAULT_RATIO = 0.8
"""Of translation models: the published choice."""
DEFAULT_TEXT_RATIO = 0.25
"""Of language models: the most that costs their tasks little (2510.13999, Table 2)."""


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
    """What `prune-experts` is asked.

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
