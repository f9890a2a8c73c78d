"""Why a component of a result stayed or went: questions in words, answered from the result's directory alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prunecli.analysis.decisions import component_name, sentence
from prunecli.analysis.questions import Question, parse_question
from prunecli.errors import DataError
from prunecli.model.axes import Kind
from prunecli.model.decision import Decision, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.structure import KEY, Structure
from prunecli.results.decisions import FILE, read_decisions
from prunecli.tensors.directory import read_config

SHARE_FFN = "share-ffn"
CHOOSING = ("prune-experts", "prune-heads", "prune-ffn", PRUNE_LAYERS, "trim-vocabulary")
"""Commands that always choose; of the others, `share-ffn` does where an FFN gets narrower."""


@dataclass(frozen=True)
class Answer:
    """What one step says of one component, or where it is now.

    Attributes:
        text: one or two sentences.
        step: of the history, from 0; None: of the result.
        command: of the step.
        fields: part, place, side, layer, id, kept, value, rank, of, cutoff, margin: those that there are.
    """

    text: str
    step: int | None = None
    command: str = ""
    fields: Mapping[str, str | float | bool] = field(default_factory=dict)


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
        """What each step says of the component, then where it is now.

        Raises:
            DataError: nothing is told of it.
        """
        found = list(
            {
                "token": self._token,
                "layer": self._layers,
                "unit": self._units,
            }.get(question.part, self._by_original)(question)
        )
        if not found:
            raise DataError(f"{self.directory}: {self._nothing(question)}", self._remedy(question))
        return found

    def untold(self, step: int) -> str:
        """Why nothing is told of a step."""
        if self._command(step) not in CHOOSING:
            return "Chooses nothing by a value, or among parts: its options say it all."
        return f"Nothing tells by what it chose: {self._remedy(None)}"

    def _places(self, question: Question) -> Iterator[tuple[int, int, Ranked, int | None]]:
        """(step, index of the place, the place, number of its layer in the original model) of those asked for."""
        for step, decision in sorted(self.decisions.items()):
            if decision.part != question.part:
                continue
            for index, place in enumerate(decision.places):
                layer = None if place.layer is None else self._original(place.side, place.layer, step)
                if question.side not in (None, place.side) or question.layer not in (None, layer):
                    continue
                if question.kind is None or (question.kind == "cross") == (place.kind == "cross"):
                    yield step, index, place, layer

    def _by_original(self, question: Question) -> Iterator[Answer]:
        """Of experts and heads, whose ids are those of the original model at every step."""
        own: dict[tuple[Any, ...], list[tuple[int, int, Ranked]]] = {}
        for step, index, place, layer in self._places(question):
            if question.number is not None and place.place_of(question.number) is not None:
                own.setdefault((place.side, place.kind, layer), []).append((step, index, place))
        for (side, _, layer), steps in own.items():
            number = question.number or 0
            for step, index, place in steps:
                yield self._told(step, index, place, number, layer)
            _, _, last = steps[-1]
            yield from self._now(question.part, last, number, str(side), int(layer or 0))

    def _now(self, part: Kind, place: Ranked, number: int, side: str, layer: int) -> Iterator[Answer]:
        """Where it is in the result, if its number or that of its layer is another one."""
        now, gone = self._layer_after(side, layer, len(self.history))
        constants = self.structure.constants.get(place.name, ())
        if number in constants:
            yield Answer("Its mean output stands in its place.")
        if not place.kept[place.place_of(number) or 0]:
            return
        if now is None:
            yield Answer(
                f"{side.capitalize()} layer {layer} itself went in step {(gone or 0) + 1}, {PRUNE_LAYERS}."
            )
            return
        name = place.name.replace(f".{place.layer}.", f".{now}.", 1)
        held = (self.structure.experts if part == "expert" else self.structure.heads).get(name)
        change = self.structure.attention.get(name) if part == "head" else None
        if change is not None:
            yield Answer(f"{name} is {'gone' if change.removed else f'that of {change.shared_with}'} by now.")
        elif held is not None and number in held and (held.index(number), now) != (number, layer):
            yield Answer(f"In the result it is {part} {held.index(number)} of {side} layer {now}.")

    def _units(self, question: Question) -> Iterator[Answer]:
        """Of hidden units, which each step counts anew."""
        numbers: dict[tuple[str, int | None], tuple[int, int | None]] = {}
        for step, index, place, layer in self._places(question):
            key = place.side, layer
            since, number = numbers.get(key, (0, question.number))
            made = [i for i in range(since, step + 1) if self._command(i) == SHARE_FFN]
            before = ""
            if made and (step > made[-1] or self.decisions[made[-1]].part == "unit"):
                number = question.number
                before = f"In the FFN as step {made[-1] + 1} made it: "
            at = None if number is None else place.place_of(number)
            numbers[key] = step + 1, None
            if at is None or number is None:
                continue
            first = f" (at first unit {question.number})" if number != question.number else ""
            told = self._told(step, index, place, number, layer, (before, first))
            if place.kept[at]:
                now = int(place.kept[:at].sum())
                numbers[key] = step + 1, now
                if now != number:
                    told = replace(told, text=f"{told.text} From step {step + 1} on it is unit {now}.")
            yield told

    def _layers(self, question: Question) -> Iterator[Answer]:
        """Of whole layers."""
        number = question.number or 0
        for side in dict.fromkeys(["encoder", "decoder"] if question.side is None else [question.side]):
            asked = False
            for step in range(len(self.history)):
                if self._command(step) != PRUNE_LAYERS:
                    continue
                then, _ = self._layer_after(side, number, step)
                decision = self.decisions.get(step)
                if then is None:
                    break
                for index, place in enumerate(() if decision is None else decision.places):
                    if place.side == side and place.place_of(then) is not None:
                        asked = True
                        yield self._told(step, index, place, then, number)
                if decision is None and self._layer_after(side, number, step + 1)[0] is None:
                    asked = True
                    yield Answer(
                        f"{side.capitalize()} layer {number} went in step {step + 1}; nothing tells why.",
                        step,
                        PRUNE_LAYERS,
                    )
            now, _ = self._layer_after(side, number, len(self.history))
            if asked and now not in (None, number):
                yield Answer(f"In the result it is {side} layer {now}.")

    def _token(self, question: Question) -> Iterator[Answer]:
        """Of tokens, by their text or their first id."""
        number: int | None = None
        for step, index, place, _ in self._places(question):
            if number is None:
                number = self._token_id(place, question.text)
            if number is None or (at := place.place_of(number)) is None:
                return
            told = self._told(step, index, place, number, None)
            now = int(place.kept[:at].sum())
            if place.kept[at] and now != number:
                told = replace(told, text=f"{told.text} From step {step + 1} on its id is {now}.")
            yield told
            if not place.kept[at]:
                return
            number = now

    @staticmethod
    def _token_id(place: Ranked, text: str) -> int | None:
        labels = place.labels or ()
        quoted = text[1:-1] if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'" else text
        for name in (text, quoted):
            if name in labels:
                return labels.index(name)
        return int(text) if text.isdecimal() and len(text) < 12 else None

    def _told(
        self,
        step: int,
        index: int,
        place: Ranked,
        number: int,
        layer: int | None,
        around: tuple[str, str] = ("", ""),
    ) -> Answer:
        """What a step says of a component; `around`: what stands before and after its name."""
        decision, command = self.decisions[step], self._command(step)
        at = place.place_of(number)
        assert at is not None
        name = component_name(decision, place, number, layer)
        text = sentence(decision, index, at, name.join(around))
        if len(self.decisions) > 1:
            text = f"Step {step + 1}, {command}: {text}"
        rank, margins, cut = decision.ranks[index], decision.margins(index), decision.cuts[index]
        fields: dict[str, Any] = {
            "part": decision.part,
            "place": place.name,
            "side": place.side,
            "layer": place.layer,
            "id": number,
            "kept": bool(place.kept[at]),
            "metric": place.metric or decision.metric,
            "value": None if place.values is None else float(place.values[at]),
            "rank": None if rank is None else int(rank[at]),
            "of": cut.count,
            "cutoff": cut.cutoff,
            "margin": None if margins is None else float(margins[at]),
        }
        return Answer(
            text, step, command, {name: value for name, value in fields.items() if value not in (None, "")}
        )

    def _command(self, step: int) -> str:
        return str(self.history[step].get("command", "?"))

    def _gone(self, step: int, side: str) -> list[int]:
        """The layers of a stack that a step removed, as its source counts."""
        removed = self.history[step].get("arguments", {}).get("removed")
        own = (
            removed.get(side)
            if isinstance(removed, Mapping) and self._command(step) == PRUNE_LAYERS
            else None
        )
        return sorted(number for number in own if type(number) is int) if isinstance(own, list) else []

    def _layer_after(self, side: str, number: int, steps: int) -> tuple[int | None, int | None]:
        """The number that a layer of the original model has after so many steps; or None, and the step that took it."""
        for step in range(steps):
            gone = self._gone(step, side)
            if number in gone:
                return None, step
            number -= sum(other < number for other in gone)
        return number, None

    def _original(self, side: str, number: int, step: int) -> int:
        """The number in the original model of a layer that the source of a step counts so."""
        for earlier in reversed(range(step)):
            for gone in self._gone(earlier, side):
                number += gone <= number
        return number

    def _nothing(self, question: Question) -> str:
        if not self.decisions:
            return f"holds no {FILE}, so that nothing tells by what was chosen."
        if not any(decision.part == question.part for decision in self.decisions.values()):
            return f"no step of its history chose among {question.part}s."
        asked = (
            f"the token {question.text!r}"
            if question.part == "token"
            else f"{question.part} {question.number}"
        )
        where = " ".join(str(word) for word in (question.side, question.kind) if word)
        layer = "" if question.layer is None else f" of layer {question.layer}"
        return f"nothing tells of {asked}{layer}{f' ({where})' if where else ''}."

    def _remedy(self, question: Question | None) -> str:
        if not self.decisions or question is None:
            return f"Copy {FILE} from the result that prunecli wrote; save_pretrained leaves it behind. Or prune again."
        if question.part == "token":
            return "Write it as the tokenizer does, its mark of a space included: ▁house, Ġhouse."
        chosen = [decision for decision in self.decisions.values() if decision.part == question.part]
        if not chosen:
            names = dict.fromkeys(f"{decision.part}s" for decision in self.decisions.values())
            return f"Ask for {', '.join(names)}."
        ids = max((int(place.ids[-1]) for place in chosen[0].places if len(place.ids)), default=0)
        layers = sorted(
            {
                f"{place.side} {self._original(place.side, place.layer, step)}"
                for step, decision in self.decisions.items()
                for place in decision.places
                if place.layer is not None and decision.part == question.part
            }
        )
        more = f" of the layers {', '.join(layers[:24])}{', …' if len(layers) > 24 else ''}" if layers else ""
        return f"There are {question.part}s 0 to {ids}{more}, as the original model counts."
