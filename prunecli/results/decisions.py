"""prunecli_decisions.json, beside config.json of a result: the values by which each step of its history chose.

The pruning commands print the same JSON of one decision with `--json`, there with ranks and margins.
"""

import json
import zlib
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer, SerializationInfo, model_validator

from prunecli import __version__
from prunecli.errors import CheckpointError, reason_of
from prunecli.model.axes import axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.rewrite import Rewrite
from prunecli.progress import Say
from prunecli.results.document import Count, Document, Json, Record, Row, Tables, array_of, known
from prunecli.tensors.json_files import parsed

History = Sequence[Mapping[str, Any]]
"""The steps of a history, oldest first."""
FILE = "prunecli_decisions.json"
SHARE_FFN = "share-ffn"
"""The command that makes new hidden units, with new ids."""
LONGEST_LIST = 65_536
"""If a decision has more units than this, its values are rounded and its ranks and margins left out."""
MOST_UNITS = 1 << 25
"""Largest number of units in a file; no model has more, and a hostile file would fill the memory."""
LARGEST_BYTES = 128 << 20
"""Largest size of a file, and of a list that is unpacked."""
REMEDY = "Copy the file again from the result that prunecli wrote, or remove it: the model does without."
DTYPES = {"float16": "<f2", "int32": "<i4", "uint8": "|u1", "bits": "|u1"}


def _unpacked(value: Any) -> Any:
    """The list in a `{"count", "dtype", "scale", "data"}` of 0.2.0 (zlib in base64); other values unchanged.

    Without `dtype` the data are a JSON list; "bits" are booleans, eight in a byte, the first one highest.
    """
    if not isinstance(value, dict):
        return value
    found = zlib.decompressobj().decompress(b64decode(value["data"], validate=True), LARGEST_BYTES)
    if (dtype := value.get("dtype")) is None:
        return parsed(found)
    numbers = np.frombuffer(found, DTYPES[dtype])
    if dtype == "bits":
        return np.unpackbits(numbers)[: value["count"]].astype(np.bool_)
    return numbers.astype(np.float64) * float(value.get("scale", 1))


def _written(decision: Decision, info: SerializationInfo) -> Json:
    """The JSON of a decision; with ranks and margins unless the context of the serialization is `FILE`."""
    is_long = sum(place.count for place in decision.places) > LONGEST_LIST
    left_out = ("ranks", "margins") if is_long or info.context == FILE else ()

    def number(value: float) -> float | None:
        if not isfinite(value):
            return None
        return value if not is_long else int(value) if value.is_integer() else float(f"{value:.4g}")

    def place_json(place: Ranked) -> Json:
        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: plain(own) for name, own in value.items()}
            if not isinstance(value, np.ndarray):
                return value
            if value.dtype == np.bool_:
                return place.ids[value].tolist()
            return [*map(number, value.tolist())] if value.dtype.kind == "f" else value.tolist()

        names = ["count", *(one.name for one in fields(place)), "margins"]
        found = {name: plain(getattr(place, name)) for name in names if name not in left_out}
        if np.array_equal(place.ids, np.arange(place.count)):
            del found["ids"]
        return _said(found)

    found = {one.name: getattr(decision, one.name) for one in fields(decision)}
    return _said(
        {**found, "origin": _said(asdict(decision.origin)), "places": [*map(place_json, decision.places)]}
    )


def _said(values: Mapping[str, Any]) -> Json:
    """Drop empty fields, but those that are always written."""
    return {
        name: value
        for name, value in values.items()
        if name in ("kept", "origin", "places") or value not in (None, "", [], (), {})
    }


def _place(found: Any) -> Json:
    """The fields of a `Ranked` from its JSON: arrays for lists, booleans for the ids that stay."""
    there, count = known(found), found["count"]

    def array(name: str, **options: bool) -> NDArray[Any] | None:
        return array_of(_unpacked(there[name]), (count,), **options) if name in there else None

    ids, reason = array("ids", counts=True), array("reason", counts=True)
    ids = np.arange(count) if ids is None else ids

    def marked(own: Any) -> NDArray[np.bool_]:
        own = _unpacked(own)
        if isinstance(own, np.ndarray):  # of a packed list
            return array_of(own, (count,)).astype(np.bool_)
        held = array_of(own, (len(own),), counts=True)
        if len(np.unique(held)) < len(own) or not np.isin(held, ids).all():
            raise ValueError("ids that were not there")
        return np.isin(ids, held)

    most = 0 if reason is None else reason.max(initial=0)
    if (np.diff(ids) <= 0).any() or most > len(there.get("reasons", ())):
        raise ValueError("ids that are not in order, or a reason without its words")
    labels = _unpacked(there.get("labels"))
    if labels is not None and len(labels) != count:
        raise ValueError(f"other than {count} labels")
    return {
        "name": "",
        "side": "",
        "layer": None,
        **there,
        "ids": ids,
        "reason": reason,
        "labels": labels,
        "kept": marked(there["kept"]),
        "values": array("values", signed=True, missing=True),
        "alone": {name: marked(own) for name, own in there.get("alone", {}).items()},
        "cutoff": None,
        "ranks": None,  # the decision finds them again
    }


def _require_few(decisions: Sequence[Any]) -> None:
    """Refuse more units than any model has, before memory is taken for them."""
    counts = [place["count"] for one in decisions for place in one["places"]]
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) > MOST_UNITS:
        raise ValueError(f"count: no numbers of units, or more than {MOST_UNITS:,}")


def _read(value: Any) -> Any:
    """The fields of a `Decision` from its JSON."""
    if isinstance(value, Decision):
        return value
    try:
        _require_few([value])
        return {**value, "places": [_place(place) for place in value["places"]]}
    except (LookupError, TypeError, AttributeError, OverflowError, zlib.error) as error:
        raise ValueError(reason_of(error)) from error


Written = Annotated[Decision, BeforeValidator(_read), PlainSerializer(_written)]
"""A decision that pydantic reads from JSON and writes as JSON."""


def _of_first(payload: Any) -> Any:
    """A file of 0.2.0 with the names of axes; `read_decisions`, which knows the history, renumbers."""
    decisions = []
    for one in payload["decisions"]:
        places = []
        for place in one["places"]:
            name = axis_name(place.get("name") or place.get("side", ""), one["part"]).lstrip(".")
            places.append({**place, "name": name, "attention": place.get("kind", "")})
        decisions.append({**one, "places": places})
    return {**payload, "decisions": decisions}


class Decisions(Document):
    """prunecli_decisions.json.

    Attributes:
        decisions: at most one for each step of the history.
    """

    FORMAT = "prunecli.decisions/2"
    FIRST: ClassVar[str] = "prunecli.decisions/1"
    """Version 0.2.0: places are named by modules (layers and tokens have no name), the attention is called `kind`, and
    layers, hidden units and tokens have their numbers in the source of the step."""
    UPGRADES = {FIRST: _of_first}
    ERROR = CheckpointError
    REMEDY = REMEDY

    decisions: list[Written]

    @model_validator(mode="before")
    @classmethod
    def _are_not_too_many(cls, payload: Any) -> Any:
        _require_few([one for one in payload["decisions"] if isinstance(one, dict)])
        return payload

    def _tables(self) -> Tables:
        """`decisions`: where each unit is, its value and rank, the cut-off, its margin, whether it stays."""
        rows = []
        for decision in self.decisions:
            step: Row = {} if decision.step is None else {"step": decision.step}
            for place in decision.places:
                where = {
                    "place": place.name,
                    "side": place.side,
                    "layer": place.layer,
                    "cutoff": place.cutoff,
                }
                for at in range(place.count):
                    unit = known(place.unit(at))
                    rows.append({**step, **where, decision.part: unit.pop("id"), **unit})
        return {"decisions": rows}


def read_decisions(directory: Path, history: History) -> dict[int, Decision]:
    """Number of a step of the history -> its decision; empty if the directory has no such file.

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
        if step is None or step >= len(history) or history[step]["command"] != decision.command:
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


def in_original_ids(decision: Decision, earlier: Mapping[int, Decision], history: History) -> Decision:
    """A decision whose layers, hidden units and tokens are numbered as in the original model.

    Args:
        decision: numbered as the source of its step; ids of layers are original ones, but in a file of 0.2.0.
        earlier: decisions of earlier steps, by original numbers.
        history: the history up to the step of the decision.
    """
    made = [step for step, entry in enumerate(history) if entry["command"] == SHARE_FFN]
    since = made[-1] if made else 0  # share-ffn makes new hidden units
    before = [earlier[step] for step in sorted(earlier, reverse=True) if since <= step < len(history) - 1]
    places = []
    for place in decision.places:
        ids, name, layer = place.ids, place.name, place.layer
        if decision.part == "layer" and decision.step is not None:  # as 0.2.0 stored them
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


def _number_before(history: History, side: str, number: int) -> int:
    """The number in the original model of a layer of the source of the last step."""
    for entry in reversed(history[:-1]):
        if entry["command"] == PRUNE_LAYERS:
            for gone in sorted(entry["arguments"].get("removed", {}).get(side, ())):
                number += gone <= number
    return number


def document(decisions: Mapping[int, Decision]) -> Decisions:
    """The decisions of the steps of a history, as `explain --json` prints them."""
    made = [decision for _, decision in sorted(decisions.items())]
    return Decisions(format=Decisions.FORMAT, prunecli=__version__, decisions=made)


def with_decision(source: Checkpoint, rewrite: Rewrite, say: Say) -> Rewrite:
    """The rewrite with its decision by original numbers, and with the file of all decisions among its files.

    If the source's file is damaged, or not of its history, the earlier decisions are left out, and `say` is called.
    """
    if rewrite.decision is None:
        return rewrite
    history = rewrite.structure.history
    try:
        found = read_decisions(source.path, source.structure.history)
    except CheckpointError as error:
        say(f"{error.message}: left out, so that nothing tells by what earlier steps chose.")
        found = {}
    made = (*rewrite.earlier, rewrite.decision)
    for step, one in enumerate(made, len(history) - len(made)):
        decision = in_original_ids(one, found, history[: step + 1])
        found[step] = replace(decision, step=step, command=history[step]["command"])
    stored = document(found).model_dump(exclude_unset=True, context=FILE)
    content = json.dumps(stored, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return replace(rewrite, decision=decision, files={**rewrite.files, FILE: f"{content}\n".encode()})


class Answer(Record):
    """The decision of one step on one unit, or where the unit is now.

    Attributes:
        text: one or two sentences.
        step: number in the history, from 0; None: of the result.
        command: command of the step.
        fields: part, place, side, layer, id, kept, metric, value, rank, of, cutoff, margin: those that are known.
            Numbers are those of the original model.
    """

    text: str
    step: Count | None = None
    command: str = ""
    fields: Json = {}


class Explanation(Document):
    """The JSON that `prunecli explain DIR WHAT --json` prints: answers to one question, in the order of the history."""

    FORMAT = "prunecli.explanation/1"

    question: str
    answers: list[Answer]
