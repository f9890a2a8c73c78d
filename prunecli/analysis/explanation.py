"""Why a unit of a result stayed or went: questions in words, answered from the result's directory alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, get_args

from prunecli.analysis.decisions import component_name, sentence
from prunecli.errors import DataError, UsageError
from prunecli.model.axes import Kind
from prunecli.model.decision import Decision, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.structure import KEY, Structure
from prunecli.results.decisions import FILE, SHARE_FFN, Answer, read_decisions
from prunecli.tensors.directory import read_config

CHOOSING = ("prune-experts", "prune-heads", "prune-ffn", PRUNE_LAYERS, "trim-vocabulary")
"""Commands that always choose; of the others, `share-ffn` does where an FFN gets narrower."""
_LOST = f"Copy {FILE} from the result that prunecli wrote; save_pretrained leaves it behind. Or prune again."


PARTS: tuple[Kind, ...] = get_args(Kind)
FORMS = (
    "expert 7 of layer 3; head 2 of decoder cross-attention layer 1; unit 5 of layer 0; layer 4; token ▁house"
)
_FIELDS = {"encoder": "side", "decoder": "side", "cross": "kind", "self": "kind"}
"""Word of a question -> field that it fills."""
_FILLERS = {"of", "the", "ffn", "attention", "in", "its"}


@dataclass(frozen=True)
class Question:
    """A question about one unit.

    Attributes:
        part: kind of the unit: expert, head, unit, layer or token.
        number: id of the unit in the original model. None for a token, which `text` names.
        text: text of a token.
        side: side of the stack. If None, all.
        kind: attention of a head: `cross`, `self`. If None, all.
        layer: number of the layer in the original model. If None, all.
    """

    part: Kind
    number: int | None = None
    text: str = ""
    side: str | None = None
    kind: str | None = None
    layer: int | None = None


def parse_question(words: Sequence[str]) -> Question:
    """`expert 7 of encoder layer 3`, in words or as one text.

    Raises:
        UsageError: it is not of this form.
    """
    text = " ".join(words).strip()
    first, _, rest = text.partition(" ")

    def refusal(said: str) -> UsageError:
        return UsageError(f"{text!r}: {said}", f"Ask for {FORMS}.")

    if first.lower() == "token" and rest:
        return Question("token", text=rest)
    if first.lower().removesuffix("s") not in (*PARTS, "encoder", "decoder"):
        raise refusal("no part of a model.")
    numbers: dict[Kind, int] = {}
    fields: dict[str, Any] = {}
    left = iter(re.sub(r"[,:]|(?<=cross|.self)-(?=attention)", " ", text.lower()).split())
    for word in left:
        if (part := word.removesuffix("s")) in PARTS:
            number = next(left, "")
            if not number.isdecimal():
                raise refusal(f"which {part}?")
            numbers[part] = int(number[:15])
        elif word in _FIELDS:
            fields[_FIELDS[word]] = word
        elif word not in _FILLERS:
            raise refusal(f"what is {word!r}?")
    layer = numbers.pop("layer", None)
    if len(numbers) > 1 or (layer is None and not numbers):
        raise refusal("of one part at a time.")
    if not numbers:
        return Question("layer", layer, **fields)
    ((kind, id_),) = numbers.items()
    return Question(kind, id_, layer=layer, **fields)


def explain(directory: Path | str, question: str) -> tuple[Answer, ...]:
    """Explain why a unit of a result was kept or dropped, in the order of the history; then where it is now.

    Args:
        directory: directory of the result.
        question: `expert 7 of encoder layer 3`, `token ▁house`; see `parse_question`.

    Raises:
        UsageError: the question is of no such form.
        CheckpointError: no checkpoint, or a damaged one.
        DataError: prunecli did not write it, or no decision is about the unit.
    """
    return tuple(Explained.open(Path(directory)).answers(parse_question([question])))


@dataclass(frozen=True)
class Explained:
    """The decisions of a result directory.

    Attributes:
        directory: directory of the result.
        structure: how the result differs from the original model.
        decisions: number of a step of the history -> its decision.
    """

    directory: Path
    structure: Structure
    decisions: Mapping[int, Decision]

    @classmethod
    def open(cls, directory: Path) -> Explained:
        """Read config.json and the decisions beside it; no weights.

        Raises:
            CheckpointError: damaged, or no checkpoint.
            DataError: prunecli did not write it.
        """
        config = read_config(directory)
        if KEY not in config:
            raise DataError(
                f"{directory}: prunecli did not write this checkpoint.", "Name a result of its commands."
            )
        structure = Structure.from_json(config[KEY], str(directory / "config.json"))
        return cls(directory, structure, read_decisions(directory, structure.history))

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """The steps, oldest first."""
        return self.structure.history

    def answers(self, question: Question) -> list[Answer]:
        """The decision of each step on the unit, axis by axis, and where the unit is now.

        Raises:
            DataError: no decision is about the unit.
        """
        by_axis: dict[str, list[tuple[Decision, Ranked, int]]] = {}
        for _, decision in sorted(self.decisions.items()):
            for place in decision.places if decision.part == question.part else ():
                at = _position(question, place)
                if at is not None:
                    by_axis.setdefault(place.name, []).append((decision, place, at))
        found: list[Answer] = []
        for asked in by_axis.values():
            found += [*starmap(self._told, asked), *map(_plain, self._now(*asked[-1]))]
        if not found and question.part == "layer":  # the structure knows which layers went
            for side, layers in self.structure.of_kind("layer").items():
                if question.side in (None, side) and question.number in {*range(layers.of)} - {*layers.kept}:
                    found.append(
                        _plain(f"{side.capitalize()} layer {question.number} is gone; nothing tells why.")
                    )
        if not found:
            raise self._refusal(question)
        return found

    def untold(self, step: int) -> str:
        """Why there is no decision for a step."""
        if self._command(step) not in CHOOSING:
            return "Chooses nothing by a value, or among parts: its options say it all."
        return f"Nothing tells by what it chose: {_LOST}"

    def _told(self, decision: Decision, place: Ranked, at: int) -> Answer:
        """The decision of a step on a unit."""
        step = decision.step or 0
        text = sentence(decision, place, at, component_name(decision, place, at))
        if decision.part == "unit" and (made := self._merging(0, step + 1)):
            text = f"In the FFN as step {made[-1] + 1} made it: {text}"
        if len(self.decisions) > 1:
            text = f"Step {step + 1}, {decision.command}: {text}"
        fields = {
            "part": decision.part,
            "place": place.module,
            "side": place.side,
            "layer": place.layer,
            "metric": place.metric or decision.metric,
            "of": sum(other.count for other in decision.together(place)),
            **place.unit(at),
        }
        told = {name: value for name, value in fields.items() if value not in (None, "") and name != "text"}
        return Answer(text=text, step=step, command=decision.command, fields=told)

    def _now(self, decision: Decision, place: Ranked, at: int) -> Iterator[str]:
        """Say which number the unit has in the result, if its number or that of its layer changed."""
        part, number, side = decision.part, int(place.ids[at]), place.side
        if number in self.structure.constants.get(place.module, ()):
            yield "Its mean output stands in its place."
        if not place.kept[at]:
            return
        now = int(place.kept[:at].sum())
        if part in ("token", "layer") and now != number:
            yield (
                f"In the result its id is {now}."
                if part == "token"
                else f"In the result it is {side} layer {now}."
            )
        merged = part == "unit" and self._merging((decision.step or 0) + 1, len(self.history))
        if place.layer is None or merged:
            return
        layers = self.structure.units(side, "layer", place.layer + 1).kept
        if place.layer not in layers:
            yield f"{side.capitalize()} layer {place.layer} itself is gone by now."
            return
        layer = layers.index(place.layer)
        name = place.module.replace(f".{place.layer}.", f".{layer}.", 1)
        if name in self.structure.removed:
            yield f"{name} is gone by now."
        elif name in self.structure.shared:
            yield f"{name} is that of {self.structure.shared[name]} by now."
        elif (now, layer) != (number, place.layer):
            yield f"In the result it is {part} {now} of {side} layer {layer}."

    def _merging(self, first: int, end: int) -> list[int]:
        """Numbers of the steps, from `first` to before `end`, that made new FFNs."""
        return [step for step in range(first, end) if self._command(step) == SHARE_FFN]

    def _command(self, step: int) -> str:
        return str(self.history[step].get("command", "?"))

    def _refusal(self, question: Question) -> DataError:
        """The error that no decision is about a unit, and what can be asked for."""
        kind, decisions = question.part, [*self.decisions.values()]
        places = [place for one in decisions if one.part == kind for place in one.places]
        if not decisions:
            said, remedy = f"holds no {FILE}, so that nothing tells by what was chosen.", _LOST
        elif not places:
            said = f"no step of its history chose among {kind}s."
            remedy = f"Ask for {', '.join(dict.fromkeys(f'{one.part}s' for one in decisions))}."
        elif kind == "token":
            said = f"nothing tells of the token {question.text!r}."
            remedy = "Write it as the tokenizer does, its mark of a space included: ▁house, Ġhouse."
        else:
            layer = "" if question.layer is None else f" of layer {question.layer}"
            where = " ".join(filter(None, (question.side, question.kind)))
            said = f"nothing tells of {kind} {question.number}{layer}{f' ({where})' if where else ''}."
            ids = max(int(place.ids.max(initial=0)) for place in places)
            layers = sorted({f"{place.side} {place.layer}" for place in places if place.layer is not None})
            more = ", …" if layers[24:] else ""
            listed = f" of the layers {', '.join(layers[:24])}{more}" if layers else ""
            remedy = f"There are {kind}s 0 to {ids}{listed}, as the original model counts."
        return DataError(f"{self.directory}: {said}", remedy)


def _plain(text: str) -> Answer:
    """An answer that no step gives."""
    return Answer(text=text, step=None, command="", fields={})


def _position(question: Question, place: Ranked) -> int | None:
    """Position of the unit that a question is about; None if it is not on this axis."""
    if question.part == "token":  # its text, which may be quoted, or its id
        text, labels = question.text, place.labels or ()
        quoted = text[1:-1] if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'" else text
        for name in (text, quoted):
            if name in labels:
                return labels.index(name)
        return place.place_of(int(text)) if text.isdecimal() and len(text) < 12 else None
    if question.side not in (None, place.side) or question.layer not in (None, place.layer):
        return None
    if question.kind is not None and (question.kind == "cross") != (place.attention == "cross"):
        return None
    return None if question.number is None else place.place_of(question.number)
