"""Decisions in words and rows: why a unit stayed or went, and the cut on each axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prunecli.model.attention import KIND_NAMES
from prunecli.model.axes import module_of
from prunecli.model.decision import Decision, Origin, Ranked

NEEDED: Mapping[str, str] = {
    "special and added": "it is a special or added token, or a config names it",
    "asked for": "--keep asks for it",
    "characters and bytes": "single characters and bytes always stay",
    "on the way to them": "tokens that stay are merged from it",
    "up to a multiple": "--multiple-of fills up with it",
    "no token": "a config names this id",
}
"""Reason for which a token stays -> in words."""
DIGITS = 12
"""Number of digits of a SHA-256 that are shown."""


@dataclass(frozen=True)
class PlaceRow:
    """The cut between units that stay and units that go, on one axis.

    Attributes:
        place: name of the axis in words.
        count, kept: numbers of units before and after.
        cutoff: see `Ranked`.
        lowest_kept, highest_dropped: id and value of the units of this axis on either side of the cut-off.
        sure: difference of these values divided by the standard deviation of the axis' values: if this is near 0,
            another text may choose otherwise.
    """

    place: str
    count: int
    kept: int
    cutoff: float | None
    lowest_kept: tuple[int, float] | None = None
    highest_dropped: tuple[int, float] | None = None
    sure: float | None = None


CUT_COLUMNS: Mapping[str, Callable[[PlaceRow], str | None]] = {
    "place": lambda row: row.place,
    "before": lambda row: f"{row.count:,}",
    "kept": lambda row: f"{row.kept:,}",
    "cut-off": lambda row: None if row.cutoff is None else number_text(row.cutoff),
    "lowest kept": lambda row: _numbered(row.lowest_kept),
    "highest dropped": lambda row: _numbered(row.highest_dropped),
    "gap / spread": lambda row: None if row.sure is None else f"{row.sure:.3f}",
}
"""Column of the table of cuts -> text of a cell, None if there is nothing to show."""


def place_rows(decision: Decision) -> list[PlaceRow]:
    """A row for each axis."""
    rows = []
    for place in decision.places:
        row = PlaceRow(place_name(decision, place), place.count, place.num_kept, place.cutoff)
        if place.values is not None:
            values = place.values
            lowest, highest = (
                (int(place.ids[at[0]]), float(values[at[0]])) if at else None for at in nearest(place, 1)
            )
            spread = float(np.nanstd(values))
            sure = (lowest[1] - highest[1]) / spread if lowest and highest and spread > 0 else None
            row = replace(row, lowest_kept=lowest, highest_dropped=highest, sure=sure)
        rows.append(row)
    return rows


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
    if owner := _owner(decision, place):
        where += f", {owner}"
    group = place.cut.rpartition(", ")[2]
    return f"{where}, {group}" if group.startswith("group ") else where


def _owner(decision: Decision, place: Ranked) -> str:
    """The experts whose hidden units an axis holds: "expert 7", "the experts"; "" for a dense FFN."""
    if decision.part != "unit":
        return ""
    module = module_of(place.name).rpartition(".")
    if "shared" in module[2]:
        return "the shared experts"
    if module[2].removeprefix("expert_").isdecimal() and module[0].endswith("experts"):
        return f"expert {module[2].removeprefix('expert_')}"
    return "the experts" if module[2].endswith("experts") else ""


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
    of = f"{_owner(decision, place) or 'the FFN'} of " if decision.part == "unit" else ""
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
    said = f"{subject} was {'kept' if is_kept else 'dropped'}"
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
        why = NEEDED.get(reason, reason) if reason else f"tokens that occur {times(bound)} or more stay"
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
        more = f" {len(equal):,} have this value, of which {int(equal.sum()):,} stay: their order decided."
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


def origin_text(origin: Origin, tokens: int | None = None, before: str = "") -> str:
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


def number_text(value: float) -> str:
    """A value with four digits; a whole number with all of them."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def _numbered(unit: tuple[int, float] | None) -> str | None:
    """An id and its value, such as "7: 0.5"."""
    return None if unit is None else f"{unit[0]}: {number_text(unit[1])}"


def summary(decision: Decision) -> Sequence[str]:
    """Lines: how many units stay, by which metric and budget, measured on which text."""
    chosen = f"{sum(place.num_kept for place in decision.places):,} of "
    chosen += f"{sum(len(place.ids) for place in decision.places):,} {decision.part}s kept"
    if decision.metric is None:
        lines = [f"{chosen}: {decision.how}; no values."]
    else:
        lines = [f"{chosen} by {decision.metric}; {decision.how}."]
    if decision.least:
        lines.append(f"But {decision.least}.")
    if decision.thresholds:
        named = ", ".join(f"{side} {theta:.4f}" for side, theta in decision.thresholds.items())
        lines.append(f"Threshold theta: {named}.")
    tokens = [place.tokens for place in decision.places if place.tokens is not None]
    found = origin_text(decision.origin, max(tokens, default=None))
    if found or decision.metric is not None:
        most = "at most " if len(set(tokens)) > 1 else ""
        lines.append(f"Measured on {most}{found}." if found else "Of the weights alone.")
    return lines
