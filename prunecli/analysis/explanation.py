"""Why a component of a result stayed or went: questions in words, answered from the result's directory alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
_PLAIN = partial(Answer, step=None, command="", fields={})
"""An answer that no step gives."""


PARTS: tuple[Kind, ...] = get_args(Kind)
FORMS = (
    "expert 7 of layer 3; head 2 of decoder cross-attention layer 1; unit 5 of layer 0; layer 4; token ▁house"
)
_FIELDS = {"encoder": "side", "decoder": "side", "cross": "kind", "self": "kind"}
"""Word of a question -> field that it fills."""
_FILLERS = {"of", "the", "ffn", "attention", "in", "its"}


@dataclass(frozen=True)
class Question:
    """Which component.

    Attributes:
        part: expert, head, unit, layer or token.
        number: its id in the original model; of a layer its number; None: of a token, which `text` names.
        text: of a token.
        side: of its stack; None: all that there are.
        kind: `cross`, `self`, or None: all.
        layer: number that its layer had in the original model; None: all.
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
        part = next((known for known in PARTS if word in (known, f"{known}s")), None)
        if part is not None:
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
    """Why a component of a result was kept or dropped, in the order of its history; then where it is now.

    Args:
        directory: of the result.
        question: `expert 7 of encoder layer 3`, `token ▁house`; see `parse_question`.

    Raises:
        UsageError: the question is of no such form.
        CheckpointError: no checkpoint, or a damaged one.
        DataError: prunecli did not write it, or nothing is told of the component.
    """
    return tuple(Explained.open(Path(directory)).answers(parse_question([question])))


@dataclass(frozen=True)
class Explained:
    """A result directory, as far as its decisions go.

    Attributes:
        directory: of the result.
        structure: how it differs from the original.
        decisions: number of a step of the history -> by what it chose.
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
        """Its steps, oldest first."""
        return self.structure.history

    def answers(self, question: Question) -> list[Answer]:
        """What each step says of the component, place by place, and where it is now.

        Raises:
            DataError: nothing is told of it.
        """
        by_place: dict[str, list[tuple[Decision, Ranked, int]]] = {}
        for _, decision in sorted(self.decisions.items()):
            for place in decision.places if decision.part == question.part else ():
                number = _token_id(place, question.text) if question.part == "token" else question.number
                at = None if number is None else place.place_of(number)
                if at is not None and _is_asked(question, place):
                    by_place.setdefault(place.name, []).append((decision, place, at))
        found: list[Answer] = []
        for asked in by_place.values():
            found += [*starmap(self._told, asked), *self._now(*asked[-1])]
        if not found and question.part == "layer":
            found += self._lost_layers(question)
        if not found:
            raise self._refusal(question)
        return found

    def untold(self, step: int) -> str:
        """Why nothing is told of a step."""
        if self._command(step) not in CHOOSING:
            return "Chooses nothing by a value, or among parts: its options say it all."
        return f"Nothing tells by what it chose: {_LOST}"

    def _told(self, decision: Decision, place: Ranked, at: int) -> Answer:
        """What a step says of a component."""
        number, step = int(place.ids[at]), decision.step or 0
        made = [own for own in range(step + 1) if self._command(own) == SHARE_FFN]
        merged = f"In the FFN as step {made[-1] + 1} made it: " if made and decision.part == "unit" else ""
        text = merged + sentence(decision, place, at, component_name(decision, place, at))
        if len(self.decisions) > 1:
            text = f"Step {step + 1}, {decision.command}: {text}"
        fields = {
            "part": decision.part,
            "place": place.module,
            "side": place.side,
            "layer": place.layer,
            "id": number,
            "kept": bool(place.kept[at]),
            "metric": place.metric or decision.metric,
            "value": None if place.values is None else float(place.values[at]),
            "rank": None if place.ranks is None else int(place.ranks[at]),
            "of": sum(other.count for other in decision.together(place)),
            "cutoff": place.cutoff,
            "margin": None if place.margins is None else float(place.margins[at]),
        }
        told = {name: value for name, value in fields.items() if value not in (None, "")}
        return Answer(text=text, step=step, command=decision.command, fields=told)

    def _now(self, decision: Decision, place: Ranked, at: int) -> Iterator[Answer]:
        """Where the component is in the result, if its number or that of its layer is another one."""
        part, number = decision.part, int(place.ids[at])
        if number in self.structure.constants.get(place.module, ()):
            yield _PLAIN(text="Its mean output stands in its place.")
        if not place.kept[at]:
            return
        now = int(place.kept[:at].sum())
        if part == "token" and now != number:
            yield _PLAIN(text=f"In the result its id is {now}.")
        if part == "layer" and now != number:
            yield _PLAIN(text=f"In the result it is {place.side} layer {now}.")
        later = any(
            self._command(own) == SHARE_FFN for own in range((decision.step or 0) + 1, len(self.history))
        )
        if place.layer is None or (part == "unit" and later):
            return
        layers = self.structure.units(str(place.side), "layer", place.layer + 1).kept
        if place.layer not in layers:
            yield _PLAIN(text=f"{place.side.capitalize()} layer {place.layer} itself is gone by now.")
            return
        layer = layers.index(place.layer)
        name = place.module.replace(f".{place.layer}.", f".{layer}.", 1)
        if name in self.structure.removed:
            yield _PLAIN(text=f"{name} is gone by now.")
        elif name in self.structure.shared:
            yield _PLAIN(text=f"{name} is that of {self.structure.shared[name]} by now.")
        elif (now, layer) != (number, place.layer):
            yield _PLAIN(text=f"In the result it is {part} {now} of {place.side} layer {layer}.")

    def _lost_layers(self, question: Question) -> Iterator[Answer]:
        """Layers that the structure lacks, where no decision tells of them."""
        for side, layers in self.structure.of_kind("layer").items():
            gone = set(range(layers.of)).difference(layers.kept)
            if question.side in (None, side) and question.number in gone:
                yield _PLAIN(text=f"{side.capitalize()} layer {question.number} is gone; nothing tells why.")

    def _command(self, step: int) -> str:
        return str(self.history[step].get("command", "?"))

    def _refusal(self, question: Question) -> DataError:
        """The error that says that nothing is told of a component, and what can be asked for."""
        decisions = [one for one in self.decisions.values() if one.part == question.part]
        places = [place for decision in decisions for place in decision.places]
        layers = sorted({f"{place.side} {place.layer}" for place in places if place.layer is not None})
        if not self.decisions:
            said, remedy = f"holds no {FILE}, so that nothing tells by what was chosen.", _LOST
        elif not decisions:
            said = f"no step of its history chose among {question.part}s."
            remedy = f"Ask for {', '.join(dict.fromkeys(f'{one.part}s' for one in self.decisions.values()))}."
        elif question.part == "token":
            said = f"nothing tells of the token {question.text!r}."
            remedy = "Write it as the tokenizer does, its mark of a space included: ▁house, Ġhouse."
        else:
            layer = "" if question.layer is None else f" of layer {question.layer}"
            where = " ".join(word for word in (question.side, question.kind) if word)
            said = (
                f"nothing tells of {question.part} {question.number}{layer}{f' ({where})' if where else ''}."
            )
            ids = max(int(place.ids.max(initial=0)) for place in places)
            listed = (
                f" of the layers {', '.join(layers[:24])}{', …' if layers[24:] else ''}" if layers else ""
            )
            remedy = f"There are {question.part}s 0 to {ids}{listed}, as the original model counts."
        return DataError(f"{self.directory}: {said}", remedy)


def _is_asked(question: Question, place: Ranked) -> bool:
    """Whether a place is one of those that a question is about."""
    return (
        question.side in (None, place.side)
        and question.layer in (None, place.layer)
        and (question.kind is None or (question.kind == "cross") == (place.attention == "cross"))
    )


def _token_id(place: Ranked, text: str) -> int | None:
    """The id of a token by its text, which may be quoted, or by its number."""
    labels = place.labels or ()
    quoted = text[1:-1] if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'" else text
    for name in (text, quoted):
        if name in labels:
            return int(place.ids[labels.index(name)])
    return int(text) if text.isdecimal() and len(text) < 12 else None
