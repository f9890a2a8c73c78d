"""Scores of units of any kind: additive sums with counts, read, checked and merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, model_validator

from prunecli.errors import PruneError, StatisticsError
from prunecli.model.axes import Axis, axis_name, module_of
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Floats, Origin
from prunecli.model.parts import AttentionLayer
from prunecli.results.document import (
    Blocks,
    Count,
    Json,
    Model,
    Number,
    Record,
    Row,
    Shown,
    Statistics,
    Tables,
    Total,
    first_fault,
)
from prunecli.results.evaluation import LOWER_IS_BETTER, SCORES, too_few
from prunecli.selection.select import HOLDERS
from prunecli.tensors.quantities import counted

AGAIN = "Measure the scores again."
Array = Floats
Arrays = dict[str, Array]
"""Name of an axis -> `[units]`."""
Kind = str
"""Kind of units: "head", "unit", "layer", or any other one."""
Method = Literal["gradient", "ablation", "all-but-one"]
Per = Literal["example", "token"]
Values = dict[str, list[Number]]


class Measure(NamedTuple):
    """The values of a method.

    Attributes:
        additive: whether the values are sums.
        importance: from the means of the sums, or the values, to what units are ranked by.
        signed: whether values may be negative.
    """

    additive: bool = True
    importance: Callable[[Array], Array] = np.asarray
    signed: bool = False


MEASURES = {
    **dict.fromkeys(("ablation", "all-but-one", "cka"), Measure(additive=False, signed=True)),
    **dict.fromkeys(("activation", "activation-norm"), Measure(importance=np.sqrt)),
    **dict.fromkeys(
        ("cosine", "embedding"), Measure(importance=lambda similarity: 1 - similarity, signed=True)
    ),
    "perplexity": Measure(signed=True),
}
"""Method -> what its values are; a method without an entry has sums to rank by."""
METHODS = {
    "head": ("gradient", "ablation", "all-but-one"),
    "unit": ("activation", "activation-norm", "gradient"),
    "layer": ("cosine", "cka", "perplexity", "embedding", "gradient"),
}
"""Kind of units -> its methods; none are known of another kind."""
ABOUT = {
    "gradient": "Importance by gradient (1905.10650, eq. 2)",
    "ablation": "What the score loses without the head",
    "all-but-one": "The score with this head alone in its layer",
}
"""Method of scoring heads -> in words."""
TITLES = {
    "gradient": "Importance (I_h of eq. 2{per}, not normalised)",
    "ablation": "Change of {metric} without the head",
    "all-but-one": "Change of {metric} with the head alone in its layer",
}
"""Method of scoring heads -> title of their table."""
LEVEL = 0.01
"""A difference counts as significant below this p-value (1905.10650, Tables 1 to 3)."""
EFFECTS = {"ablation": "without", "all-but-one": "only"}
"""Methods that measure a metric of the model with some heads masked -> column of the tables with this metric."""
FIELDS_OF_FIRST = {
    "heads": "ids",
    "sum": "values",
    "without": "values",
    "only": "values",
    "p_value": "p_values",
    "best": "best",
    "tokens": "counts",
}
"""Field of a heads.json of 0.2.0 -> field of today."""


def command_of(kind: Kind) -> str:
    """The command that writes the scores of a kind of units."""
    commands = {"head": "score-heads", "unit": "prune-ffn --save-scores"}
    return commands.get(kind, f"prune-{kind}s --save-scores")


class Effects(Record):
    """The score of a model, and of the model with some of its heads masked.

    Attributes:
        metric: `chrf++`, `accuracy`, `loss`, …
        base: the score with all heads.
        values, p_values: name of an axis -> `[heads]`.
    """

    metric: str
    base: Number
    values: Values
    p_values: Values = {}


class Reported(Record):
    """all-but-one: what the best head of each layer, chosen on other text, reaches (1905.10650, appendix A).

    Attributes:
        metric, examples: metric of the score, and number of examples.
        base: the score with all heads.
        only, p_value: name of an axis -> score with this head alone, p-value of the difference.
    """

    metric: str
    examples: Total
    base: Number
    only: dict[str, Number]
    p_value: dict[str, Number]


def _sizes(arrays: Mapping[str, Sequence[float]]) -> dict[str, int]:
    return {name: len(own) for name, own in arrays.items()}


def _of_axes(values: Json) -> Json:
    """Values of 0.2.0 by the names of axes; that version named modules."""
    return {axis_name(module, "head"): value for module, value in values.items()}


def _renamed(found: Json) -> Json:
    return {
        FIELDS_OF_FIRST.get(name, name): _of_axes(value) if name in FIELDS_OF_FIRST else value
        for name, value in found.items()
        if name not in ("model", "importance")
    }


def _of_heads(payload: Json) -> Json:
    """The fields of a heads.json of 0.2.0 in the present format."""
    upgraded = {
        **_renamed(payload),
        "format": Scores.FORMAT,
        "models": [{**next(iter(payload.get("models", [])), {}), **payload["model"]}],
        "kind": "head",
        "also": [{"metric": metric, **_renamed(one)} for metric, one in payload.get("also", {}).items()],
    }
    if payload["method"] not in EFFECTS:
        upgraded["per"] = payload.get("importance", "example")  # 0.1.0 has no tokens
        if upgraded["per"] == "example":
            upgraded["counts"] = dict.fromkeys(upgraded["ids"], payload["examples"])
    if one := payload.get("reported"):
        upgraded["reported"] = {**one, "only": _of_axes(one["only"]), "p_value": _of_axes(one["p_value"])}
    return upgraded


class Scores(Statistics):
    """Measurements of each unit of a model by one method.

    Attributes:
        kind: kind of the units.
        method: method that scored them.
        task: task of the text: translation, classification, mlm, lm, embedding.
        examples: number of examples that were run.
        texts: pairs, languages or files, where they were named.
        dtype: type that the model was computed in, if known.
        per: unit of `counts`: examples, tokens, or tokens that the model predicts.
        ids: name of an axis -> ids of its units, as in `Axis.ids`.
        values: name of an axis -> `[units]`. Of heads by gradient: sum of |Att_h(x)^T dL(x)/dAtt_h(x)|. Of hidden
            units: sum of the squared activations, or by gradient as of heads, of language models squared for each
            token. Of layers: sum of the cosines of the states before and after it
            (cosine), or of a text's vectors with and without it (embedding); sum of the losses without it less those
            of the whole model (perplexity); 1 - CKA (cka). Of heads by ablation: the score without the head; by
            all-but-one: the score with this head alone in its layer.
        counts: name of an axis -> divisor of its sums.
        distances: layers by cosine: name of an axis -> `[layers + 1, layers + 1]`, sums over the tokens of the
            angle between the states before two layers, divided by pi.
        metric, base, p_values, also: ablation and all-but-one: see `Effects`; `also` has other metrics of the
            same runs.
        best: all-but-one: name of an axis -> id of the best single head.
        reported: all-but-one, if heads were chosen on other text.
    """

    FORMAT = "prunecli.scores/1"
    FIRST: ClassVar[str] = "prunecli.heads/1"
    """Of 0.2.0, for heads alone."""
    UPGRADES = {FIRST: _of_heads}
    REMEDY = AGAIN
    EMPTY = (None, [], {})
    ALIKE = ("fingerprint", "model_type", "kind", "method", "task", "ids", "per")
    APART = "Merge only scores of one model, one task, one metric and one --importance of score-heads."

    models: list[Model] = Field(min_length=1)
    kind: Kind
    method: str
    task: str = ""
    examples: Total
    texts: list[str] = []
    dtype: str | None = None
    per: Literal["example", "token", "prediction"] | None = None
    ids: dict[str, list[Count]]
    values: Values
    counts: dict[str, Total] = {}
    distances: dict[str, list[list[Number]]] = {}
    metric: str | None = None
    base: Number | None = None
    p_values: Values = {}
    also: list[Effects] = []
    best: dict[str, Count] = {}
    reported: Reported | None = None

    @model_validator(mode="after")
    def _go_together(self) -> Scores:
        """The arrays have a value for each unit, and the fields of the method are there."""
        sizes, known = _sizes(self.ids), METHODS.get(self.kind, (self.method,))
        values = [number for own in self.values.values() for number in own]
        faults = {
            f"method is {self.method!r}, not one of {', '.join(known)}": self.method not in known,
            "the model has no fingerprint": self.fingerprint is None,
            f"no {self.kind}s": not any(sizes.values()),
            "metric or base is missing": self.method in EFFECTS and None in (self.metric, self.base),
            "values are not those of the units in ids": any(
                _sizes(one.values) != sizes for one in self._by_metric
            ),
            "p_values are not those of the units in ids": any(
                one.p_values and _sizes(one.p_values) != sizes for one in self._by_metric
            ),
            "counts are not those of the axes in ids": (
                self.measure.additive and self.counts.keys() != sizes.keys()
            ),
            "values are negative": not self.measure.signed and min(values, default=0) < 0,
        }
        for name, ids in self.ids.items():
            faults[f"ids of {name}: {ids} do not differ"] = len(set(ids)) != len(ids)
            if ids and self.best:
                faults[f"best of {name} is not one of its heads"] = self.best.get(name) not in ids
            if ids and (other := self.reported):
                faults[f"reported lacks {name}"] = name not in other.only or name not in other.p_value
        for name, rows in self.distances.items():
            is_square = {len(rows), *map(len, rows)} == {sizes.get(name, -1) + 1}
            faults[f"distances of {name} are not those of its layers"] = not is_square
        if found := next((fault for fault, is_there in faults.items() if is_there), None):
            raise ValueError(found)
        return self

    @property
    def about(self) -> str:
        """See `Document`."""
        per = " per token" if self.per == "token" else ""
        line = f"{ABOUT.get(self.method, self.method)}{per}; {self.task}, {counted(self.examples, 'example')}"
        if self.metric is not None and self.base is not None:
            line += f"; {self.metric}, {self.base:.4g} with all heads"
        return f"{line}."

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the checkpoint that was run."""
        return self.models[0].fingerprint

    @property
    def model_type(self) -> str:
        """Model type of the checkpoint that was run, as in config.json."""
        return str(self.models[0].model_type)

    @property
    def sign(self) -> int:
        """1 where a higher metric is better, -1 for a loss."""
        return -1 if self.metric in LOWER_IS_BETTER else 1

    @property
    def tokens(self) -> dict[str, int]:
        """Name of an axis -> tokens that went through it, where they were counted."""
        return self.counts if self.per == "token" else {}

    @property
    def origin(self) -> Origin:
        """The text, for a decision."""
        return Origin(texts=tuple(self.texts), split=self.split, sentences=self.examples)

    @property
    def _by_metric(self) -> list[Scores | Effects]:
        return [self, *self.also]

    @property
    def measure(self) -> Measure:
        """The method that scored the units."""
        return MEASURES.get(self.method, Measure())

    def means(self) -> Arrays:
        """Name of an axis -> `[units]`: the sums divided by their counts; other values as they are."""
        counts = self.counts if self.measure.additive else dict.fromkeys(self.values, 1)
        return {name: np.array(own) / counts[name] for name, own in self.values.items()}

    def changes(self) -> Arrays:
        """ablation, all-but-one: name of an axis -> `[heads]`: difference of the metric from the whole model's."""
        return {name: np.array(own) - (self.base or 0.0) for name, own in self.values.items()}

    def importance(self) -> Arrays:
        """Name of an axis -> `[units]`: what the units are ranked by; the lowest go first.

        Heads: the mean of the gradient's sums (1905.10650, eq. 2), or what the metric loses without the head,
        negative where the model is better off. Hidden units: root mean square of the activations. Layers: 1 - the
        mean cosine, the mean rise of the loss, or 1 - CKA.

        Raises:
            StatisticsError: all-but-one, which compares the heads of one layer only.
        """
        if self.method == "all-but-one":
            raise StatisticsError(
                "all-but-one scores compare the heads of one layer with each other, not those of the whole model.",
                "Score the heads with score-heads --metric gradient or --metric ablation.",
            )
        if self.method == "ablation":
            return {name: -self.sign * change for name, change in self.changes().items()}
        return {name: self.measure.importance(own) for name, own in self.means().items()}

    def sums(self, parts: Sequence[Scores]) -> Json:
        """See `Statistics`.

        Raises:
            StatisticsError: they are no sums.
        """
        if not self.measure.additive:
            raise StatisticsError(
                f"Scores of the method {self.method} are no sums, and cannot be merged.",
                "Give one file, or several of another method, such as gradient.",
            )

        def added(field: str) -> Json:
            arrays = [getattr(part, field) for part in parts]
            common = [name for name in arrays[0] if all(name in own for own in arrays)]
            return {name: np.sum([own[name] for own in arrays], axis=0).tolist() for name in common}

        return {
            **{field: added(field) for field in ("values", "counts", "distances")},
            "examples": sum(part.examples for part in parts),
            "texts": list(dict.fromkeys(text for part in parts for text in part.texts)),
        }

    def picked(self, axes: Sequence[Axis], values: Mapping[str, Array] | None = None) -> Arrays:
        """Name of each of `axes` -> `[units]`: the values of its units, in the order of `Axis.ids`.

        Args:
            values: name of an axis -> `[units]`, as in `ids`; None: `importance`.
        """
        values = self.importance() if values is None else values
        return {axis.name: values[axis.name][self.places(axis)] for axis in axes}

    def places(self, axis: Axis) -> list[int]:
        """Positions of the units of an axis in the arrays."""
        where = {number: place for place, number in enumerate(self.ids[axis.name])}
        return [where[number] for number in axis.ids]

    @property
    def shown_values(self) -> Arrays:
        """Axis -> the shown value of every head: I_h, or the difference of the score from the whole model's."""
        return self.means() if self.method == "gradient" else self.changes()

    @property
    def metric_title(self) -> str:
        """Name of the metric as tables show it."""
        known = SCORES["translation"].get(str(self.metric))
        return str(self.metric) if known is None else known.title

    @property
    def title(self) -> str:
        """Title of the table of heads."""
        per = ", per token" if self.per == "token" else ""
        return TITLES[self.method].format(per=per, metric=self.metric_title)

    @property
    def few(self) -> str | None:
        """The message that replaces tests on too few examples. None if there are enough, or if nothing is tested."""
        return None if self.method == "gradient" else too_few((self.reported or self).examples, "examples")

    def head_blocks(self, layers: Sequence[AttentionLayer]) -> Blocks:
        """Yield the table of heads, and what it says in words.

        Args:
            layers: the attentions of the model, in the order of the rows. Each has a row, with a column for each head
                of the original model; pruned heads have no value.
        """
        values, rows = {module_of(name): own for name, own in self.shown_values.items()}, []
        for layer in layers:
            if layer.name in values:
                by_head = dict(zip(layer.heads, values[layer.name], strict=True))
                cells = {
                    str(head) if head else "head 0": f"{by_head[head]:.3g}" if head in by_head else None
                    for head in range(layer.original_heads)
                }
                rows.append({"attention": layer.kind, "layer": str(layer.layer), **cells})
        yield Shown(self.title, rows, keys=2)
        if self.method == "gradient":
            what = "the tokens of " if self.per == "token" else ""
            yield f"Mean over {what}{self.examples:,} examples of {self.task}."
            return
        yield f"{self.metric_title} of the whole model: {self.base:.4g}, on {self.examples:,} examples."
        if self.method != "ablation":
            yield from self._best_blocks()
        elif self.few is None:
            gains = self.sign * np.concatenate([*self.changes().values()])
            sure = np.concatenate([*self.p_values.values()]) < LEVEL
            worse, better = np.sum(sure & (gains < 0)), np.sum(sure & (gains > 0))
            yield (
                f"Without one head: {worse} of {len(sure)} make it significantly worse, {better} better (p < {LEVEL})."
            )

    def _best_blocks(self) -> Blocks:
        """Yield the best single head of each layer; if changes are tested, with a mark for significant ones."""
        rows = [
            {**best, "mark": "*" if self.few is None and best["p_value"] < LEVEL else ""}
            for best in self._best_rows()
        ]
        columns = {
            "attention": "{attention}",
            "head": "{head}",
            self.metric_title: "{only:.4g}",
            "change": "{change:+.4g}{mark}",
        }
        where = "chosen on other text" if self.reported is not None else "chosen on the same text"
        yield Shown.of(f"The best single head of each layer, {where}", rows, columns)
        if self.few is None:
            yield f"* differs from the whole model with p < {LEVEL}."

    def _tables(self) -> Tables:
        """A row for each unit, of ablation and all-but-one for each metric; `best`: the best head of each layer."""
        if self.method in EFFECTS:
            rows = [row for scores in self._by_metric for row in self._effect_rows(scores)]
            return {"heads": rows, "best": self._best_rows()}
        sums = self.values if self.measure.additive else {}
        rows = [
            {
                HOLDERS.get(self.kind, "axis").lower(): module_of(name),
                self.kind: number,
                "importance": float(own[place]),
                **({"sum": sums[name][place]} if sums else {}),
            }
            for name, own in self.importance().items()
            for place, number in enumerate(self.ids[name])
        ]
        return {f"{self.kind}s": rows}

    def _effect_rows(self, scores: Scores | Effects) -> Iterator[Row]:
        for name, ids in self.ids.items():
            p_values = scores.p_values.get(name, [None] * len(ids))
            for head, value, p_value in zip(ids, scores.values[name], p_values, strict=True):
                yield {
                    "attention": module_of(name),
                    "head": head,
                    "metric": scores.metric,
                    EFFECTS[self.method]: value,
                    "change": value - (scores.base or 0.0),
                    "p_value": p_value,
                }

    def _best_rows(self) -> list[Row]:
        """The best single head of each layer; on other text, where that was measured."""
        rows = {(row["attention"], row["head"]): row for row in self._effect_rows(self)}
        found = []
        for name, head in self.best.items():
            row = rows[module_of(name), head]
            if (other := self.reported) is not None:
                row |= {"only": other.only[name], "p_value": other.p_value[name]}
                row["change"] = other.only[name] - other.base
            found.append(row)
        return found


def scores_of(checkpoint: Checkpoint, seed: int | None = None, **fields: Any) -> Scores:
    """The scores that a run of a checkpoint measured.

    Args:
        seed: seed of the run, for the header.
        fields: fields of `Scores` other than those of the header.

    Raises:
        PruneError: values that are not finite, or larger than a result may hold.
    """
    head = Scores.header([checkpoint], seed)
    (model,) = head["models"]
    model["model_type"] = checkpoint.require_architecture().model_type  # without the prefix of reduced models
    try:
        return Scores(**head, **fields)
    except ValidationError as error:
        raise PruneError(
            f"The scores cannot be stored: {first_fault(error)}", "Compute with `dtype=float32`."
        ) from error


def read_scores(path: Path, kind: Kind = "head") -> Scores:
    """Read the scores of one kind of units, also a heads.json of 0.2.0.

    Raises:
        StatisticsError: missing, cut short, damaged, or scores of other units.
    """
    scores = Scores.read(path)
    if scores.kind != kind:
        raise StatisticsError(
            f"{path}: scores of {scores.kind}s, not of {kind}s.",
            f"Give a file of prunecli {command_of(kind)}.",
        )
    return scores
