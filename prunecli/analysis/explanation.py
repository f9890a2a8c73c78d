"""Why a unit of a result stayed or went: questions in words, answered from the result's directory alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import DataError, UsageError
from prunecli.model.axes import Kind, module_of
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.depth import PRUNE_LAYERS
from prunecli.model.parts import KIND_NAMES
from prunecli.model.structure import KEY, Structure
from prunecli.results.decisions import FILE, SHARE_FFN, Answer, read_decisions
from prunecli.results.document import Blocks, Shown, known, number_text
from prunecli.tensors.directory import read_config

CHOOSING = ("prune-experts", "prune-heads", "prune-ffn", PRUNE_LAYERS, "trim-vocabulary")
"""Commands that always choose; of the others, `share-ffn` does where an FFN gets narrower."""
_LOST = f"Copy {FILE} from the result that prunecli wrote; save_pretrained leaves it behind. Or prune again."


FORMS = (
    "expert 7 of layer 3; head 2 of decoder cross-attention layer 1; unit 5 of layer 0; unit 5 of expert 7 of layer 3; "
    "layer 4; token ▁house; channel 9"
)
_WORD = re.compile(
    r"\bof +experts? +(?P<expert>\d{1,15})(?!\S)|(?P<part>expert|head|unit|channel)s? +(?P<number>\d{1,15})(?!\S)"
    r"|layers? +(?P<layer>\d{1,15})(?!\S)|\b(?P<side>encoder|decoder)\b|\b(?P<kind>cross|self)\b"
    r"|(?:\b|-)(?:of|the|ffn|attention|in|its)\b"
)
"""A part of a question, or a word between its parts."""


@dataclass(frozen=True)
class Question:
    """A question about one unit.

    Attributes:
        part: kind of the unit: expert, head, unit, layer, token or channel.
        number: id of the unit in the original model. None for a token, which `text` names.
        text: text of a token.
        side: side of the stack. If None, all.
        kind: attention of a head: `cross`, `self`. If None, all.
        layer: number of the layer in the original model. If None, all.
        expert: number of the expert that a hidden unit is in. If None, all, and FFNs.
        words: the question as it was asked.
    """

    part: Kind
    number: int | None = None
    text: str = ""
    side: str | None = None
    kind: str | None = None
    layer: int | None = None
    expert: int | None = None
    words: str = field(default="", compare=False)


def parse_question(words: Sequence[str]) -> Question:
    """`expert 7 of encoder layer 3`, in words or as one text.

    Raises:
        UsageError: it is not of this form.
    """
    text = " ".join(words).strip()
    first, _, rest = text.partition(" ")
    if first.lower() == "token" and rest:
        return Question("token", text=rest, words=text)
    asked, fields = re.sub("[,:]", " ", text.lower()), dict[str, Any]()
    for found in _WORD.finditer(asked):
        new = known(found.groupdict())
        if fields.keys() & new.keys() or ("expert" in new and fields.get("part") != "unit"):
            raise UsageError(f"{text!r}: two of one kind", f"Ask for one part: {FORMS}.")
        fields |= new
    unknown = _WORD.sub(" ", asked).split()
    if unknown or not fields.keys() & {"part", "layer"}:
        raise UsageError(f"{' '.join(unknown) or text!r} is no part of a model.", f"Ask for {FORMS}.")
    fields |= {name: int(fields[name]) for name in ("number", "layer", "expert") if name in fields} | {
        "words": text
    }
    return Question(**fields) if "part" in fields else Question("layer", fields.pop("layer"), **fields)


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
        found = []
        for asked in by_axis.values():
            found += [*starmap(self._told, asked), *map(_plain, self._now(*asked[-1]))]
        if not found and question.part == "layer":  # the structure knows which layers went
            for side, layers in self.structure.of_kind("layer").items():
                if question.side in (None, side) and question.number in {*range(layers.of)} - {*layers.kept}:
                    found.append(
                        _plain(
                            f"{side.capitalize()} layer {question.number} was removed; no record says why."
                        )
                    )
        if not found:
            raise self._refusal(question)
        return found

    @property
    def overview(self) -> Blocks:
        """Yield the decision of each step, or why there is none."""
        for step, entry in enumerate(self.structure.history):
            yield f"Step {step + 1}, {entry['command']}:"
            if step in self.decisions:
                yield from cut_blocks(self.decisions[step])
            elif entry["command"] in CHOOSING:
                yield f"Nothing tells by what it chose: {_LOST}"
            else:
                yield "This step ranks nothing: its options say what it did."

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
        merged = part == "unit" and self._merging((decision.step or 0) + 1, len(self.structure.history))
        if place.layer is None or merged:
            return
        layers = self.structure.units(side, "layer", place.layer + 1).kept
        if place.layer not in layers:
            yield f"{side.capitalize()} layer {place.layer} itself was removed later."
            return
        layer = layers.index(place.layer)
        name = place.module.replace(f".{place.layer}.", f".{layer}.", 1)
        if name in self.structure.removed:
            yield f"{name} was removed later."
        elif name in self.structure.shared:
            yield f"{name} is that of {self.structure.shared[name]} by now."
        elif (now, layer) != (number, place.layer):
            owner = f"{_owner(place)} of " if part == "unit" and _owner(place) else ""
            yield f"In the result it is {part} {now} of {owner}{side} layer {layer}."

    def _merging(self, first: int, end: int) -> list[int]:
        """Numbers of the steps, from `first` to before `end`, that made new FFNs."""
        steps = enumerate(self.structure.history)
        return [step for step, one in steps if first <= step < end and one["command"] == SHARE_FFN]

    def _refusal(self, question: Question) -> DataError:
        """The error that no decision is about a unit, and what can be asked for."""
        kind, decisions = question.part, [*self.decisions.values()]
        places = [place for one in decisions if one.part == kind for place in one.places]
        if not decisions:
            said, remedy = f"holds no {FILE}, so that nothing tells by what was chosen.", _LOST
        elif not places:
            said = f"no step of its history chose among {kind}s."
            remedy = f"Ask for {', '.join(dict.fromkeys(f'{one.part}s' for one in decisions))}."
        else:
            said = f"nothing tells of {question.words}."
            ids = max(int(place.ids.max(initial=0)) for place in places)
            layers = sorted({f"{place.side} {place.layer}" for place in places if place.layer is not None})
            more = ", …" if layers[24:] else ""
            listed = f" of the layers {', '.join(layers[:24])}{more}" if layers else ""
            remedy = f"There are {kind}s 0 to {ids}{listed}, as the original model counts."
            if kind == "token":
                remedy = "Write it as the tokenizer does, its mark of a space included: ▁house, Ġhouse."
        return DataError(f"{self.directory}: {said}", remedy)


def _plain(text: str) -> Answer:
    """An answer that no step gives."""
    return Answer(text=text, step=None, command="", fields={})


def _position(question: Question, place: Ranked) -> int | None:
    """Position of the unit that a question is about; None if it is not on this axis."""
    if question.part == "token":  # its text, which may be quoted, or its id
        text, labels = question.text, place.labels or ()
        for name in (text, text.strip("\"'")):
            if name in labels:
                return labels.index(name)
        return place.place_of(int(text)) if text.isdecimal() and len(text) < 12 else None
    if question.side not in (None, place.side) or question.layer not in (None, place.layer):
        return None
    if question.expert is not None and _owner(place) != f"expert {question.expert}":
        return None
    if question.kind is not None and (question.kind == "cross") != (place.attention == "cross"):
        return None
    return None if question.number is None else place.place_of(question.number)


NEEDED = {
    "special and added": "it is a special or added token, or a config names it",
    "asked for": "--keep asks for it",
    "characters and bytes": "single characters and bytes are always kept",
    "on the way to them": "kept tokens are merged from it",
    "up to a multiple": "the number of tokens is filled up with it",
    "no token": "a config names this id",
}
"""Reason for which a token stays -> in words."""
DIGITS = 12
"""Number of digits of a SHA-256 that are shown."""


def cuts(decision: Decision) -> Shown:
    """The cut between units that stay and units that go, on each axis.

    The gap between the values on either side of the cut-off is divided by the standard deviation of the values: if
    the quotient is near 0, another text may choose otherwise.
    """
    rows = []
    for place in decision.places:
        values = np.zeros(1) if place.values is None else place.values
        lowest, highest = (
            (int(place.ids[at[0]]), float(values[at[0]])) if at else None for at in nearest(place, 1)
        )
        spread = float(np.nanstd(values))
        rows.append(
            {
                "place": place_name(decision, place),
                "count": place.count,
                "kept": place.num_kept,
                "cutoff": place.cutoff,
                "lowest_kept": lowest,
                "highest_dropped": highest,
                "sure": (lowest[1] - highest[1]) / spread if lowest and highest and spread > 0 else None,
            }
        )
    columns = {
        "place": "{place}",
        "before": "{count:,}",
        "kept": "{kept:,}",
        "cut-off": "{cutoff!n}",
        "lowest kept": "{lowest_kept[0]}: {lowest_kept[1]!n}",
        "highest removed": "{highest_dropped[0]}: {highest_dropped[1]!n}",
        "gap / spread": "{sure:.3f}",
    }
    return Shown.of("Where each place was cut", rows, columns)


def nearest(place: Ranked, most: int) -> tuple[list[int], list[int]]:
    """Positions of the units that stay with the lowest values, and that go with the highest: nearest first.

    Units that stay for another reason than their value are left out.
    """
    if place.values is None:
        return [], []
    known = np.isfinite(place.values)
    by_value = place.kept & known
    if place.reason is not None:
        by_value &= place.reason == 0
    if place.cutoff is not None:
        by_value &= place.values >= place.cutoff
    ascending = np.argsort(place.values, kind="stable")
    descending = np.argsort(-place.values, kind="stable")
    dropped = ~place.kept & known
    return ascending[by_value[ascending]][:most].tolist(), descending[dropped[descending]][:most].tolist()


def place_name(decision: Decision, place: Ranked) -> str:
    """Name of an axis in words: "encoder layer 3", "decoder layer 1, cross-attention", "decoder layers"."""
    if decision.part == "token":
        return "vocabulary"
    if decision.part == "layer":
        return f"{place.side} layers"
    if place.layer is None:
        return place.name
    where = f"{place.side} layer {place.layer}"
    if place.attention == "cross":
        where += f", {KIND_NAMES['cross']}"
    if decision.part == "unit" and (owner := _owner(place)):
        where += f", {owner}"
    group = place.cut.rpartition(", ")[2]
    return f"{where}, {group}" if group.startswith("group ") else where


def _owner(place: Ranked) -> str:
    """The experts whose hidden units an axis holds: "expert 7", "the experts"; "" for a dense FFN."""
    parent, _, last = module_of(place.name).rpartition(".")
    number = last.removeprefix("expert_")
    if "shared" in last:
        return "the shared experts"
    if number.isdecimal() and parent.endswith("experts"):
        return f"expert {number}"
    return "the experts" if last.endswith("experts") else ""


def component_name(decision: Decision, place: Ranked, at: int) -> str:
    """The unit at a position in words: "Expert 7 of encoder layer 3"."""
    number = int(place.ids[at])
    if decision.part == "token":
        label = place.labels[at] if place.labels else ""
        return f'Token "{label}" (id {number})' if label else f"Id {number}"
    if decision.part == "layer":
        return f"{place.side.capitalize()} layer {number}"
    if place.layer is None:
        return f"{decision.part.capitalize()} {number}"
    of = f"{_owner(place) or 'the FFN'} of " if decision.part == "unit" else ""
    if decision.part == "head":
        of = f"the {'cross-attention' if place.attention == 'cross' else 'self-attention'} of "
    return f"{decision.part.capitalize()} {number} of {of}{place.side} layer {place.layer}"


def sentence(decision: Decision, place: Ranked, at: int, subject: str) -> str:
    """Say in one or two sentences why a unit stayed or went.

    Args:
        decision: the choice.
        place: one of the decision's axes.
        at: position of the unit on the axis.
        subject: the unit in words.
    """
    is_kept, cutoff, values = bool(place.kept[at]), place.cutoff, place.values
    said = f"{subject} was {'kept' if is_kept else 'removed'}"
    if values is None or place.ranks is None:
        on = origin_text(decision.origin, None, "; ")
        return f"{said}: {decision.how}; it has no value{on}.{_alone(place, at)}"
    value, metric = float(values[at]), place.metric or decision.metric
    on = "; of the weights alone"
    if not place.metric:  # another metric than elsewhere is one of the weights
        on = origin_text(decision.origin, place.tokens, "; measured on ") or on
    if not np.isfinite(value):
        return f"{said}; nothing is known of its {metric}."
    if decision.part == "token":
        bound = int(decision.bound or 1)
        reason = "" if place.reason is None or not place.reason[at] else place.reasons[place.reason[at] - 1]
        why = NEEDED.get(reason, reason) if reason else f"tokens that occur {times(bound)} or more are kept"
        return f"{said}: it occurs {times(int(value))}; {why}{on}."
    others = decision.together(place)
    together = np.concatenate([other.values for other in others if other.values is not None])
    kept = np.concatenate([other.kept for other in others])
    named = f"score by {metric}" if decision.part == "unit" else metric
    said += f": its {named} {number_text(value)} is rank {int(place.ranks[at]):,} of {len(kept):,}"
    if cutoff is not None:
        apart = f"{number_text(abs(value - cutoff))} {'above' if value > cutoff else 'below'} "
        said += f", {'' if value == cutoff else apart}the cut-off {number_text(cutoff)}"
    equal, more = kept[together == value], ""
    if equal.any() and not equal.all():
        more = (
            f" {len(equal):,} have this value, of which {int(equal.sum()):,} are kept: their order decided."
        )
    theta, own = decision.thresholds.get("model", decision.thresholds.get(place.side)), np.nan_to_num(values)
    before = float(own[place.ranks < place.ranks[at]].sum() / (own.sum() or 1.0))
    if theta is not None:
        more += f" Those before it hold {before:.2%} of the layer's {metric}; the threshold is {theta:.2%}."
    is_spared = before > theta if theta is not None else cutoff is None or value < cutoff
    if is_kept and is_spared and not kept.all():
        said += f"; {decision.least}" if decision.least else ""
    return f"{said}{on}.{more}{_alone(place, at)}"


def times(count: int) -> str:
    """A number of occurrences in words: "once", "3 times"."""
    return "once" if count == 1 else f"{count:,} times"


def _alone(place: Ranked, at: int) -> str:
    """The languages or texts that would keep the unit alone."""
    keeping = [name for name, marked in place.alone.items() if marked[at]]
    others = [name for name in place.alone if name not in keeping]
    if not place.alone:
        return ""
    if not keeping or not others:
        return f" {'Each' if keeping else 'None'} alone would keep it: {', '.join(place.alone)}."
    return f" Alone, {', '.join(keeping)} would keep it; {', '.join(others)} would not."


def origin_text(origin: Origin, tokens: int | None, before: str = "") -> str:
    """The text that values were measured on, after `before`; empty if there is none."""
    tokens = origin.tokens if tokens is None else tokens
    counts = {"tokens": tokens, "sentences": origin.sentences}
    counted = " in ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    texts = ", ".join(origin.texts)
    files = " and ".join(f"{name} (sha256 {digest[:DIGITS]}…)" for name, digest in origin.files)
    parts = [
        " of ".join(filter(None, (counted, texts))),
        f"split {origin.split}" if origin.split else "",
        f"sha256 {origin.sha256[:DIGITS]}…" if origin.sha256 else "",
    ]
    if files:
        parts.insert(2, f"in {files}" if any(parts[:2]) else files)
    said = ", ".join(filter(None, parts))
    return f"{before}{said}" if said else ""


def summary(decision: Decision) -> Iterator[str]:
    """Yield lines: how many units stay, by which metric and budget, measured on which text."""
    chosen = f"{sum(place.num_kept for place in decision.places):,} of "
    chosen += f"{sum(place.count for place in decision.places):,} {decision.part}s kept"
    by = (
        f": {decision.how}; no values"
        if decision.metric is None
        else f" by {decision.metric}; {decision.how}"
    )
    yield f"{chosen}{by}."
    if decision.least:
        yield f"But {decision.least}."
    if decision.thresholds:
        named = ", ".join(f"{side} {theta:.4f}" for side, theta in decision.thresholds.items())
        yield f"Threshold theta: {named}."
    tokens = [place.tokens for place in decision.places if place.tokens is not None]
    found = origin_text(decision.origin, max(tokens, default=None))
    if found or decision.metric is not None:
        most = "at most " if len(set(tokens)) > 1 else ""
        yield f"Measured on {most}{found}." if found else "Of the weights alone."


EITHER_SIDE = 4
"""Number of units on each side of a cut that --explain shows; all units of an axis with no more than twice that."""


def cut_blocks(decision: Decision) -> Blocks:
    """Yield the metric and the text, and a row for each axis."""
    yield from summary(decision)
    if decision.metric is not None:
        yield cuts(decision)


def decision_blocks(decision: Decision | None) -> Blocks:
    """Yield the cut on each axis, then the units on either side of it, highest first; all units of small axes."""
    if decision is None:
        yield "Nothing was chosen by a value, or among parts: the options say it all."
        return
    yield from cut_blocks(decision)
    if decision.metric is None:
        return
    rows, is_cut = [], False
    for place in decision.places:
        ranks, margins = place.ranks, place.margins
        if place.values is None or ranks is None:
            continue
        chosen = [*range(place.count)]
        if len(chosen) > 2 * EITHER_SIDE:
            kept, dropped = nearest(place, EITHER_SIDE)
            chosen, is_cut = [*kept, *dropped], True
        for at in sorted(chosen, key=ranks.__getitem__):
            name = str(place.ids[at])
            if place.labels is not None:
                name = f"{name} {place.labels[at].replace(chr(10), chr(92) + 'n')}"
            rows.append(
                {
                    "place": place_name(decision, place),
                    decision.part: name,
                    "value": number_text(float(place.values[at])),
                    "rank": f"{ranks[at]:,}",
                    "margin": None if margins is None else number_text(float(margins[at])),
                    "": "kept" if place.kept[at] else "removed",
                }
            )
    title = f"{decision.part.capitalize()}s" + (" on either side of the cut" if is_cut else "")
    yield Shown(title, rows)
