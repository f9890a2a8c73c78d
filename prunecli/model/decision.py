"""What a method chose and by what: every component's value, its rank, and the cut between what stays and what goes.

A `Decision` is made where the choice is made, in a method's `plan`, and travels with the `Rewrite`: what is written,
printed and drawn of it is this one value. Higher values stay, whatever the metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from prunecli.model.axes import Kind

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Count = Annotated[int, Field(ge=0, le=10**18)]


@dataclass(frozen=True)
class Origin:
    """The text that values were measured on. If all fields are empty, they were measured on no text.

    Result files store it as it is and pydantic checks it when it is read: the annotations are the schema.

    Attributes:
        files: of statistics: name and SHA-256.
        texts: pairs of languages, languages or texts by name.
        split: of the text, where it is known.
        sentences: how many, where it is known.
        tokens: likewise, where it is the same in all places.
        sha256: of the text, where it is known.
    """

    files: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    split: str | None = None
    sentences: Count | None = None
    tokens: Count | None = None
    sha256: str | None = None

    @classmethod
    def of_text(cls, text: Mapping[str, Any] | None) -> Origin:
        """Of what a history says of text: see `evaluation.on_text.describe`."""
        if text is None:
            return cls()
        names = text.get("pairs", text.get("files", ()))
        return cls((), tuple(names), text.get("split"), text.get("sentences"), sha256=text.get("sha256"))

    def read_from(self, step: Mapping[str, Any]) -> Origin:
        """With the files of statistics that an entry of history names."""
        files = step.get("statistics", [])
        files = files if isinstance(files, list) else [files]
        return replace(self, files=tuple((str(file["file"]), str(file["sha256"])) for file in files))


@dataclass(frozen=True, eq=False)
class Ranked:
    """The components of one place, in the order of their ids.

    Attributes:
        name: of the axis: "model.encoder.layers.3.ffn.experts", "encoder.layers", "tokens".
        side: of the stack; "" for tokens.
        layer: its number, as `ids` count; None for layers and tokens.
        ids: `[n]`, ascending: of experts and heads those of the original model, of others those of the step's source
            (in a file those of the original model too).
        kept: `[n]`, which stay.
        attention: "encoder", "decoder" or "cross"; "" if the components are no heads.
        values: `[n]`, by what they were ranked; None: by nothing. NaN: nothing is known of one.
        cut: what is compared with each other has one name; "": the place alone.
        tokens: that the values were measured on here, where it is known.
        metric: of the values here, where it is another one than elsewhere; else "".
        alone: language or text -> `[n]`, which would stay for it alone.
        reasons: for what some stay that their value would not keep.
        reason: `[n]`, 1 + number of the reason; 0: none but the value. None: none of them.
        labels: of tokens, their text; "" where an id has none.
    """

    name: str
    side: str
    layer: int | None
    ids: NDArray[np.int64]
    kept: Bools
    attention: str = ""
    values: Floats | None = None
    cut: str = ""
    tokens: int | None = None
    metric: str = ""
    alone: Mapping[str, Bools] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    reason: NDArray[np.uint8] | None = None
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        axis: tuple[str, str, int | None],
        ids: Sequence[int],
        kept: Sequence[int],
        values: ArrayLike | None = None,
        **more: Any,
    ) -> Ranked:
        """From ids in any order.

        Args:
            axis: name, side, layer.
            ids: all components.
            kept: those that stay.
            values: one of each id, in their order.
            more: the other fields.
        """
        numbers = np.asarray(ids, np.int64)
        order = np.argsort(numbers, kind="stable")
        found = None if values is None else np.asarray(values, np.float64)[order]
        marked = np.isin(numbers[order], np.asarray(kept, np.int64))
        return cls(*axis, ids=numbers[order], kept=marked, values=found, **more)

    @property
    def module(self) -> str:
        """Name of the module whose components these are, such as "model.encoder.layers.3.ffn"; "" if there is none."""
        return "" if self.layer is None else self.name.rpartition(".")[0]

    @property
    def num_kept(self) -> int:
        """How many stay."""
        return int(self.kept.sum())

    def place_of(self, number: int) -> int | None:
        """Where an id stands in the arrays; None: it was not there."""
        place = int(np.searchsorted(self.ids, number))
        return place if place < len(self.ids) and int(self.ids[place]) == number else None


@dataclass(frozen=True)
class Cut:
    """Where what stays parts from what goes, among all that is compared with each other.

    Attributes:
        count, kept: how many there are, and stay.
        cutoff: the least value that stays by its value, or the value that was asked for; None: there is none, as
            nothing goes, or nothing stays by its value.
        highest_dropped: the largest value that goes; None: nothing goes.
    """

    count: int
    kept: int
    cutoff: float | None
    highest_dropped: float | None


@dataclass(frozen=True, eq=False)
class Decision:
    """One choice of components.

    Attributes:
        part: what was chosen among.
        places: where; those that were not up for it are left out.
        metric: what the values are; None: there are none.
        how: how many stay, and which, in a few words.
        least: why some stay below the cut-off; "": none can.
        bound: the value that was asked for; None: the cut-off follows from how many stay.
        thresholds: theta of 2212.09811, eq. 5, under `"model"` or of each side: a layer keeps those before which less
            than this part of its metric lies.
        origin: what the values were measured on.
    """

    part: Kind
    places: tuple[Ranked, ...]
    metric: str | None = None
    how: str = ""
    least: str = ""
    bound: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """The cut of each place."""
        found = {key: self._cut(own) for key, own in self._together.items()}
        return tuple(found[key] for key in self._keys)

    @cached_property
    def ranks(self) -> tuple[NDArray[np.int64] | None, ...]:
        """Of each place `[n]`: 1 of the highest of its cut. Of equal values what stays comes first, then the order."""
        found: list[NDArray[np.int64] | None] = [None] * len(self.places)
        for own in self._together.values():
            kept, values = self._joined(own)
            if values is not None:
                ranks = np.argsort(np.lexsort((~kept, -values))) + 1
                ends = np.cumsum([len(self.places[index].ids) for index in own])
                for index, part in zip(own, np.split(ranks, ends[:-1]), strict=True):
                    found[index] = part
        return tuple(found)

    def margins(self, index: int) -> Floats | None:
        """Of one place `[n]`: value less cut-off; None where there is no cut-off or no value."""
        values, cutoff = self.places[index].values, self.cuts[index].cutoff
        return None if values is None or cutoff is None else values - cutoff

    def together(self, index: int) -> list[Ranked]:
        """The places whose components are compared with those of this one: it, and others."""
        return [self.places[other] for other in self._together[self._keys[index]]]

    @cached_property
    def _keys(self) -> tuple[str, ...]:
        return tuple(place.cut or place.name for place in self.places)

    @cached_property
    def _together(self) -> dict[str, list[int]]:
        together: dict[str, list[int]] = {}
        for index, key in enumerate(self._keys):
            together.setdefault(key, []).append(index)
        return together

    def _joined(self, own: Sequence[int]) -> tuple[Bools, Floats | None]:
        """Marks and values of several places, one after another; no values if a place has none."""
        places = [self.places[index] for index in own]
        known = [place.values for place in places if place.values is not None]
        values = np.concatenate(known) if len(known) == len(places) else None
        return np.concatenate([place.kept for place in places]), values

    def _cut(self, own: Sequence[int]) -> Cut:
        kept, values = self._joined(own)
        cutoff = highest = None
        if values is not None:
            dropped = values[~kept & np.isfinite(values)]
            highest = float(dropped.max()) if len(dropped) else None
            cutoff = self.bound
            if cutoff is None and highest is not None:
                staying = values[kept & (values >= highest)]
                cutoff = float(staying.min()) if len(staying) else None
        return Cut(len(kept), int(kept.sum()), cutoff, highest)
