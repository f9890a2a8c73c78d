"""Gate statistics as additive sums (2212.09811, 4.1-4.2; 2510.13999, eq. 9): read, merge, write.

Symbols: `layers` counts the sparse layers, `experts` the experts of the original model's layer. Ids are
always the original ones; an expert that a checkpoint no longer holds has zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from prunecli.architectures.records import Side
from prunecli.errors import StatisticsError, reason_of
from prunecli.model.axes import Axis, axis_name
from prunecli.results.arrays import checked_array
from prunecli.results.gate_sums import COUNTS, SUMS, TEXT_SUMS, GateSums, Mode, combine, shape_of
from prunecli.results.header import joined, split_of
from prunecli.results.tabled import Tabled, Tables

ANY = "X"
"""In a pair of the authors' files, "any language": `eng_Latn-X` sums over all targets."""


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
        split: of a directory of parallel text.
        whole_files: each file of plain text was one document, or each line was; None: unknown, or of both kinds.
        mixed: statistics of whole documents and of single lines were merged.
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
    whole_files: bool | None = None
    mixed: bool = False

    @property
    def format(self) -> str:
        """Of the file that they are written to."""
        return self.TEXT_FORMAT if self.mode == "text" else self.FORMAT

    @property
    def names(self) -> tuple[str, ...]:
        """The sums that an entry of such a file holds."""
        return TEXT_SUMS if self.mode == "text" else SUMS

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The experts of each layer of the original model."""
        ids = tuple(range(self.num_experts))
        return tuple(
            Axis(axis_name(name, "expert"), "expert", ids, len(ids), side_of(name)) for name in self.layers
        )

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
                str(pair): GateSums(
                    **{
                        name: checked_array(
                            sums[name],
                            shape_of(name, len(layers), experts),
                            f"{path}: {pair}: {name}",
                            counts=name in COUNTS,
                        )
                        for name in names
                    }
                )
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
                split=split_of(payload),
                whole_files=payload.get("whole_files"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({reason_of(error)})"
            raise StatisticsError(f"{path}: the file {missing}.", "Collect the statistics again.") from error
        is_text = payload["format"] == cls.TEXT_FORMAT
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
            **({} if self.whole_files is None else {"whole_files": self.whole_files}),
            **({} if self.split is None else {"split": self.split}),
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


def side_of(name: str) -> Side:
    """The side of a layer or its axis, read from the name; "decoder" if the name contains neither side."""
    return "encoder" if "encoder" in name.split(".") else "decoder"


def split_pair(pair: str) -> tuple[str, str]:
    """`eng_Latn-fra_Latn` -> its source and target."""
    source, _, target = pair.partition("-")
    return source, target


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
    kinds = {part.whole_files for part in parts}
    return replace(
        first,
        entries=entries,
        lacks=frozenset[str]().union(*(part.lacks for part in parts)),
        split=joined(part.split for part in parts),
        whole_files=first.whole_files if len(kinds) == 1 else None,
        mixed={True, False} <= kinds,
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
