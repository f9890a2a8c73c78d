"""What the rewriting commands print with `--json`: a class each. prune-experts and prune-heads read theirs again."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from prunecli.errors import StatisticsError
from prunecli.results.decisions import DecisionRecord, decision_rows
from prunecli.results.document import Count, Document, Number, Record
from prunecli.results.tabled import Row, Tables, scalars

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

Figure = int | float
"""Kept as it is written: 1 stays 1."""
BEFORE, AFTER = "_before", "_after"
SIZES = ("parameters_before", "parameters_after", "bytes_before", "bytes_after")


class QualityChange(Record):
    """What a reduction costs on a little text.

    Attributes:
        text: files, or the split, that were read.
        text_of_scores: whether the scores come from the same text.
        measure: `loss`, the mean cross-entropy of the original's tokens in nats; `cosine`, the mean cosine of the
            texts' vectors to the original's; `same_class`, the share of texts of the same class as before.
        count: tokens of `loss`, else texts.
        before: loss of the original.
        after: of the result; None: a loss that is not finite.
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
        LAST: fields that are written after the sizes, which all have.
        left_out: files of the source that the result lacks.
        output: where it lies; None: nowhere, this was a dry run.
        stock: whether plain transformers opens it, and why not.
        arguments: those of the step that the result's config.json holds in "history".
        quality: what the reduction costs on a little text; None: not measured.
        decision: by what was chosen what stays, each component with its rank and margin; None: nothing was chosen.
    """

    LAST: ClassVar[tuple[str, ...]] = ()

    left_out: list[str] = Field(default_factory=list)
    output: str | None = None
    stock: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    parameters_before: Count | None = None
    parameters_after: Count | None = None
    bytes_before: Count | None = None
    bytes_after: Count | None = None
    quality: QualityChange | None = None
    decision: DecisionRecord | None = None

    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        names = (*SIZES, "quality", *self.LAST, "decision", *(self.model_extra or {}))
        last = {name: fields.pop(name) for name in names if name in fields}
        return {**fields, **last}

    def _tables(self) -> Tables:
        """`sizes`: a row for each figure that is given before and after; the format's own; `decision`: components."""
        fields = self.to_json()
        stems = [name.removesuffix(BEFORE) for name in fields if name.endswith(BEFORE)]
        sizes = [
            {"quantity": stem, "before": fields[stem + BEFORE], "after": fields[stem + AFTER]}
            for stem in stems
        ]
        decided = [] if self.decision is None else decision_rows(self.decision)
        return {"sizes": sizes, **self._own_tables(), "decision": decided}

    @abstractmethod
    def _own_tables(self) -> Tables:
        """The tables of this format alone."""


class ExpertFit(Record):
    """The smallest ratio that fits in the memory of --fit, and what fills it."""

    budget_bytes: Count
    margin_bytes: Count
    dense_bytes: Count
    expert_bytes: Count
    cache_bytes: Count
    activation_bytes: Count
    batch: Count
    beam: Count
    length: Count
    ratio: Figure
    keep: Count
    held: Count


class ExpertSelection(Rewriting):
    """What `prune-experts --json` prints.

    Attributes:
        thresholds: theta of 2212.09811, eq. 5, under `"model"`, or of each side; empty for per-layer.
        statistics_of: fingerprint of the model that was run, where the checkpoint is a quantised copy of that.
        few_tokens: sparse layer -> original ids of the experts that saw fewer tokens than the argument `min_tokens`.
        kept: sparse layer -> original ids of the experts that stay.
    """

    FORMAT: ClassVar[str] = "prunecli.experts/1"
    LAST: ClassVar[tuple[str, ...]] = ("thresholds", "fit", "few_tokens", "kept")

    experts_before: Count | None = None
    experts_after: Count | None = None
    statistics_of: str | None = None
    thresholds: dict[str, Figure] = Field(default_factory=dict)
    fit: ExpertFit | None = None
    few_tokens: dict[str, list[int]] = Field(default_factory=dict)
    kept: dict[str, list[int]]

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> Self:
        kept = payload.get("kept")
        if payload["format"] != cls.FORMAT or not isinstance(kept, dict):
            raise StatisticsError(
                f"{path}: format is {payload['format']!r}, not {cls.FORMAT!r}.",
                "Statistics go with --gates, selections with --experts.",
            )
        _require_ids(kept, path, "expert")
        return super().from_json(payload, path)

    def _own_tables(self) -> Tables:
        """`kept`: an expert; `few_tokens`: an expert; `thresholds`; `fit`."""
        return {
            "few_tokens": _ids("name", "expert", self.few_tokens),
            "kept": _ids("name", "expert", self.kept),
            "thresholds": [{"side": side, "threshold": theta} for side, theta in self.thresholds.items()],
            "fit": [] if self.fit is None else [self.fit.to_json()],
        }


class HeadSelection(Rewriting):
    """What `prune-heads --json` prints.

    Attributes:
        kept: attention -> original ids of the heads that stay.
    """

    FORMAT: ClassVar[str] = "prunecli.head-selection/1"
    LAST: ClassVar[tuple[str, ...]] = ("kept",)

    heads_before: Count | None = None
    heads_after: Count | None = None
    kept: dict[str, list[int]]

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> Self:
        kept = payload.get("kept")
        if not isinstance(kept, dict):
            raise StatisticsError(f'{path}: holds no heads under "kept".', "Print the selection again.")
        _require_ids(kept, path, "head")
        return super().from_json(payload, path)

    def _own_tables(self) -> Tables:
        """`kept`: a head."""
        return {"kept": _ids("attention", "head", self.kept)}


def _require_ids(kept: Mapping[str, Any], path: Path, part: str) -> None:
    for name, ids in kept.items():
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise StatisticsError(
                f"{path}: {name!r} is not a list of {part} ids.", "Print the selection again."
            )


def _ids(place: str, part: str, kept: Mapping[str, Sequence[int]]) -> list[Row]:
    return [{place: name, part: number} for name, ids in kept.items() for number in ids]


class RankedLayer(Record):
    """A layer of the source; `score` where its side was ranked."""

    name: str
    side: str
    layer: Count
    original_layer: Count
    score: Figure | None = None
    kept: bool


class LayerSelection(Rewriting):
    """What `prune-layers --json` prints.

    Attributes:
        kept: side -> numbers of the layers that stay.
    """

    FORMAT: ClassVar[str] = "prunecli.layer-plan/1"
    LAST: ClassVar[tuple[str, ...]] = ("kept", "layers")

    layers_before: Count
    layers_after: Count
    kept: dict[str, list[Count]]
    layers: list[RankedLayer]

    def _own_tables(self) -> Tables:
        """`layers`: a layer of the source."""
        return {"layers": [layer.to_json() for layer in self.layers]}


class Quality(Record):
    """How near the rows come to those of the original table."""

    explained_variance: Figure
    mean_cosine: Figure | None = None


class UnitFit(Quality):
    """The input's unit, beside the best projective embedding of the same width.

    Attributes:
        errors: of each pass over the table.
    """

    unit_parameters: Count
    table_parameters: Count
    projective: Quality
    errors: list[Figure]


class Factorization(Rewriting):
    """What `factorize-embeddings --json` prints.

    Attributes:
        embedding: as under "embedding" in the result's config.json.
        input: the fit of the input's unit; None: none was fitted, as of a dry run.
        output_layer: likewise of the output layer's table.
    """

    FORMAT: ClassVar[str] = "prunecli.embedding/1"
    LAST: ClassVar[tuple[str, ...]] = ("input", "output_layer")

    embedding: dict[str, Any]
    embedding_parameters_before: Count
    embedding_parameters_after: Count
    input: UnitFit | None = None
    output_layer: Quality | None = None

    def _own_tables(self) -> Tables:
        """`quality`: the unit, the projective embedding beside it, the output layer."""
        rows: list[Row] = []
        if self.input is not None:
            rows.append({"table": "input", **scalars(self.input.to_json())})
            rows.append({"table": "input, projective", **self.input.projective.to_json()})
        if self.output_layer is not None:
            rows.append({"table": "output", **self.output_layer.to_json()})
        return {"quality": rows}


class ReadText(Record):
    """The text that says which tokens stay, and how it falls into tokens before and after."""

    sentences: Count
    sha256: str
    share_kept: Figure
    compared_sentences: Count
    compared_changed: Count
    compared_running_before: Count
    compared_running_after: Count


class VocabularySelection(Rewriting):
    """What `trim-vocabulary --json` prints.

    Attributes:
        parts: why tokens stay -> how many.
        kept: the old ids in the order of the new ones.
    """

    FORMAT: ClassVar[str] = "prunecli.vocabulary/1"
    LAST: ClassVar[tuple[str, ...]] = ("kept",)

    tokens_before: Count
    tokens_after: Count
    parts: dict[str, Count]
    text: ReadText
    embedding_parameters_before: Count
    embedding_parameters_after: Count
    embedding_bytes_before: Count
    embedding_bytes_after: Count
    kept: list[Count]

    def _own_tables(self) -> Tables:
        """`parts`: why tokens stay; `text`; `kept`: a token."""
        return {
            "parts": [{"part": part, "tokens": tokens} for part, tokens in self.parts.items()],
            "text": [self.text.to_json()],
            "kept": [{"id": number, "original_id": original} for number, original in enumerate(self.kept)],
        }
