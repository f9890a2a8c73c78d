"""A choice of units: every unit's value and rank, and the cut-off between units that stay and units that go.

`selection.cut` makes the `Decision`, and the `Rewrite` holds it. `results.decisions` writes this value as JSON
and reads it again: pydantic checks the fields by their annotations. Higher values stay, whatever the metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ConfigDict, Field

from prunecli.model.structure import statistics_files

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Count = Annotated[int, Field(ge=0, le=10**18)]


@dataclass(frozen=True)
class Origin:
    """The text that values were measured on. If all fields are empty, they were measured on no text.

    Attributes:
        files: name and SHA-256 of the files of statistics.
        texts: pairs of languages, languages or texts by name.
        split: split of the text, if known.
        sentences: number of sentences, if known.
        tokens: number of tokens, if known and the same on all axes.
        sha256: digest of the text, if known.
    """

    files: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    split: str | None = None
    sentences: Count | None = None
    tokens: Count | None = None
    sha256: str | None = None

    @classmethod
    def of_text(cls, text: Mapping[str, Any] | None) -> Origin:
        """The text that a history describes, see `evaluation.on_text.describe`."""
        if text is None:
            return cls()
        names = text.get("pairs", text.get("files", ()))
        return cls((), tuple(names), text.get("split"), text.get("sentences"), sha256=text.get("sha256"))


FROM_JSON = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, extra="ignore")


@dataclass(frozen=True, eq=False)
class Ranked:
    """The units of one axis, or of one group of them, in the order of their ids.

    Attributes:
        name: name of the axis: "model.encoder.layers.3.ffn.experts", "encoder.layers", "tokens".
        side: side of the stack; "" for tokens.
        layer: number of the layer, as `ids` count; None for layers and tokens.
        ids: `[n]`, ascending: of experts, heads and layers those of the original model, of hidden units and tokens
            those of the step's source (in a file those of the original model too).
        kept: `[n]`, whether a unit stays.
        attention: "encoder", "decoder" or "cross"; "" if the units are no heads.
        values: `[n]`, what the units were ranked by; NaN: unknown. If None, they were not ranked.
        cut: name of the comparison between several axes; "": the axis is compared alone.
        tokens: number of tokens that the values were measured on, if known.
        metric: metric of the values, if another one than that of the decision; else "".
        alone: language or text -> `[n]`, whether a unit would stay for it alone.
        reasons: reasons other than the value for which units stay.
        reason: `[n]`, 1 + number of the reason; 0: the value alone. If None, 0 for all.
        labels: the text of tokens; "" if an id has none.
        cutoff: the value that was asked for, or the least value that stays by its value in this comparison; None if
            nothing goes, or nothing stays by its value. The decision sets it.
        ranks: `[n]`: 1 for the highest value of the comparison. Of equal values those that stay come first, then the
            order decides. None if there are no values. The decision sets them.
    """

    __pydantic_config__ = FROM_JSON

    name: str
    side: str
    layer: Count | None
    ids: NDArray[np.int64]
    kept: Bools
    attention: str = ""
    values: Floats | None = None
    cut: str = ""
    tokens: Count | None = None
    metric: str = ""
    alone: Mapping[str, Bools] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    reason: NDArray[np.uint8] | None = None
    labels: tuple[str, ...] | None = None
    cutoff: float | None = None
    ranks: NDArray[np.int64] | None = None

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
            ids: all units.
            kept: the units that stay.
            values: a value for each id, in their order.
            more: the other fields.
        """
        numbers = np.asarray(ids, np.int64)
        order = np.argsort(numbers, kind="stable")
        found = None if values is None else np.asarray(values, np.float64)[order]
        marked = np.isin(numbers[order], np.asarray(kept, np.int64))
        return cls(*axis, ids=numbers[order], kept=marked, values=found, **more)

    @property
    def module(self) -> str:
        """Name of the module that holds the units, such as "model.encoder.layers.3.ffn"; "" if there is none."""
        return "" if self.layer is None else self.name.rpartition(".")[0]

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.ids)

    @property
    def num_kept(self) -> int:
        """Number of units that stay."""
        return int(self.kept.sum())

    @property
    def group(self) -> str:
        """Name of the comparison."""
        return self.cut or self.name

    @property
    def margins(self) -> Floats | None:
        """`[n]`: value less cut-off; None if either is missing."""
        return None if self.values is None or self.cutoff is None else self.values - self.cutoff

    def unit(self, at: int) -> dict[str, Any]:
        """The unit at a position: id, text, whether it stays; value, rank, cut-off and margin, None if unknown."""
        values, margins = self.values, self.margins
        return {
            "id": int(self.ids[at]),
            "text": self.labels and self.labels[at],
            "kept": bool(self.kept[at]),
            "value": None if values is None or not np.isfinite(values[at]) else float(values[at]),
            "rank": None if self.ranks is None else int(self.ranks[at]),
            "cutoff": self.cutoff,
            "margin": None if margins is None or not np.isfinite(margins[at]) else float(margins[at]),
        }

    def place_of(self, number: int) -> int | None:
        """Position of an id in the arrays; None if the axis does not have the id."""
        return next(iter(np.flatnonzero(self.ids == number).tolist()), None)


@dataclass(frozen=True, eq=False)
class Decision:
    """One choice of units.

    Attributes:
        part: kind of the units: "expert", "head", …
        places: the axes that were up for the choice.
        metric: what the values are; None: there are none.
        how: how many units stay, and which, in a few words.
        least: why some stay below the cut-off; "": none can.
        bound: the value that was asked for; None: the cut-off follows from how many stay.
        thresholds: theta of 2212.09811, eq. 5, under `"model"` or of each side: a layer keeps the experts before which
            less than this part of its metric lies.
        origin: what the values were measured on.
        step: number of the entry in the history of config.json, from 0; None: not in a history yet.
        command: the command of this entry.
    """

    __pydantic_config__ = FROM_JSON

    part: str
    places: tuple[Ranked, ...]
    metric: str | None = None
    how: str = ""
    least: str = ""
    bound: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    step: Count | None = None
    command: str = ""

    def __post_init__(self) -> None:
        """Give the places their cut-offs and ranks.

        Raises:
            ValueError: places that are compared with each other do not all have values.
        """
        together: dict[str, list[Ranked]] = {}
        for place in self.places:
            together.setdefault(place.group, []).append(place)
        cut = {group: iter(self._cut(places)) for group, places in together.items()}
        object.__setattr__(self, "places", tuple(next(cut[place.group]) for place in self.places))

    @cached_property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """Name of an axis -> ids of the units that stay, ascending."""
        found: dict[str, tuple[int, ...]] = {}
        for place in self.places:
            found[place.name] = (*found.get(place.name, ()), *place.ids[place.kept].tolist())
        return found

    def read_from(self, step: Mapping[str, Any]) -> Decision:
        """The decision with the files of statistics that an entry of history names."""
        named = tuple((str(file["file"]), str(file["sha256"])) for file in statistics_files(step))
        return replace(self, origin=replace(self.origin, files=named)) if named else self

    def together(self, place: Ranked) -> list[Ranked]:
        """The places whose units are compared with those of `place`, which is one of them."""
        return [other for other in self.places if other.group == place.group]

    def _cut(self, places: list[Ranked]) -> list[Ranked]:
        values = [place.values for place in places if place.values is not None]
        if not values:
            return places
        if len(values) < len(places):
            raise ValueError(f"{places[0].name}: compared with units that have no values")
        kept, value = np.concatenate([place.kept for place in places]), np.concatenate(values)
        dropped = value[~kept & np.isfinite(value)]
        cutoff = self.bound
        if cutoff is None and len(dropped):
            cutoff = min(value[kept & (value >= dropped.max())].tolist(), default=None)
        ranks = np.argsort(np.lexsort((~kept, -value))) + 1
        parts = np.split(ranks, np.cumsum([len(own) for own in values])[:-1])
        return [replace(place, cutoff=cutoff, ranks=own) for place, own in zip(places, parts, strict=True)]
