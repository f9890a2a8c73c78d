"""Options of the commands that prune: experts, heads, hidden units, layers and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from prunecli.errors import UsageError
from prunecli.options import (
    STORED_DTYPE,
    Files,
    Options,
    Share,
    Size,
    StoredDtype,
    advanced_option,
    hidden_option,
    option,
    selection_option,
)
from prunecli.tensors.quantities import exact_share

if TYPE_CHECKING:
    from prunecli.results.gates import GateStatistics
    from prunecli.results.unit_scores import Scores
else:  # in memory, which numpy would be imported for
    GateStatistics = Any
    Scores = Any

Side = Literal["encoder", "decoder"]
AttentionKind = Literal["encoder", "decoder", "cross"]
HeadMetric = Literal["importance", "random"]
"""What heads are ranked by."""
EffectMetric = Literal["chrf++", "bleu", "loss", "accuracy", "cosine"]
"""The score that changes when a head is masked."""
Normalize = Literal["per-layer", "none"]
"""How importances of heads are compared between layers."""
UnitMetric = Literal["activation", "activation-norm", "gradient", "norms", "random"]
"""What hidden units are ranked by."""
LayerMetric = Literal["cosine", "cka", "perplexity", "embedding", "random", "last"]
"""What layers are ranked by."""
ExpertMetric = Literal[
    "importance",
    "importance-vanilla",
    "top1",
    "top2",
    "load-balance",
    "reap",
    "ean",
    "frequency",
    "seer",
    "man",
    "msan",
    "weighted-ean",
    "aimer",
    "random",
]
"""What experts are ranked by: `metrics.METRICS` and `metrics.WITHOUT_STATISTICS`."""
Strategy = Literal["per-layer", "global-threshold", "side-threshold"]
"""How many experts each layer keeps."""
Granularity = Literal["language", "pair", "global"]
"""Which statistics are added up."""


def parse_balance(value: Any) -> Any:
    """`3:1` -> 3: encoder experts per decoder expert. What is no text stays as it is.

    Raises:
        UsageError: not two positive numbers.
    """
    if not isinstance(value, str):
        return value
    encoder, _, decoder = value.partition(":")
    try:
        parts = Fraction(encoder.strip()), Fraction(decoder.strip() or "1")
        if min(parts) <= 0:
            raise ValueError(value)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            "not ENCODER:DECODER",
            "Give two positive numbers: 3:1 keeps three times as many.",
        ) from error
    return parts[0] / parts[1]


def _per_layer(value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return value
    numbers = str(value).split(",") if isinstance(value, str | int) else value
    if len(numbers) not in (1, 2):
        raise UsageError("not ENCODER,DECODER", "Give two whole numbers, such as 36,12.")
    return {"encoder": numbers[0], "decoder": numbers[-1]}


Balance = Annotated[Fraction, BeforeValidator(parse_balance)]
"""A fraction: Fraction(3) or "3:1"."""


WITHOUT_TEXT = ("norms", "last", "random")
"""Metrics of units other than experts that read no text."""
AMOUNTS = ("ratio", "count", "width", "fit", "experts_per_layer", "encoder", "decoder")
"""Options that say how many units are removed."""


class PruningOptions(Options):
    """Options of every pruning command: which units are removed."""

    COMMAND: ClassVar[str]
    UNITS: ClassVar[str]
    """What messages call the units."""
    DEFAULT_RATIO: ClassVar[float] = 0.25
    FOR_OTHERS: ClassVar[str] = ""
    """Continues the default ratio in the help text."""

    ratio: Share | None = option(
        "Fraction of the {cls.UNITS} to remove, rounded up. Default: {cls.DEFAULT_RATIO:g}{cls.FOR_OTHERS}.",
        metavar="R",
        recorded=False,
        excludes="count width fit experts_per_layer encoder decoder",
    )
    count: int | None = option(
        "Number of {cls.UNITS} to remove in all, instead of --ratio.",
        ge=0,
        excludes="width fit experts_per_layer encoder decoder",
    )
    least: int | None = selection_option(
        "Number of {cls.UNITS} that each layer keeps at least.", flag="--min", ge=0
    )
    uniform: bool = selection_option(
        "Remove the same part of every layer.",
        False,
        flag="--uniform/--uneven",
    )
    dtype: StoredDtype | None = STORED_DTYPE
    seed: int = hidden_option(
        "Seed of the metric random.",
        0,
        recorded=False,
    )

    @property
    def has_amount(self) -> bool:
        """Whether any option says how many units are removed."""
        return not self.changed.isdisjoint(AMOUNTS)


class UnitOptions(PruningOptions):
    """Options of `prune-heads`, `prune-ffn` and `prune-layers`."""

    metric: Any = None
    keep: Path | str | None = selection_option(
        "Ids of the {cls.UNITS} to keep, instead of ranking them: what --dry-run --json printed.",
        role="input",
        excludes="ratio count width attention least multiple_of uniform normalize metric scores",
    )
    scores: Scores | Files | None = selection_option(
        "Scores from --save-scores instead of text; may be given again: scores of one metric add up.",
        role="input",
        excludes="metric=norms metric=last metric=random",
    )

    @property
    def is_named(self) -> bool:
        """Whether the units to keep are named, so that nothing is ranked."""
        return self.keep is not None

    @property
    def score_files(self) -> Files:
        """The files of scores; none if the scores are given."""
        return self.scores if isinstance(self.scores, tuple) else ()

    @property
    def share(self) -> float | None:
        """Fraction of the units to remove: `ratio`, or the default if no amount is given."""
        return self.ratio if self.has_amount else self.DEFAULT_RATIO

    @property
    def needs_text(self) -> bool:
        """Whether the model has to run on text."""
        return not self.is_named and self.scores is None and self.metric not in WITHOUT_TEXT


class HeadOptions(UnitOptions):
    """Options of `prune-heads`."""

    COMMAND = "prune-heads"
    UNITS = "heads"
    DEFAULT_RATIO = 0.2
    """The paper removes 20 % without a noticeable loss in both of its models (4.2)."""

    scores: Scores | Files = option(
        "Scores from score-heads, of this checkpoint or of the one that it was pruned from; may be given again: sums "
        "of the gradient method add up. Default: heads.json.",
        (Path("heads.json"),),
        role="input",
        excludes="metric=random",
    )
    attention: tuple[AttentionKind, ...] = selection_option(
        "Kinds of attention that may lose heads, with commas: encoder, decoder (self-attention), cross. --ratio counts "
        "their heads alone. Default: all.",
        ("encoder", "decoder", "cross"),
        metavar="KINDS",
    )
    metric: HeadMetric = selection_option(
        "importance: by scores; random: a baseline.",
        "importance",
    )
    normalize: Normalize | None = selection_option(
        "Divide scores by the l2 norm over their layer (per-layer), or compare them as they are (none). Default: "
        "per-layer; none for scores of score-heads --metric ablation.",
        recorded=False,
        excludes="metric=random",
    )
    least: int = selection_option("Number of heads that each layer keeps at least.", 0, flag="--min", ge=0)
    uniform: bool = selection_option(
        "Keep the same number of heads in every layer, the largest that a stock config can hold and the amount allows: "
        "plain transformers loads the result.",
        False,
        flag="--uniform/--uneven",
    )


class NarrowOptions(UnitOptions):
    """Options of `prune-ffn`."""

    COMMAND = "prune-ffn"
    UNITS = "hidden units"

    width: int | None = option(
        "Number of hidden units that every FFN keeps, instead of --ratio.", ge=1, excludes="uniform=False"
    )
    metric: UnitMetric | None = selection_option(
        "activation: root mean square on text; activation-norm: the same times the norm of the output weights; "
        "gradient: how much the loss depends on the unit; norms: of all weights, without text; random. Default: that "
        "of --scores, or activation-norm.",
        recorded=False,
    )
    side: Side | None = selection_option(
        "Only this stack gets narrower FFNs.",
    )
    least: int = selection_option(
        "Number of hidden units that each FFN keeps at least.", 1, flag="--min", ge=0
    )
    multiple_of: int | None = selection_option(
        "Round widths down to a multiple of N. Default: 1; with --experts 8 where the width is one.",
        ge=1,
    )
    uniform: bool = selection_option(
        "--uniform: remove the same fraction of every FFN. --uneven: rank the units of all FFNs together, each score "
        "divided by the l2 norm over its FFN; not a stock model. Default: --uniform.",
        True,
        flag="--uniform/--uneven",
    )
    dense_only: bool = advanced_option(
        "Leave mixtures of experts as they are, instead of an error.",
        False,
    )
    experts: bool = selection_option(
        "Narrow the experts of mixtures, all to the same width, instead of dense FFNs.",
        False,
        excludes="side dense_only uniform=False",
    )

    def check_options(self) -> None:
        """Refuse options that exclude each other.

        Raises:
            UsageError: they do, or no FFN can have this width.
        """
        if self.ratio is not None:
            exact_share(self.ratio, self.UNITS, self.DEFAULT_RATIO)
        if not self.uniform and self.metric == "random":
            raise UsageError(
                "`uniform=False`: random scores do not compare layers.", "Leave `uniform=False` out."
            )


class LayerOptions(UnitOptions):
    """Options of `prune-layers`. ShortGPT removes about the default ratio (2403.03853)."""

    COMMAND = "prune-layers"
    UNITS = "layers"
    LEFT_OUT = ("least", "uniform")

    encoder: int | None = option("Number of layers to remove from the encoder.", ge=0)
    decoder: int | None = option("Number of layers to remove from the decoder.", ge=0)
    remove: str | None = option(
        "Layers to remove, by number from 0: 3,7-9; with two stacks encoder:3,decoder:1-2.",
        metavar="LIST",
        recorded=False,
        excludes="keep ratio count encoder decoder metric scores contiguous side",
    )
    keep: Path | str | None = option(
        "Layers to keep, written like --remove (unnamed stacks keep all), or what --dry-run --json printed.",
        metavar="LIST",
        recorded=False,
        excludes="ratio count encoder decoder metric scores contiguous side",
    )
    metric: LayerMetric | None = selection_option(
        "cosine, cka: how little a layer's output is like its input; perplexity: how much it rises without the layer; "
        "embedding: how far the text's vector moves; last: remove the last layers; random. Default: that of --scores, "
        "or cosine; embedding for a model without a head.",
        recorded=False,
    )
    side: Side | None = selection_option(
        "Only this stack loses layers.",
        excludes="encoder decoder",
    )
    contiguous: bool = selection_option(
        "Remove layers side by side: the run whose input is most like its output (by angle).",
        False,
        excludes="metric=cka metric=perplexity metric=embedding metric=last metric=random",
    )

    @property
    def is_named(self) -> bool:
        """Whether the layers are named, so that nothing is ranked."""
        return self.remove is not None or self.keep is not None

    @property
    def by_side(self) -> dict[str, int]:
        """Side -> number of layers that it loses, for the sides that have one."""
        counts = {"encoder": self.encoder, "decoder": self.decoder}
        return {side: count for side, count in counts.items() if count is not None}


class LoadOptions(Options):
    """Options of the batch that must be decodable in the memory of `fit`."""

    fit_batch: int | None = hidden_option(
        "For --fit: sentences or texts decoded at a time. Default: 1.",
        recorded=False,
        needs="fit",
        ge=1,
    )
    fit_beam: int | None = hidden_option(
        "For --fit: beam size. Default: 4; for language models 1.",
        recorded=False,
        needs="fit",
        ge=1,
    )
    fit_length: int | None = hidden_option(
        "For --fit: tokens of a sentence. Default: 128; for language models 4,096, or all their positions.",
        recorded=False,
        needs="fit",
        ge=1,
    )

    @property
    def load(self) -> dict[str, int]:
        """The values that are given, as `batch`, `beam` and `length`."""
        names = ("batch", "beam", "length")
        return {name: value for name in names if (value := getattr(self, f"fit_{name}")) is not None}


class ExpertOptions(LoadOptions, PruningOptions):
    """Options of `prune-experts`."""

    COMMAND = "prune-experts"
    UNITS = "experts"
    DEFAULT_RATIO = 0.8
    """Of translation models: the published choice."""
    FOR_OTHERS = "; for language models 0.25"
    LEFT_OUT = ("uniform",)

    gates: GateStatistics | Files = option(
        "Gate statistics of the checkpoint, or of the one that it was pruned from; may be given again: sums add up. "
        "The authors' published files work too. Default: gates.json.",
        (Path("gates.json"),),
        role="input",
    )

    fit: Size | None = option(
        "Remove as few experts as possible so that decoding fits in this memory (30GiB) with 10% left free.",
        metavar="SIZE",
        recorded=False,
        excludes="experts_per_layer",
    )
    experts_per_layer: Annotated[dict[str, int], BeforeValidator(_per_layer)] | None = option(
        "Number of experts to keep in each encoder and decoder layer: 36,12; or one for both.",
        metavar="E,D",
        recorded=False,
    )
    keep: Path | str | None = selection_option(
        "Ids of the experts to keep, instead of statistics: the authors' experts.json, a list, or what --dry-run "
        "--json printed.",
        role="input",
        excludes="ratio count fit experts_per_layer metric strategy balance least multiple_of granularity",
    )
    metric: ExpertMetric | None = selection_option(
        "What experts are ranked by: importance, top1, top2, load-balance, importance-vanilla; for language models "
        "also reap, ean, weighted-ean, frequency, seer, man, msan; aimer: by weights alone; random: a baseline. "
        "Default: importance; for language models reap.",
        recorded=False,
    )
    sources: tuple[str, ...] = selection_option(
        "Languages to translate from.",
        (),
        flag="--source",
        metavar="A,B",
    )
    targets: tuple[str, ...] = selection_option(
        "Languages to translate into.",
        (),
        flag="--target",
        metavar="C,D",
    )
    texts: tuple[str, ...] = selection_option(
        "Language models: texts whose statistics count. Default: all.",
        (),
        flag="--for",
        metavar="A,B",
    )
    strategy: Strategy = selection_option(
        "per-layer: fixed numbers; global-threshold, side-threshold: one threshold for the model or for each side.",
        "per-layer",
        recorded=False,
    )
    balance: Balance | None = selection_option(
        "Encoder experts kept per decoder expert. Default: 3:1 if a layer has 128 experts or more, else 1:1.",
        metavar="ENC:DEC",
        recorded=False,
        hidden=True,
        needs="strategy=per-layer strategy=side-threshold",
        excludes="experts_per_layer",
    )
    least: int | None = selection_option(
        "Number of experts that each layer keeps at least. Default: the router's top-k; 4 under a threshold.",
        flag="--min",
        ge=0,
        recorded=False,
    )
    multiple_of: int = selection_option(
        "Keep a multiple of N experts in each layer, which some kernels need (4, 8).",
        1,
        ge=1,
        needs="strategy=per-layer",
    )
    granularity: Granularity | None = hidden_option(
        "Statistics to add up: language: the encoder's by source and the decoder's by target; pair: those of the "
        "pairs; global: all. Default: language with --source or --target, else global.",
        recorded=False,
    )
    mtp: Literal["prune", "drop"] = hidden_option(
        "Multi-token-prediction layers: prune their experts by weight statistics (aimer), or drop these layers.",
        "prune",
    )
    active: int | None = advanced_option(
        "Number of experts that the router picks for each token. Default: as before.",
        ge=1,
    )
    constant: bool = advanced_option(
        "Language models: replace a removed expert by its mean output (from collect-gates --mean-outputs) and keep "
        "the router.",
        False,
        flag="--constant-experts",
    )

    @property
    def files(self) -> Files:
        """The files of statistics; none if the statistics are given."""
        return self.gates if isinstance(self.gates, tuple) else ()


class VocabularyOptions(Options):
    """Options of `trim-vocabulary`.

    Attributes:
        keep: further tokens to keep, as the tokenizer writes them.
    """

    COMMAND: ClassVar[str] = "trim-vocabulary"

    min_count: int = option(
        "Number of occurrences that a token needs. Above 1, rare words become more and smaller tokens than before.",
        1,
        ge=1,
    )
    keep: tuple[str, ...] = ()
    multiple_of: int = selection_option(
        "Keep more tokens, up to a multiple of N (8, 64: fast on GPUs).", 1, ge=1
    )
    dtype: StoredDtype | None = STORED_DTYPE


class LanguageOptions(Options):
    """Options of `compare-languages`, apart from its files."""

    ratio: Share = option(
        "Fraction of the experts removed, in [0, 1), such as 0.75 or 75%.", 0.75, metavar="R"
    )
    langs: tuple[str, ...] = selection_option(
        "Languages: all pairs between them.",
        (),
        metavar="A,B,C",
    )
    texts: tuple[str, ...] = selection_option(
        "Language models: texts to compare. Default: all.",
        (),
        flag="--for",
        metavar="A,B",
    )
    metric: str | None = selection_option(
        "Metric of the experts, as in prune-experts. Default: importance; for language models reap.",
        metavar="NAME",
    )
    strategy: Strategy | None = selection_option(
        "How experts are selected: side-threshold, global-threshold, per-layer. Default: side-threshold; for texts "
        "per-layer.",
    )
    balance: Balance | None = selection_option(
        "Encoder experts per decoder expert. Default: 1:1.",
        metavar="E:D",
    )
    least: int | None = selection_option(
        "Number of experts that every layer keeps. Default: 4; for texts the router's top-k.",
        flag="--min",
        ge=1,
    )
    linkage: Literal["ward", "average", "complete", "single"] = advanced_option(
        "How clusters of languages join: ward, average, complete, single.",
        "ward",
    )
    layer_metric: str | None = advanced_option(
        "Metric of the experts per layer, such as top1 in Figure 1 of the paper. Default: that of --metric.",
        metavar="NAME",
    )
    groups: Path | None = advanced_option(
        "Also experts of each side by group of languages: a language, a tab and its group on each line, or {{language: "
        "group}} in .json.",
        role="input",
    )
    families: Path | None = advanced_option(
        "Colours of the trees in --plot and the report: a language, a tab and its family on each line, or .json.",
        role="input",
    )
