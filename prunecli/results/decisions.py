"""prunecli_decisions.json, beside config.json of a result: by what each step of its history chose what stays.

The pruning commands print the same JSON of one decision with `--json`, there with ranks and margins. Long lists are
packed (`Packed`), and read with bounds, whatever a file holds.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializationInfo,
    model_validator,
)

from prunecli import __version__
from prunecli.errors import CheckpointError, reason_of
from prunecli.model.axes import axis_name
from prunecli.model.decision import Decision, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.progress import Say, unsaid
from prunecli.results.document import Count, Document, Number, Record, array_of
from prunecli.results.tabled import Row, Tables
from prunecli.tensors.json_files import parsed

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.rewrite import Rewrite

FILE = "prunecli_decisions.json"
SHARE_FFN = "share-ffn"
"""The command after which hidden units are others."""
LONGEST_LIST = 65_536
"""Components of a decision; the values of more are packed, rounded to float16 where they are no whole numbers."""
MOST_COMPONENTS = 1 << 25
"""In a file; no model has more, and those of a hostile file would fill the memory."""
LARGEST_BYTES = 128 << 20
"""Of a file, and of what is unpacked at once."""
REMEDY = "Copy the file again from the result that prunecli wrote, or remove it: the model does without."


class Packed(Record):
    """A list too long for JSON, by zlib and base64.

    Attributes:
        dtype: of little-endian numbers; "bits": marks, eight in a byte, the first one highest. None: a JSON list.
        count: length of the list.
        scale: factor of the numbers.
    """

    DTYPES: ClassVar[Mapping[str, str]] = {"float16": "<f2", "int32": "<i4", "uint8": "|u1", "bits": "|u1"}

    dtype: Literal["float16", "int32", "uint8", "bits"] | None = None
    count: Annotated[int, Field(ge=0, le=MOST_COMPONENTS)]
    scale: Number = 1.0
    data: str

    @classmethod
    def of(cls, values: NDArray[Any] | Sequence[str]) -> dict[str, Any]:
        """Pack texts, booleans or whole numbers as they are, other numbers rounded to float16."""
        if not isinstance(values, np.ndarray):
            return {"count": len(values), "data": _deflated(json.dumps(list(values)).encode())}
        more: dict[str, Any] = {}
        dtype, numbers = "int32", values
        if values.dtype == np.bool_:
            dtype, numbers = "bits", np.packbits(values)
        elif values.dtype == np.uint8:
            dtype = "uint8"
        else:
            is_finite = np.isfinite(values)
            largest = float(np.abs(values[is_finite]).max(initial=0.0))
            if not is_finite.all() or (values != np.rint(values)).any() or largest >= 1 << 31:
                more = {"scale": largest or 1.0}
                dtype, numbers = "float16", np.where(is_finite, values, np.nan) / more["scale"]
        data = _deflated(numbers.astype(cls.DTYPES[dtype]).tobytes())
        return {"dtype": dtype, "count": len(values), **more, "data": data}

    def unpacked(self) -> Any:
        """The list, or its numbers as an array. Memory is bounded by `count`, whatever the file holds.

        Raises:
            ValueError: the data are damaged, or numbers of another count.
        """
        dtype = np.dtype(self.DTYPES[self.dtype or "bits"])
        size = -(-self.count // 8) if self.dtype == "bits" else self.count * dtype.itemsize
        most = size if self.dtype else min(1024 * self.count + 2, LARGEST_BYTES)
        try:
            found = zlib.decompressobj().decompress(b64decode(self.data, validate=True), most + 1)
        except zlib.error as error:
            raise ValueError(f"packed values are damaged ({error})") from error
        if self.dtype is None:
            return parsed(found)
        if len(found) != size:
            raise ValueError(f"packed values of other than {size} bytes")
        values = np.frombuffer(found, dtype)
        if self.dtype == "bits":
            return np.unpackbits(values, count=self.count)
        return values.astype(np.float64) * self.scale


def _unpacked(value: Any) -> Any:
    return Packed.model_validate(value).unpacked() if isinstance(value, dict) else value


def _deflated(content: bytes) -> str:
    return b64encode(zlib.compress(content, 6)).decode("ascii")


PLACE = (
    *("name", "side", "layer", "attention", "cut", "count", "cutoff", "tokens", "metric", "ids"),
    *("kept", "values", "ranks", "margins", "alone", "reasons", "reason", "labels"),
)
DECISION = ("step", "command", "part", "metric", "how", "least", "bound", "thresholds", "origin", "places")
"""Keys in the order in which they are written."""


def _written(decision: Decision, info: SerializationInfo) -> dict[str, Any]:
    """The JSON of a decision; with ranks and margins unless the context of the serialization is `FILE`."""
    is_long = sum(place.count for place in decision.places) > LONGEST_LIST
    left_out = ("ranks", "margins") if is_long or info.context == FILE else ()

    def place_json(place: Ranked) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: plain(own) for name, own in value.items()}
            if not isinstance(value, np.ndarray):
                return value
            if is_long:
                return Packed.of(value)
            return place.ids[value].tolist() if value.dtype == np.bool_ else _listed(value)

        found = {name: plain(getattr(place, name)) for name in PLACE if name not in left_out}
        if np.array_equal(place.ids, np.arange(place.count)):
            del found["ids"]
        return _said({**found, "labels": place.labels and Packed.of(place.labels)})

    found = {name: getattr(decision, name) for name in DECISION}
    found |= {"origin": _said(asdict(decision.origin)), "places": list(map(place_json, decision.places))}
    return _said(found)


ARRAYS = {"ids": {"counts": True}, "values": {"signed": True, "missing": True}, "reason": {"counts": True}}
"""Field of a place -> options of `array_of`."""


def _place(found: Any) -> dict[str, Any]:
    """The fields of a `Ranked` from its JSON: arrays for lists, marks for the ids that stay."""
    count = found["count"]
    if type(count) is not int or not 0 <= count <= MOST_COMPONENTS:
        raise ValueError(f"count: {count!r} is no number of components")
    there = {name: value for name, value in found.items() if value is not None}
    there |= {
        name: array_of(_unpacked(there[name]), (count,), **kinds)
        for name, kinds in ARRAYS.items()
        if name in there
    }
    ids = there.setdefault("ids", np.arange(count))

    def marked(own: Any) -> NDArray[np.bool_]:
        if isinstance(own, dict):
            return array_of(_unpacked(own), (count,)).astype(np.bool_)
        held = array_of(own, (len(own),), counts=True)
        if len(np.unique(held)) < len(own) or not np.isin(held, ids).all():
            raise ValueError("ids that were not there")
        return np.isin(ids, held)

    there |= {
        "kept": marked(there["kept"]),
        "alone": {name: marked(own) for name, own in there.get("alone", {}).items()},
        "labels": _unpacked(there.get("labels")),
        "cutoff": None,  # the decision finds them again
        "ranks": None,
    }
    reason = there.get("reason", np.zeros(1)).max(initial=0)
    if (np.diff(ids) <= 0).any() or reason > len(there.get("reasons", ())):
        raise ValueError("ids that are not in order, or a reason without its words")
    if there["labels"] is not None and len(there["labels"]) != count:
        raise ValueError(f"other than {count} labels")
    return {"name": "", "side": "", "layer": None, **there}


def _read(value: Any) -> Any:
    """The fields of a `Decision` from its JSON."""
    if isinstance(value, Decision):
        return value
    try:
        return {**value, "places": [_place(place) for place in value["places"]]}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(reason_of(error)) from error


Written = Annotated[Decision, BeforeValidator(_read), PlainSerializer(_written)]
"""A decision that pydantic reads from JSON and writes as JSON."""


def _of_first(payload: Any) -> Any:
    """A file of 0.2.0 with the names of axes; `read_decisions`, which knows the history, renumbers."""

    def place_json(place: Any, part: Any) -> dict[str, Any]:
        name = axis_name(place.get("name") or place.get("side", ""), part).lstrip(".")
        return {**place, "name": name, "attention": place.get("kind", "")}

    decisions = [
        {**one, "places": [place_json(place, one["part"]) for place in one["places"]]}
        for one in payload["decisions"]
    ]
    return {**payload, "decisions": decisions}


class Decisions(Document):
    """prunecli_decisions.json.

    Attributes:
        decisions: at most one of each step of the history.
    """

    FORMAT: ClassVar[str] = "prunecli.decisions/2"
    FIRST: ClassVar[str] = "prunecli.decisions/1"
    """Of version 0.2.0: places are named by modules (layers and tokens have no name), the attention is called `kind`,
    and layers, hidden units and tokens have their numbers in the source of the step."""
    UPGRADES: ClassVar = {FIRST: _of_first}
    ERROR = CheckpointError
    REMEDY = REMEDY

    decisions: list[Written]

    @model_validator(mode="before")
    @classmethod
    def _are_not_too_many(cls, payload: Any) -> Any:
        read = [one for one in payload["decisions"] if isinstance(one, dict)]
        if sum(place["count"] for one in read for place in one["places"]) > MOST_COMPONENTS:
            raise ValueError(f"more than {MOST_COMPONENTS:,} components, as no model has")
        return payload

    def _tables(self) -> Tables:
        """`decisions`: a component that was up for a choice."""
        return {"decisions": [row for decision in self.decisions for row in decision_rows(decision)]}


def decision_rows(decision: Decision) -> list[Row]:
    """A row for each component: where, its value and rank, the cut-off, its margin, whether it stays."""
    rows: list[Row] = []
    for place in decision.places:
        where: Row = {} if decision.step is None else {"step": decision.step}
        where |= {"place": place.name, "side": place.side, "layer": place.layer, "cutoff": place.cutoff}
        columns = {
            decision.part: place.ids.tolist(),
            "text": place.labels,
            "value": _listed(place.values),
            "rank": _listed(place.ranks),
            "margin": _listed(place.margins),
            "kept": place.kept.tolist(),
        }
        there = {name: values for name, values in columns.items() if values is not None}
        rows += [
            where | dict(zip(there, values, strict=True)) for values in zip(*there.values(), strict=True)
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
    stored = Decisions.read(path)
    for decision in sorted(stored.decisions, key=lambda one: one.step or 0):
        step = decision.step
        if step is None or step >= len(history) or history[step].get("command") != decision.command:
            raise CheckpointError(f"{path}: is not of the history in config.json", REMEDY)
        if step in found:
            raise CheckpointError(f"{path}: tells of one step twice", REMEDY)
        found[step] = decision
        if stored.format == Decisions.FIRST:
            try:
                found[step] = in_original_ids(decision, found, history[: step + 1])
            except (ValueError, LookupError) as error:
                raise CheckpointError(f"{path}: is damaged ({reason_of(error)})", REMEDY) from error
    return found


def in_original_ids(
    decision: Decision, earlier: Mapping[int, Decision], history: Sequence[Mapping[str, Any]]
) -> Decision:
    """A decision whose layers, hidden units and tokens are numbered as in the original model.

    Args:
        decision: by numbers of the source of its step.
        earlier: those of steps before, by original numbers.
        history: up to its step.
    """
    made = [step for step, entry in enumerate(history) if entry.get("command") == SHARE_FFN]
    since = made[-1] if made else 0  # hidden units of a merged FFN are other ones
    before = [earlier[step] for step in sorted(earlier, reverse=True) if since <= step < len(history) - 1]
    places = []
    for place in decision.places:
        ids, name, layer = place.ids, place.name, place.layer
        if decision.part == "layer":
            ids = np.array([_number_before(history, place.side, number) for number in ids.tolist()], np.int64)
        if layer is not None:
            layer = _number_before(history, place.side, layer)
            name = name.replace(f".{place.layer}.", f".{layer}.", 1)
        if decision.part in ("unit", "token"):
            same = (one for other in before if other.part == decision.part for one in other.places)
            held = next((one for one in same if one.name == name), None)
            ids = ids if held is None else held.ids[held.kept][ids]
        places.append(replace(place, ids=ids, name=name, layer=layer))
    return replace(decision, places=tuple(places))


def _number_before(history: Sequence[Mapping[str, Any]], side: str, number: int) -> int:
    """The number in the original model of a layer of the source of the last step."""
    for entry in reversed(history[:-1]):
        if entry.get("command") == PRUNE_LAYERS:
            for gone in sorted(entry.get("arguments", {}).get("removed", {}).get(side, ())):
                number += gone <= number
    return number


def document(decisions: Mapping[int, Decision]) -> Decisions:
    """The decisions of the steps of a history, as `explain --json` prints them."""
    made = [decision for _, decision in sorted(decisions.items())]
    return Decisions(format=Decisions.FORMAT, prunecli=__version__, decisions=made)


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
    decision = in_original_ids(rewrite.decision, found, history)
    step = len(history) - 1
    found[step] = replace(decision, step=step, command=str(history[step].get("command", "")))
    made = document(found).model_dump(exclude_unset=True, context=FILE)
    content = json.dumps(made, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return replace(rewrite, decision=decision, files={**rewrite.files, FILE: f"{content}\n".encode()})


class Answer(Record):
    """What one step says of one component, or where the component is now.

    Attributes:
        text: one or two sentences.
        step: of the history, from 0; None: of the result.
        command: of the step.
        fields: part, place, side, layer, id, kept, metric, value, rank, of, cutoff, margin: those that there are.
            Numbers are those of the original model.
    """

    text: str
    step: Count | None = None
    command: str = ""
    fields: dict[str, Any] = Field(default_factory=dict)


class Explanation(Document):
    """What `prunecli explain DIR WHAT --json` prints: answers to one question, in the order of the history."""

    FORMAT: ClassVar[str] = "prunecli.explanation/1"

    question: str
    answers: list[Answer]

    def _tables(self) -> Tables:
        """`answers`: a step."""
        return {
            "answers": [
                {"step": one.step, "command": one.command, **one.fields, "text": one.text}
                for one in self.answers
            ]
        }


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty fields, but those that are always written."""
    return {
        name: value
        for name, value in values.items()
        if name in ("kept", "origin", "places") or value not in (None, "", [], (), {})
    }


def _listed(values: NDArray[Any] | None) -> list[Any] | None:
    """The numbers as JSON holds them: None for NaN and infinity."""
    if values is None or values.dtype.kind != "f":
        return None if values is None else values.tolist()
    return [value if np.isfinite(value) else None for value in values.tolist()]
