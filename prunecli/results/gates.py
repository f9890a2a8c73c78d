"""Gate statistics as additive sums (2212.09811, 4.1-4.2; 2510.13999, eq. 9): read, merge, write.

Symbols: `layers` counts the sparse layers, `experts` the experts of the original model's layer. Ids are
always the original ones; an expert that a checkpoint no longer holds has zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from prunecli.architectures.records import Side
from prunecli.errors import StatisticsError
from prunecli.results.arrays import checked_array
from prunecli.results.header import asked
from prunecli.results.tabled import Tabled, Tables

ANY = "X"
"""In a pair of the authors' files, "any language": `eng_Latn-X` sums over all targets."""

Array = NDArray[Any]
Mode = Literal["forced", "beam", "published", "text"]
SUMS = ("tokens", "top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")
ROUTED_SUMS = (
    "routed",
    "gate_sq_sum",
    "norm_sum",
    "norm_sq_sum",
    "gate_norm_sum",
    "gate_norm_sq_sum",
    "norm_max",
)
"""Over the tokens that are routed to an expert; what is collected of language models beside SUMS."""
TEXT_SUMS = (*SUMS, *ROUTED_SUMS)
COUNTS = ("tokens", "top1", "top2", "routed")
MAXIMA = ("norm_max",)
"""Those of ROUTED_SUMS that are no sums: the larger of two stands for both."""


def _absent() -> Array:
    return np.zeros((0, 0))


@dataclass(frozen=True)
class GateSums:
    """Sums over the real tokens of one entry: no padding, no finished beams.

    The gate g is the softmax over all experts, before the renormalisation over the chosen ones; of language models
    it is the weight by which the router multiplies an expert's output, 0 for a token that is not routed to it, and
    ranks go by it. f is an expert's output before that.

    Attributes:
        tokens: `[layers]`, tokens routed.
        top1: `[layers, experts]`, tokens that rank the expert first.
        top2: `[layers, experts]`, tokens that rank it second.
        gate_sum: `[layers, experts]`, sum of g over all tokens.
        conf1_sum: `[layers, experts]`, sum of g over the tokens that rank it first.
        conf2_sum: `[layers, experts]`, the same over the tokens that rank it second.
        routed: `[layers, experts]`, tokens routed to the expert. This and all that follow are `[0, 0]` where they
            are not collected.
        gate_sq_sum: `[layers, experts]`, sum of g² over those.
        norm_sum, norm_sq_sum: `[layers, experts]`, sums of ‖f‖ and of ‖f‖² over those.
        gate_norm_sum, gate_norm_sq_sum: `[layers, experts]`, sums of g‖f‖ and of g²‖f‖² over those.
        norm_max: `[layers, experts]`, the largest ‖f‖ among those, 0 without any.
    """

    tokens: Array
    top1: Array
    top2: Array
    gate_sum: Array
    conf1_sum: Array
    conf2_sum: Array
    routed: Array = field(default_factory=_absent)
    gate_sq_sum: Array = field(default_factory=_absent)
    norm_sum: Array = field(default_factory=_absent)
    norm_sq_sum: Array = field(default_factory=_absent)
    gate_norm_sum: Array = field(default_factory=_absent)
    gate_norm_sq_sum: Array = field(default_factory=_absent)
    norm_max: Array = field(default_factory=_absent)

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are collected: SUMS or TEXT_SUMS."""
        return SUMS if self.routed.shape != self.top1.shape else TEXT_SUMS

    def __add__(self, other: GateSums) -> GateSums:
        """What both hold, together."""
        names = self.names if len(self.names) <= len(other.names) else other.names
        return GateSums(**{name: _joined(name)(getattr(self, name), getattr(other, name)) for name in names})

    def plus(self, layers: Mapping[int, GateSums]) -> GateSums:
        """With sums of some layers, `[1]` and `[1, experts]` of each, added under the layer's number."""
        sums = GateSums(**{name: getattr(self, name).copy() for name in self.names})
        for index, row in layers.items():
            for name in self.names:
                array = getattr(sums, name)
                array[index] = _joined(name)(array[index], getattr(row, name)[0])
        return sums

    def of_layers(self, rows: Sequence[int]) -> GateSums:
        """Those of some layers, in this order."""
        return GateSums(**{name: getattr(self, name)[list(rows)] for name in self.names})

    @classmethod
    def zeros(cls, layers: int, experts: int, names: Sequence[str] = SUMS) -> GateSums:
        """No tokens yet: integer counts, float64 sums."""
        return cls(
            **{
                name: np.zeros(_shape(name, layers, experts), np.int64 if name in COUNTS else np.float64)
                for name in names
            }
        )


def _joined(name: str) -> Callable[[Array, Array], Array]:
    return np.maximum if name in MAXIMA else np.add


def _shape(name: str, layers: int, experts: int) -> tuple[int, ...]:
    return (layers,) if name == "tokens" else (layers, experts)


@dataclass(frozen=True)
class GateStatistics(Tabled):
    """gates.json: gate sums per language pair, or of language models per text.

    Attributes:
        fingerprint: of the checkpoint that was run; None for the authors' published files.
        model_type: as in config.json; None for published files.
        mode: teacher-forced, beam search, or published; "text" of language models.
        layers: names of the sparse layers, encoder first.
        num_experts: of an original layer.
        top_k: experts per token.
        entries: `"SOURCE-TARGET"` -> sums, or the text's name -> sums. In published files either language may be
            `X`, and the ratios stand for the sums over one token.
        lacks: names of the sums that the file does not give; zeros stand for them.
        dtype: that the model was computed in; None where the file does not say it.
        routers: `router_fingerprint` of the checkpoint that was run; None where the file does not say it.
        split: of the text, where the command line of the file names it.
    """

    FORMAT: ClassVar[str] = "prunecli.gates/1"
    TEXT_FORMAT: ClassVar[str] = "prunecli.gates/2"
    """With ROUTED_SUMS, and a text's name for each entry."""

    fingerprint: str | None
    model_type: str | None
    mode: Mode
    layers: tuple[str, ...]
    num_experts: int
    top_k: int
    entries: Mapping[str, GateSums]
    lacks: frozenset[str] = frozenset()
    dtype: str | None = None
    routers: str | None = None
    split: str | None = None

    @property
    def format(self) -> str:
        """Of the file that they are written to."""
        return self.TEXT_FORMAT if self.mode == "text" else self.FORMAT

    @property
    def names(self) -> tuple[str, ...]:
        """The sums that an entry of such a file holds."""
        return TEXT_SUMS if self.mode == "text" else SUMS

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> GateStatistics:
        """The statistics in a gates.json.

        Raises:
            StatisticsError: of another format, misshapen, with values that no run could give.
        """
        if payload["format"] not in (cls.FORMAT, cls.TEXT_FORMAT):
            raise StatisticsError(
                f"{path}: format is {payload['format']!r}, not {cls.FORMAT!r} or {cls.TEXT_FORMAT!r}.",
                "Give a file that `collect-gates` wrote.",
            )
        names = SUMS if payload["format"] == cls.FORMAT else TEXT_SUMS
        try:
            layers = tuple(str(name) for name in payload["layers"])
            experts = int(payload["num_experts"])
            model = payload["model"]
            entries = {
                str(pair): _sums(names, sums, len(layers), experts, f"{path}: {pair}")
                for pair, sums in payload["entries"].items()
            }
            statistics = cls(
                fingerprint=str(model["fingerprint"]),
                model_type=str(model["model_type"]),
                mode=payload["mode"],
                layers=layers,
                num_experts=experts,
                top_k=int(payload["top_k"]),
                entries=entries,
                dtype=payload.get("dtype"),
                routers=str(model["routers"]) if "routers" in model else None,
                split=asked(payload, "--split"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
            raise StatisticsError(f"{path}: the file {missing}.", "Collect the statistics again.") from error
        return _require_entries(statistics, path, payload["format"])

    def to_json(self) -> dict[str, Any]:
        """The fields of gates.json beside those of the header; counts stay integers."""
        return {
            "model": {
                "fingerprint": self.fingerprint,
                "model_type": self.model_type,
                **({} if self.routers is None else {"routers": self.routers}),
            },
            "mode": self.mode,
            "layers": list(self.layers),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "entries": {
                pair: {name: getattr(sums, name).tolist() for name in self.names}
                for pair, sums in self.entries.items()
            },
            **({} if self.dtype is None else {"dtype": self.dtype}),
        }

    def _tables(self) -> Tables:
        """`gates`: a row for each entry, layer and expert; `tokens` are those of the layer."""
        entries = self.to_json()["entries"]
        entry = "text" if self.mode == "text" else "pair"
        return {
            "gates": [
                {
                    entry: pair,
                    "layer": layer,
                    "expert": expert,
                    "tokens": sums["tokens"][index],
                    **{name: sums[name][index][expert] for name in self.names[1:]},
                }
                for pair, sums in entries.items()
                for index, layer in enumerate(self.layers)
                for expert in range(self.num_experts)
            ]
        }

    def combined(self, pairs: Iterable[str]) -> GateSums:
        """The entries of at least one pair or text in one: added, or of published files the means of their ratios."""
        return combine([self.entries[pair] for pair in pairs], self.mode)


def side_of(layer: str) -> Side:
    """The side of a layer by its name; a name that tells none is a decoder's."""
    return "encoder" if "encoder" in layer.split(".") else "decoder"


def split_pair(pair: str) -> tuple[str, str]:
    """`eng_Latn-fra_Latn` -> its source and target."""
    source, _, target = pair.partition("-")
    return source, target


def _require_entries(statistics: GateStatistics, path: Path, format_: str) -> GateStatistics:
    is_text = format_ == GateStatistics.TEXT_FORMAT
    if not statistics.entries:
        what = "texts" if is_text else "language pairs"
        raise StatisticsError(f"{path}: no {what}.", "Collect the statistics again.")
    modes = ("text",) if is_text else ("forced", "beam")
    if statistics.mode not in modes:
        known = " or ".join(map(repr, modes))
        raise StatisticsError(f"{path}: mode is {statistics.mode!r}, not {known}.")
    for pair in statistics.entries:
        if is_text and not pair:
            raise StatisticsError(f"{path}: a text without a name.", "Collect the statistics again.")
        if not is_text and not all(split_pair(pair)):
            raise StatisticsError(f"{path}: {pair!r} is not a pair SOURCE-TARGET.")
    return statistics


def _sums(names: Sequence[str], value: Mapping[str, Any], layers: int, experts: int, where: str) -> GateSums:
    return GateSums(
        **{
            name: checked_array(
                value[name], _shape(name, layers, experts), f"{where}: {name}", counts=name in COUNTS
            )
            for name in names
        }
    )


def merge(parts: Sequence[GateStatistics], names: Sequence[str] | None = None) -> GateStatistics:
    """One statistics from several of one model; entries of a pair or text that several hold are combined.

    Args:
        parts: at least one.
        names: how messages call them; default: statistics 1, 2, ...

    Raises:
        StatisticsError: of different models, layers, or modes.
    """
    names = [f"statistics {number}" for number in range(1, len(parts) + 1)] if names is None else names
    first = parts[0]
    for name, part in zip(names[1:], parts[1:], strict=True):
        for common in ("fingerprint", "model_type", "layers", "num_experts", "top_k", "mode"):
            ours, theirs = getattr(first, common), getattr(part, common)
            if ours != theirs:
                raise StatisticsError(
                    f"{names[0]} and {name} cannot be merged: "
                    f"{common} is {_short(ours)} and {_short(theirs)}.",
                    "Merge only statistics of one model, collected in one mode.",
                )
    found: dict[str, list[GateSums]] = {}
    for part in parts:
        for pair, sums in part.entries.items():
            found.setdefault(pair, []).append(sums)
    entries = {pair: combine(held, first.mode) for pair, held in found.items()}
    splits = dict.fromkeys(part.split for part in parts if part.split is not None)
    return replace(
        first,
        entries=entries,
        lacks=frozenset[str]().union(*(part.lacks for part in parts)),
        split=" and ".join(splits) or None,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def combine(parts: Sequence[GateSums], mode: Mode) -> GateSums:
    """At least one in one; the order is the caller's, so that equal inputs give equal bits.

    Sums are added, of maxima the largest stays. Published ratios are averaged, each of them alone and every entry
    weighing alike, as the authors' code does: the mean of conf, not conf over all tokens.
    """
    if mode != "published" or len(parts) == 1:
        return reduce(GateSums.__add__, parts)
    top1, top2, gate_sum = (
        np.mean([getattr(part, name) for part in parts], axis=0) for name in ("top1", "top2", "gate_sum")
    )
    conf1, conf2 = (
        np.mean([ratio(getattr(part, f"conf{n}_sum"), getattr(part, f"top{n}")) for part in parts], axis=0)
        for n in (1, 2)
    )
    return GateSums(np.ones(len(top1)), top1, top2, gate_sum, conf1 * top1, conf2 * top2)


def ratio(numerator: Array, denominator: Array) -> NDArray[np.float64]:
    """numerator / denominator, 0 where the denominator is 0."""
    bottom = np.broadcast_to(np.asarray(denominator, np.float64), np.shape(numerator))
    result = np.zeros(np.shape(numerator), np.float64)
    np.divide(numerator, bottom, out=result, where=bottom != 0)
    return result
