"""Gate statistics as additive sums (2212.09811, 4.1-4.2): read, merge, write, and match with a checkpoint.

Symbols: `layers` counts the sparse layers, `experts` the experts of the original model's layer. Ids are
always the original ones; an expert that a checkpoint no longer holds has zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from prunecli.architectures.records import Side
from prunecli.errors import StatisticsError
from prunecli.model.depth import renaming_since
from prunecli.results.tabled import Tabled, Tables

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

ANY = "X"
"""In a pair of the authors' files, "any language": `eng_Latn-X` sums over all targets."""

Array = NDArray[Any]
Mode = Literal["forced", "beam", "published"]
COUNTS = ("tokens", "top1", "top2")
SUMS = ("tokens", "top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")


@dataclass(frozen=True)
class GateSums:
    """Sums over the real tokens of one entry: no padding, no finished beams.

    The gate is the softmax over all experts, before the renormalisation over the chosen ones.

    Attributes:
        tokens: `[layers]`, tokens routed.
        top1: `[layers, experts]`, tokens that rank the expert first.
        top2: `[layers, experts]`, tokens that rank it second.
        gate_sum: `[layers, experts]`, sum of the gate over all tokens.
        conf1_sum: `[layers, experts]`, sum of the gate over the tokens that rank it first.
        conf2_sum: `[layers, experts]`, the same over the tokens that rank it second.
    """

    tokens: Array
    top1: Array
    top2: Array
    gate_sum: Array
    conf1_sum: Array
    conf2_sum: Array

    def __add__(self, other: GateSums) -> GateSums:
        return GateSums(*(getattr(self, name) + getattr(other, name) for name in SUMS))

    def plus(self, layers: Mapping[int, GateSums]) -> GateSums:
        """With sums of some layers, `[1]` and `[1, experts]` of each, added under the layer's number."""
        sums = GateSums(*(getattr(self, name).copy() for name in SUMS))
        for index, row in layers.items():
            for name in SUMS:
                getattr(sums, name)[index] += getattr(row, name)[0]
        return sums

    @classmethod
    def zeros(cls, layers: int, experts: int) -> GateSums:
        """No tokens yet: integer counts, float64 sums."""
        shapes = {name: (layers,) if name == "tokens" else (layers, experts) for name in SUMS}
        return cls(*(np.zeros(shapes[name], np.int64 if name in COUNTS else np.float64) for name in SUMS))


@dataclass(frozen=True)
class GateStatistics(Tabled):
    """gates.json: gate sums per language pair.

    Attributes:
        fingerprint: of the checkpoint that was run; None for the authors' published files.
        model_type: as in config.json; None for published files.
        mode: teacher-forced, beam search, or published.
        layers: names of the sparse layers, encoder first.
        num_experts: of an original layer.
        top_k: experts per token.
        entries: `"SOURCE-TARGET"` -> sums. In published files either may be `X`, and the ratios stand for the
            sums over one token.
        lacks: names of the sums that the file does not give; zeros stand for them.
        dtype: that the model was computed in; None where the file does not say it.
    """

    FORMAT: ClassVar[str] = "prunecli.gates/1"

    fingerprint: str | None
    model_type: str | None
    mode: Mode
    layers: tuple[str, ...]
    num_experts: int
    top_k: int
    entries: Mapping[str, GateSums]
    lacks: frozenset[str] = frozenset()
    dtype: str | None = None

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> GateStatistics:
        """The statistics in a gates.json.

        Raises:
            StatisticsError: of another format, misshapen, with values that no run could give.
        """
        if payload["format"] != cls.FORMAT:
            raise StatisticsError(
                f"{path}: format is {payload['format']!r}, not {cls.FORMAT!r}.",
                "Give a file that `collect-gates` wrote.",
            )
        try:
            layers = tuple(str(name) for name in payload["layers"])
            experts = int(payload["num_experts"])
            model = payload["model"]
            entries = {
                str(pair): _sums(sums, len(layers), experts, f"{path}: {pair}")
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
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
            raise StatisticsError(f"{path}: the file {missing}.", "Collect the statistics again.") from error
        return _require_entries(statistics, path)

    def to_json(self) -> dict[str, Any]:
        """The fields of gates.json beside those of the header; counts stay integers."""
        return {
            "model": {"fingerprint": self.fingerprint, "model_type": self.model_type},
            "mode": self.mode,
            "layers": list(self.layers),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "entries": {
                pair: {name: getattr(sums, name).tolist() for name in SUMS}
                for pair, sums in self.entries.items()
            },
            **({} if self.dtype is None else {"dtype": self.dtype}),
        }

    def _tables(self) -> Tables:
        """`gates`: a row for each entry, layer and expert; `tokens` are those of the layer."""
        entries = self.to_json()["entries"]
        return {
            "gates": [
                {
                    "pair": pair,
                    "layer": layer,
                    "expert": expert,
                    "tokens": sums["tokens"][index],
                    **{name: sums[name][index][expert] for name in SUMS[1:]},
                }
                for pair, sums in entries.items()
                for index, layer in enumerate(self.layers)
                for expert in range(self.num_experts)
            ]
        }

    def combined(self, pairs: Iterable[str]) -> GateSums:
        """The entries of at least one pair in one: added, or of published files the means of their ratios."""
        return combine([self.entries[pair] for pair in pairs], self.mode)


def side_of(layer: str) -> Side:
    """The side of a layer by its name; a name that tells none is a decoder's."""
    return "encoder" if "encoder" in layer.split(".") else "decoder"


def split_pair(pair: str) -> tuple[str, str]:
    """`eng_Latn-fra_Latn` -> its source and target."""
    source, _, target = pair.partition("-")
    return source, target


def _require_entries(statistics: GateStatistics, path: Path) -> GateStatistics:
    if not statistics.entries:
        raise StatisticsError(f"{path}: no language pairs.", "Collect the statistics again.")
    if statistics.mode not in ("forced", "beam"):
        raise StatisticsError(f"{path}: mode is {statistics.mode!r}, not 'forced' or 'beam'.")
    for pair in statistics.entries:
        if not all(split_pair(pair)):
            raise StatisticsError(f"{path}: {pair!r} is not a pair SOURCE-TARGET.")
    return statistics


def _sums(value: Mapping[str, Any], layers: int, experts: int, where: str) -> GateSums:
    arrays = {}
    for name in SUMS:
        shape = (layers,) if name == "tokens" else (layers, experts)
        arrays[name] = checked_array(value[name], shape, f"{where}: {name}", counts=name in COUNTS)
    return GateSums(**arrays)


def checked_array(
    value: Any,
    shape: tuple[int, ...],
    where: str,
    *,
    counts: bool = False,
    signed: bool = False,
    remedy: str = "Collect the statistics again.",
) -> Array:
    """A finite array of `shape` from JSON, not negative unless `signed`; int64 for `counts`, else float64.

    Raises:
        StatisticsError: naming `where`.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise StatisticsError(f"{where} is not an array of numbers.", remedy) from error
    if array.shape != shape:
        needed, held = (" x ".join(map(str, s)) or "one number" for s in (shape, array.shape))
        raise StatisticsError(f"{where} holds {held} values; {needed} are needed.", remedy)
    if not np.isfinite(array).all():
        raise StatisticsError(f"{where} holds NaN or infinity.", remedy)
    if not signed and (array < 0).any():
        raise StatisticsError(f"{where} holds negative values.", remedy)
    if not counts:
        return array
    whole = np.asarray(value)
    if whole.dtype.kind not in "iu" and (array != np.floor(array)).any():
        raise StatisticsError(f"{where} holds fractions; counts are whole.", remedy)
    if (whole >= 2.0**63).any():
        raise StatisticsError(f"{where} holds counts that no run gives.", remedy)
    return whole.astype(np.int64)


def merge(parts: Sequence[GateStatistics], names: Sequence[str] | None = None) -> GateStatistics:
    """One statistics from several of one model; the entries of a pair that several hold are combined.

    Args:
        parts: at least one.
        names: how messages call them; default: statistics 1, 2, ...

    Raises:
        StatisticsError: of different models, layers, or modes.
    """
    names = [f"statistics {number}" for number in range(1, len(parts) + 1)] if names is None else names
    first = parts[0]
    for name, part in zip(names[1:], parts[1:], strict=True):
        for field in ("fingerprint", "model_type", "layers", "num_experts", "top_k", "mode"):
            ours, theirs = getattr(first, field), getattr(part, field)
            if ours != theirs:
                raise StatisticsError(
                    f"{names[0]} and {name} cannot be merged: "
                    f"{field} is {_short(ours)} and {_short(theirs)}.",
                    "Merge only statistics of one model, collected in one mode.",
                )
    found: dict[str, list[GateSums]] = {}
    for part in parts:
        for pair, sums in part.entries.items():
            found.setdefault(pair, []).append(sums)
    entries = {pair: combine(held, first.mode) for pair, held in found.items()}
    return replace(first, entries=entries, lacks=frozenset[str]().union(*(part.lacks for part in parts)))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def combine(parts: Sequence[GateSums], mode: Mode) -> GateSums:
    """At least one in one; the order is the caller's, so that equal inputs give equal bits.

    Sums are added. Published ratios are averaged, each of them alone and every entry weighing alike, as the
    authors' code does: the mean of conf, not conf over all tokens.
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


def numbered(statistics: GateStatistics, checkpoint: Checkpoint) -> GateStatistics:
    """The statistics of the layers that `checkpoint` has, under their names there: it may have lost some since."""
    rename = renaming_since(checkpoint.require_architecture(), checkpoint.structure, statistics.fingerprint)
    if rename is None:
        return statistics
    names = [rename(name) for name in statistics.layers]
    kept = [index for index, name in enumerate(names) if name is not None]
    return replace(
        statistics,
        layers=tuple(name for name in names if name is not None),
        entries={
            pair: GateSums(*(getattr(sums, name)[kept] for name in SUMS))
            for pair, sums in statistics.entries.items()
        },
    )


def check_matches(statistics: GateStatistics, checkpoint: Checkpoint) -> None:
    """Refuse statistics of another model.

    Those of the model that a pruned checkpoint was made from are right too: ids are the original ones.

    Raises:
        StatisticsError: another fingerprint, other sparse layers, another number of experts.
    """

    layers = checkpoint.require_mixtures()
    original = {layer.original_experts for layer in layers}
    if original and original != {statistics.num_experts}:
        raise StatisticsError(
            f"The statistics are of a model with {statistics.num_experts} experts per layer; "
            f"{checkpoint.path} has {', '.join(map(str, sorted(original)))}.",
            "Collect the gates of this checkpoint.",
        )
    if statistics.layers != tuple(layer.name for layer in layers):
        raise StatisticsError(
            f"The statistics are of {len(statistics.layers)} sparse layers ({_ends(statistics.layers)}); "
            f"{checkpoint.path} has {len(layers)} ({_ends([layer.name for layer in layers])}).",
            "Collect the gates of this checkpoint.",
        )
    known = {checkpoint.fingerprint, *checkpoint.structure.fingerprints()}
    if statistics.fingerprint is not None and statistics.fingerprint not in known:
        raise StatisticsError(
            f"The statistics are of another model than {checkpoint.path}: its weights are others.",
            "Collect the gates of this checkpoint.",
        )


def _ends(names: Sequence[str]) -> str:
    return "none" if not names else names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
