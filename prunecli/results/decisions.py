"""prunecli_decisions.json, beside config.json of a result: by what each step of its history chose what stays.

The same record of one decision is in what the pruning commands print with `--json`, there with ranks and margins.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_serializer

from prunecli import __version__
from prunecli.errors import CheckpointError, DataError, reason_of
from prunecli.model.axes import Kind, axis_name
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.progress import Say, unsaid
from prunecli.results.document import Count, Document, Number, Record
from prunecli.results.packing import LARGEST_BYTES, MOST_COMPONENTS, Packed, PackedText
from prunecli.results.tabled import Row, Tables
from prunecli.tensors.json_files import read_json

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.rewrite import Rewrite

FILE = "prunecli_decisions.json"
SHARE_FFN = "share-ffn"
"""The command after which hidden units are others."""
LONGEST_LIST = 65_536
"""Components of a decision; the values of more are packed, rounded to float16 where they are no whole numbers."""
REMEDY = "Copy the file again from the result that prunecli wrote, or remove it: the model does without."

AS_THEY_ARE = ("name", "side", "layer", "attention", "cut", "tokens", "metric")
"""Fields of a `Ranked` that are written as they are."""
STATED = tuple(field.name for field in fields(Decision) if field.name != "places")
"""Fields of a `Decision` that are written as they are."""

Ids = list[Annotated[int, Field(ge=0, le=1 << 40)]]


class PlaceRecord(Record):
    """See `Ranked`. Lists go by the order of the ids; kept ids are named, packed ones marked.

    Attributes:
        ids: left out: all numbers below `count`.
        ranks, margins: in what is printed only.
    """

    name: str = ""
    side: str = ""
    layer: Count | None = None
    attention: str = ""
    cut: str = ""
    count: Annotated[int, Field(ge=0, le=MOST_COMPONENTS)]
    cutoff: Number | None = None
    tokens: Count | None = None
    metric: str = ""
    ids: Ids | Packed | None = None
    kept: Ids | Packed
    values: list[Number | None] | Packed | None = None
    ranks: Ids | None = None
    margins: list[Number | None] | None = None
    alone: dict[str, Ids | Packed] = Field(default_factory=dict)
    reasons: list[str] = Field(default_factory=list)
    reason: Ids | Packed | None = None
    labels: PackedText | None = None

    def ranked(self) -> Ranked:
        """The value that it stands for.

        Raises:
            ValueError: lists of other lengths, ids that are not there or not in order.
        """
        ids = np.arange(self.count) if self.ids is None else _array(self.ids).astype(np.int64)
        values = None if self.values is None else _array(self.values).astype(np.float64)
        reason = None if self.reason is None else _array(self.reason).astype(np.uint8)
        labels = None if self.labels is None else self.labels.texts()
        lengths = {len(part) for part in (ids, values, reason, labels) if part is not None}
        if lengths != {self.count} or (len(ids) > 1 and (np.diff(ids) <= 0).any()):
            raise ValueError(f"{self.name}: lists of other than {self.count} components")
        if reason is not None and int(reason.max(initial=0)) > len(self.reasons):
            raise ValueError(f"{self.name}: a reason without its words")
        return Ranked(
            **{name: getattr(self, name) for name in AS_THEY_ARE},
            ids=ids,
            kept=self._marked(self.kept, ids),
            values=values,
            alone={name: self._marked(own, ids) for name, own in self.alone.items()},
            reasons=tuple(self.reasons),
            reason=reason,
            labels=labels,
        )

    def _marked(self, own: Ids | Packed, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        array = _array(own)
        if isinstance(own, Packed):
            if own.dtype != "bits" or len(array) != self.count:
                raise ValueError(f"{self.name}: lists of other than {self.count} components")
            return array
        if len(set(own)) != len(own) or not np.isin(array, ids).all():
            raise ValueError(f"{self.name}: ids that were not there")
        return np.isin(ids, array)


class DecisionRecord(Record):
    """See `Decision`.

    Attributes:
        step: number of the entry in the history of config.json, from 0.
        command: of that entry.
    """

    step: Count | None = None
    command: str = ""
    part: Kind
    metric: str | None = None
    how: str = ""
    least: str = ""
    bound: Number | None = None
    thresholds: dict[str, Number] = Field(default_factory=dict)
    origin: Origin = Origin()
    places: list[PlaceRecord]

    def decision(self) -> Decision:
        """The value that it stands for.

        Raises:
            ValueError: what goes together does not.
        """
        places = tuple(place.ranked() for place in self.places)
        made = Decision(places=places, **{name: getattr(self, name) for name in STATED})
        for place, ranks in zip(places, made.ranks, strict=True):
            if place.values is not None and ranks is None:
                raise ValueError(f"{place.name}: compared with what has no values")
        return made

    @field_serializer("origin")
    def _origin(self, origin: Origin) -> dict[str, Any]:
        return _said(asdict(origin))


def record(decision: Decision, *, full: bool = False, **of_step: Any) -> DecisionRecord:
    """The record of a decision.

    Args:
        decision: to be written or printed.
        full: with ranks and margins, as it is printed.
        of_step: `step` and `command`, in the file of a history.
    """
    is_long = sum(len(place.ids) for place in decision.places) > LONGEST_LIST
    is_told = full and not is_long

    def numbers(values: NDArray[Any] | None) -> Any:
        return Packed.of(values) if is_long and values is not None else _listed(values)

    def written(index: int, place: Ranked) -> PlaceRecord:
        def marked(values: NDArray[np.bool_]) -> Any:
            return Packed.of(values) if is_long else place.ids[values].tolist()

        count = len(place.ids)
        found = {
            **{name: getattr(place, name) for name in AS_THEY_ARE},
            "cutoff": decision.cuts[index].cutoff,
            "ids": None if np.array_equal(place.ids, np.arange(count)) else numbers(place.ids),
            "values": numbers(place.values),
            "ranks": numbers(decision.ranks[index]) if is_told else None,
            "margins": numbers(decision.margins(index)) if is_told else None,
            "alone": {name: marked(own) for name, own in place.alone.items()},
            "reasons": list(place.reasons),
            "reason": numbers(place.reason),
            "labels": None if place.labels is None else PackedText.of(place.labels),
        }
        return PlaceRecord(**_said(found), count=count, kept=marked(place.kept))

    stated = _said({name: getattr(decision, name) for name in STATED})
    places = [written(index, place) for index, place in enumerate(decision.places)]
    return DecisionRecord(**of_step, **stated, places=places)


class Decisions(Document):
    """prunecli_decisions.json.

    Attributes:
        decisions: at most one of each step of the history.
    """

    FORMAT: ClassVar[str] = "prunecli.decisions/2"
    FIRST: ClassVar[str] = "prunecli.decisions/1"
    """Of version 0.2.0: places are named by modules (layers and tokens have no name), the attention is called `kind`,
    and layers, hidden units and tokens have their numbers in the source of the step."""

    decisions: list[DecisionRecord]

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> Decisions:
        found = super().from_json(payload, path)
        if sum(place.count for one in found.decisions for place in one.places) > MOST_COMPONENTS:
            raise DataError(f"{path}: more than {MOST_COMPONENTS:,} components, as no model has", REMEDY)
        return found._upgraded() if found.format == cls.FIRST else found

    def _upgraded(self) -> Decisions:
        """A file of the first version with the names of axes; `read_decisions`, which knows the history, renumbers."""
        decisions = []
        for one in self.decisions:
            names = (axis_name(place.name or place.side, one.part).lstrip(".") for place in one.places)
            places = [
                place.model_copy(
                    update={"name": name, "attention": str((place.model_extra or {}).get("kind", ""))}
                )
                for name, place in zip(names, one.places, strict=True)
            ]
            decisions.append(one.model_copy(update={"places": places}))
        return self.model_copy(update={"decisions": decisions})

    def _tables(self) -> Tables:
        """`decisions`: a component that was up for a choice."""
        return {"decisions": [row for one in self.decisions for row in decision_rows(one)]}


def decision_rows(one: DecisionRecord) -> list[Row]:
    """A row for each component: where, its value and rank, the cut-off, its margin, whether it stays."""
    decision = one.decision()
    rows: list[Row] = []
    for index, place in enumerate(decision.places):
        columns: dict[str, Sequence[Any] | None] = {
            one.part: place.ids.tolist(),
            "text": place.labels,
            "value": _listed(place.values),
            "rank": _listed(decision.ranks[index]),
            "margin": _listed(decision.margins(index)),
            "kept": place.kept.tolist(),
        }
        there = {name: values for name, values in columns.items() if values is not None}
        where = {
            **_said({"step": one.step}),
            "place": place.name,
            "side": place.side,
            "layer": place.layer,
            "cutoff": decision.cuts[index].cutoff,
        }
        rows += [
            {**where, **dict(zip(there, values, strict=True))} for values in zip(*there.values(), strict=True)
        ]
    return rows


def read_decisions(directory: Path, history: Sequence[Mapping[str, Any]]) -> dict[int, Decision]:
    """Number of a step of the history -> by what it chose; empty where the directory has no such file.

    Raises:
        CheckpointError: the file is damaged, or not of this history.
    """
    found: dict[int, Decision] = {}
    path = directory / FILE
    if not path.is_file():
        return found
    if path.stat().st_size > LARGEST_BYTES:
        raise CheckpointError(f"{path}: is too large to be such a file", REMEDY)
    try:
        stored = Decisions.from_json(read_json(path, error=DataError), path)
    except DataError as error:
        raise CheckpointError(error.message, REMEDY) from error
    if stored.format not in (Decisions.FORMAT, Decisions.FIRST):
        raise CheckpointError(
            f"{path}: its format is {stored.format!r}; this prunecli reads {Decisions.FORMAT!r}", REMEDY
        )
    for one in sorted(stored.decisions, key=lambda one: one.step or 0):
        step = one.step
        if step is None or step >= len(history) or history[step].get("command") != one.command:
            raise CheckpointError(f"{path}: is not of the history in config.json", REMEDY)
        if step in found:
            raise CheckpointError(f"{path}: tells of one step twice", REMEDY)
        try:
            found[step] = one.decision()
            if stored.format == Decisions.FIRST:
                layer_of = partial(_number_before, history[:step])
                found[step] = in_original_ids(found[step], found, history[: step + 1], layer_of)
        except (ValueError, IndexError, zlib.error) as error:
            raise CheckpointError(f"{path}: is damaged ({reason_of(error)})", REMEDY) from error
    return found


def in_original_ids(
    decision: Decision,
    earlier: Mapping[int, Decision],
    history: Sequence[Mapping[str, Any]],
    layer_of: Callable[[str, int], int],
) -> Decision:
    """A decision whose layers, hidden units and tokens are numbered as in the original model.

    Args:
        decision: by numbers of the source of its step.
        earlier: those of steps before, by original numbers.
        history: up to its step.
        layer_of: side and number of a layer in the source -> its number in the original model.
    """
    made = [step for step, entry in enumerate(history) if entry.get("command") == SHARE_FFN]
    since = made[-1] if made else 0  # hidden units of a merged FFN are other ones
    before = [earlier[step] for step in sorted(earlier, reverse=True) if since <= step < len(history) - 1]
    places = []
    for place in decision.places:
        ids, name, layer = place.ids, place.name, place.layer
        if decision.part == "layer":
            ids = np.array([layer_of(place.side, number) for number in ids.tolist()], np.int64)
        if layer is not None:
            layer = layer_of(place.side, layer)
            name = name.replace(f".{place.layer}.", f".{layer}.", 1)
        if decision.part in ("unit", "token"):
            same = (one for other in before if other.part == decision.part for one in other.places)
            held = next((one for one in same if one.name == name), None)
            ids = ids if held is None else held.ids[held.kept][ids]
        places.append(replace(place, ids=ids, name=name, layer=layer))
    return replace(decision, places=tuple(places))


def _number_before(history: Sequence[Mapping[str, Any]], side: str, number: int) -> int:
    """The number in the original model of a layer that is counted so after these steps."""
    for entry in reversed(history):
        if entry.get("command") == PRUNE_LAYERS:
            for gone in sorted(entry.get("arguments", {}).get("removed", {}).get(side, ())):
                number += gone <= number
    return number


def document(
    decisions: Mapping[int, Decision], history: Sequence[Mapping[str, Any]], *, full: bool = True
) -> Decisions:
    """The decisions of a history as a file; `full`: with ranks and margins, as it is printed."""
    records = [
        record(decision, step=step, command=str(history[step].get("command", "")), full=full)
        for step, decision in sorted(decisions.items())
    ]
    return Decisions(format=Decisions.FORMAT, prunecli=__version__, decisions=records)


def with_decision(source: Checkpoint, rewrite: Rewrite, say: Say = unsaid) -> Rewrite:
    """The rewrite with its decision by original numbers, and the file of it and of those before it among its files.

    Where the source's file is damaged, or not of its history, those before are left out, and `say` hears of it.
    """
    if rewrite.decision is None:
        return rewrite
    history = rewrite.structure.history
    try:
        found = read_decisions(source.path, source.structure.history)
    except CheckpointError as error:
        say(f"{error.message}: left out, so that nothing tells by what earlier steps chose.")
        found = {}
    decision = in_original_ids(rewrite.decision, found, history, source.structure.original_layer)
    found[len(history) - 1] = decision
    made = document(found, history, full=False)
    content = json.dumps(made.to_json(), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return replace(rewrite, decision=decision, files={**rewrite.files, FILE: f"{content}\n".encode()})


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty fields."""
    return {
        name: value for name, value in values.items() if value is not None and value not in ("", [], (), {})
    }


def _array(values: Ids | list[float | None] | Packed) -> NDArray[Any]:
    if isinstance(values, Packed):
        return values.array()
    return np.array([np.nan if value is None else value for value in values])


def _listed(values: NDArray[Any] | None) -> list[Any] | None:
    """The numbers as JSON holds them: None for NaN and infinity."""
    if values is None or values.dtype.kind != "f":
        return None if values is None else values.tolist()
    return [value if np.isfinite(value) else None for value in values.tolist()]
