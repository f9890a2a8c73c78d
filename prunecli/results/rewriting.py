"""The JSON that the rewriting commands print with `--json`; of `shrink` also what was tried, and what it costs."""

from typing import Literal

from pydantic import Field

from prunecli.results.decisions import Written
from prunecli.results.document import Count, Document, Json, Number, Record, Shown, Tables, maybe, scalars

Figure = int | float
"""Kept as it is written: 1 stays 1."""


class QualityChange(Record):
    """Cost of a reduction on a little text.

    Attributes:
        text: files, or the split, that were read.
        text_of_scores: whether the scores come from the same text.
        measure: `loss`, the mean cross-entropy of the original's tokens in nats; `cosine`, the mean cosine of the
            texts' vectors to the original's; `same_class`, the share of texts of the same class as before.
        count: tokens of `loss`, else texts.
        before: loss of the original model.
        after: measure of the result. None if the loss is not finite.
        ruined: whether the result is of no use without training.
    """

    text: list[str]
    text_of_scores: bool
    measure: Literal["loss", "cosine", "same_class"]
    count: Count
    before: Number | None = None
    after: Number | None
    ruined: bool


class Rewriting(Document):
    """The result of a rewriting command, or what it would be.

    Attributes:
        left_out: files of the source that the result lacks.
        output: directory of the result. None for a dry run.
        stock: whether plain transformers opens it, and why not.
        arguments: arguments of the step in "history" of the result's config.json.
        quality: cost of the reduction on a little text, if measured.
        decision: the values that units were chosen by, with ranks and margins, if units were chosen.
    """

    left_out: list[str] = []
    output: str | None = None
    stock: Json = {}
    arguments: Json = {}
    parameters_before: Count | None = None
    parameters_after: Count | None = None
    bytes_before: Count | None = None
    bytes_after: Count | None = None
    quality: QualityChange | None = None
    decision: Written | None = None


class Selected(Rewriting):
    """The JSON that the pruning commands print with `--json`.

    Attributes:
        held: name of an axis ("decoder.layers", "model.layers.0.self_attn.heads") -> how many units it had.
        kept: the same -> ids of the units that stay, those of the original model; of hidden units and tokens those of
            the source.
        details: what a method says besides. Of experts: `thresholds` (theta of 2212.09811, eq. 5, under `"model"` or of
            each side), `fit` (the smallest ratio that fits in the memory of `--fit`, and what fills it), `few_tokens`
            (layer -> experts that received few tokens), `statistics_of` (fingerprint of the model that was run, where
            the source is a quantised copy of that). Of tokens: `parts` (why tokens stay ->
            how many), `text`, and how it falls into tokens before and after.
    """

    FORMAT = "prunecli.selection/1"

    held: dict[str, Count]
    kept: dict[str, list[Count]]
    details: Json = {}


class TableQuality(Record):
    """How near rows o come to the rows e of the original table: weighted means over the rows.

    Attributes:
        explained_variance: 1 - sum of w |e - o|^2 over sum of w |e - mean|^2; 1 is perfect.
        mean_cosine: of e and o; a row of zeros has the cosine 0. None: not measured.
        error: 1 - explained_variance + `COSINE_WEIGHT` (1 - mean_cosine), which the fit minimises.
    """

    explained_variance: Figure
    mean_cosine: Figure | None = None
    error: float = Field(default=0.0, exclude=True)


class UnitFit(TableQuality):
    """The input's unit, beside the best projective embedding of the same width.

    Attributes:
        errors: error of each pass over the table.
    """

    unit_parameters: Count
    table_parameters: Count
    projective: TableQuality
    errors: list[Figure]


class Factorization(Rewriting):
    """The JSON that `factorize-embeddings --json` prints.

    Attributes:
        embedding: the value of "embedding" in the result's config.json.
        input: the fit of the input's unit; None: none was fitted, as of a dry run.
        output_layer: likewise of the output layer's table.
    """

    FORMAT = "prunecli.embedding/1"

    embedding: Json
    embedding_parameters_before: Count
    embedding_parameters_after: Count
    input: UnitFit | None = None
    output_layer: TableQuality | None = None


class SharedGroup(Record):
    """Layers that run one FFN or attention, which is stored under the owner's name.

    Attributes:
        sources: names of the FFNs or attentions that were merged.
        init: way of merging: mean, first, last, concat; keep: unchanged.
        heads: original ids of the heads of an attention.
        width: number of hidden units of an FFN.
        scale: factor of the output of an FFN.
    """

    owner: str
    members: list[str]
    sources: list[str]
    init: str
    heads: list[int] | None = None
    width: Count | None = None
    scale: Figure | None = None
    parameters: Count


class Sharing(Rewriting):
    """The JSON that both sharing commands print.

    Attributes:
        removed: layers without an FFN; attentions that are gone.
    """

    groups: list[SharedGroup]
    removed: list[str] = []


class FfnSharing(Sharing):
    """The JSON that `share-ffn --json` prints.

    Attributes:
        sparse: layers with experts, which stay as they are.
    """

    FORMAT = "prunecli.ffn-plan/1"

    sparse: list[str] = []


class AttentionSharing(Sharing):
    """The JSON that `share-attention --json` prints."""

    FORMAT = "prunecli.attention-plan/1"


class LoggedStep(Record):
    """A line of a training's log."""

    step: Count
    loss: Number
    chrf: Number | None = Field(default=None, alias="chrf++")
    cosine: Number | None = None


class Training(Rewriting):
    """OUTPUT.finetune.json.

    Attributes:
        warmup: updates in which the learning rate rose.
        best: the step that is the result, where a validation chose it.
    """

    FORMAT = "prunecli.finetune/1"

    steps: Count
    warmup: Count | None = None
    epochs: Number | None = None
    metric: str | None = None
    best: Json | None = None
    tokens: Count = 0
    seconds: Number = 0.0
    tokens_per_second: Number = 0.0
    parameters: Count | None = None
    training: list[LoggedStep] = []
    validation: list[LoggedStep] = []


class Quality(Record):
    """Quality of a model on one text.

    Attributes:
        cost: what is compared, less is better: the loss, or 1 - cosine. None: the model's outputs are not finite.
        loss: sum of the losses over the number of the original's tokens, in nats.
        divergence: mean KL divergence from the original's next-token distributions, for language models with the
            original's vocabulary.
        cosine: mean cosine of the texts' vectors to the original's.
    """

    cost: Number | None
    loss: Number | None = None
    divergence: Number | None = None
    cosine: Number | None = None


class Tried(Record):
    """A mixture that was tried.

    Attributes:
        shares: kind of units -> fraction of its units that was removed.
        metrics: kind of units -> metric that they were ranked by.
        stage: "curve" for a single kind, "whole" for a mixture that reaches the target.
        parameters, bytes: of the result.
        speedup: how many times faster than the original it is; of trials only if the target is a speed.
        quality: on the text that the mixture is chosen by.
    """

    shares: dict[str, Number]
    metrics: dict[str, str] = {}
    stage: str
    parameters: Count
    bytes: Count
    speedup: Number | None = None
    quality: Quality


class Stage(Record):
    """A row of the closing table.

    Attributes:
        model: "original", "cut" or "healed".
        parameters, bytes: of the model.
        speedup: as in `Tried`.
        quality: on text that nothing was chosen by.
    """

    model: str
    parameters: Count
    bytes: Count
    speedup: Number | None = None
    quality: Quality


class Shrunk(Rewriting):
    """The JSON that `prunecli shrink --json` prints, and that is written beside the result.

    Attributes:
        target: the target, as the command line spells it.
        shares: kind of units -> fraction of its units that was removed.
        tried: everything that was tried, in its order.
        stages: the original, the cut model, and the healed one if the result was trained.
    """

    FORMAT = "prunecli.shrinking/1"

    target: str
    shares: dict[str, Number]
    tried: list[Tried]
    stages: list[Stage] = []

    @property
    def shown(self) -> list[Shown]:
        """The original, the cut and the healed model."""
        columns = {
            "model": "{model}",
            "parameters": "{parameters:,}",
            "bytes": "{bytes!b}",
            "speed": "{speedup:.2f}x",
            "loss": "{loss}",
            "cosine to the original": "{cosine:.4f}",
        }
        rows = [
            {
                **vars(one),
                **vars(one.quality),
                "loss": "not finite" if one.quality.cost is None else maybe("{:.4f}", one.quality.loss),
            }
            for one in self.stages
        ]
        return [Shown.of("On text that nothing was chosen by", rows, columns)]

    def _tables(self) -> Tables:
        """`tried`: a mixture; `stages`: a row of the closing table."""
        metrics = [{f"{name}_by": by for name, by in one.metrics.items()} for one in self.tried]
        return {
            "tried": [
                {**scalars(one.to_json()), **one.quality.to_json(), **one.shares, **by}
                for one, by in zip(self.tried, metrics, strict=True)
            ],
            "stages": [{**scalars(one.to_json()), **one.quality.to_json()} for one in self.stages],
        }
