"""How `compare-models` shows what it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.analysis.components import Kind
    from prunecli.analysis.model_similarity import Comparison, Measure
    from prunecli.analysis.similarity_results import Pair

KINDS: dict[Kind, str] = {"self": "self", "cross": "cross", "ffn": "FFN"}
"""Kind -> its column: self-attention, cross-attention, FFN."""


def show_comparison(
    comparison: Comparison,
    names: Sequence[str],
    benchmarks: Sequence[Comparison] = (),
    randoms: Sequence[Comparison] = (),
) -> None:
    """The diagonal of two models, layer by layer, or of one model what follows on what; then the means.

    Args:
        names: of the first model, and of the second where there is one.
    """
    from prunecli.analysis.similarity_results import SIDES, corresponding, successive

    measures = list(comparison.similarities)
    pairs = corresponding(comparison, benchmarks, randoms) if comparison.second else successive(comparison)
    if not pairs:
        console.out("The models have no component in common: only the matrices are written.")
    for side in SIDES:
        own = [pair for pair in pairs if pair.first.side == side]
        if own and comparison.second:
            _show_layers(f"{names[0]} and {names[1]}, {side}", own, measures)
        elif own:
            _show_successive(f"{names[0]}, {side}", own, measures)
    if pairs:
        _show_means(pairs, measures, bool(benchmarks), bool(randoms))
    _show_left_out(comparison, names)


def _show_layers(title: str, pairs: Sequence[Pair], measures: Sequence[Measure]) -> None:
    kinds = [kind for kind in KINDS if any(pair.first.kind == kind for pair in pairs)]
    found = {
        (pair.first.layer, measure, pair.first.kind): pair.values[measure]
        for pair in pairs
        for measure in measures
    }
    rows = [
        [str(layer), *(_text(found.get((layer, measure, kind))) for measure in measures for kind in kinds)]
        for layer in sorted({pair.first.layer for pair in pairs})
    ]
    columns = [f"{measure.upper()} {KINDS[kind]}" for measure in measures for kind in kinds]
    console.show(console.table(title, ["layer", *columns], rows))


def _show_successive(title: str, pairs: Sequence[Pair], measures: Sequence[Measure]) -> None:
    rows = [
        [pair.first.label, pair.second.label, *(_text(pair.values[measure]) for measure in measures)]
        for pair in pairs
    ]
    columns = ["component", "next", *(measure.upper() for measure in measures)]
    console.show(console.table(title, columns, rows, text_columns=2))


def _show_means(
    pairs: Sequence[Pair], measures: Sequence[Measure], with_benchmarks: bool, with_randoms: bool
) -> None:
    from prunecli.analysis.similarity_results import side_means

    columns, rows = ["mean of the"], []
    for measure in measures:
        columns += [measure.upper(), *(["% of the benchmarks"] if with_benchmarks else [])]
        columns += [f"{measure.upper()}, random"] if with_randoms else []
    for side, mean in side_means(pairs, measures).items():
        row: list[str] = [side]
        for measure in measures:
            row.append(_text(mean.values[measure]))
            if with_benchmarks:
                row.append(_text(mean.normalised[measure], 1))
            if with_randoms:
                row.append(_text(mean.random[measure]))
        rows.append(row)
    console.show(console.table("Means", columns, rows))


def _show_left_out(comparison: Comparison, names: Sequence[str]) -> None:
    from prunecli.analysis.similarity_results import constant_components

    for name, removed, constant in zip(
        names, comparison.removed, constant_components(comparison), strict=False
    ):
        for what, why in ((removed, "removed"), (constant, "the same output for every sentence")):
            if what:
                shown = ", ".join(what[:3]) + (f", … ({len(what)} in all)" if len(what) > 3 else "")
                console.out(f"Left out of {name}, {why}: {shown}.")


def _text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
