"""Tables of `compare-models`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.results.similarity import Similarity

KINDS = {"self": "self", "cross": "cross", "ffn": "FFN"}
"""Kind of a component -> its column: self-attention, cross-attention, FFN."""
MEANS = {"": ("{}", 3), "_normalised": ("% of the benchmarks", 1), "_random": ("{}, random", 3)}
"""End of the name of a mean -> its column and digits."""


def show_comparison(result: Similarity, names: Sequence[str]) -> None:
    """Print the diagonal of two models, layer by layer, or the successive components of one model; then the means.

    Args:
        names: of the first model, and of the second if there are two.
    """
    known = {component.name: component for component in result.components["first"]}
    measures, alone = list(result.matrices), result.corresponding is None
    rows = (result.successive if alone else result.corresponding) or []
    if not rows:
        console.out("The models have no component in common: only the matrices are written.")
    for side in result.mean:
        own = [row for row in rows if known[row["first"]].side == side]
        title, columns, cells = f"{' and '.join(names)}, {side}", ["component", "next"], []
        if alone:
            columns += [measure.upper() for measure in measures]
            for row in own:
                labels = [known[row[end]].label for end in ("first", "second")]
                cells.append([*labels, *(_text(row[measure]) for measure in measures)])
        else:
            kinds = [kind for kind in KINDS if any(known[row["first"]].kind == kind for row in own)]
            columns = [
                "layer",
                *(f"{measure.upper()} {KINDS[kind]}" for measure in measures for kind in kinds),
            ]
            found = {(known[row["first"]].layer or 0, known[row["first"]].kind): row for row in own}
            for layer in sorted({layer for layer, _ in found}):
                values = (found.get((layer, kind), {}).get(measure) for measure in measures for kind in kinds)
                cells.append([str(layer), *map(_text, values)])
        console.show(console.table(title, columns, cells, text_columns=2 if alone else 1))
    if rows:
        _show_means(result.mean, measures)
    for name, left_out in zip(names, result.left_out.values(), strict=False):
        for what, why in (("removed", "removed"), ("constant", "the same output for every sentence")):
            if parts := left_out[what]:
                shown = ", ".join(parts[:3]) + (f", … ({len(parts)} in all)" if len(parts) > 3 else "")
                console.out(f"Left out of {name}, {why}: {shown}.")


def _show_means(means: Mapping[str, Mapping[str, Any]], measures: Sequence[str]) -> None:
    stated = next(iter(means.values()))
    columns = [
        (f"{measure}{end}", title.format(measure.upper()), digits)
        for measure in measures
        for end, (title, digits) in MEANS.items()
        if f"{measure}{end}" in stated
    ]
    rows = [
        [side, *(_text(mean[name], digits) for name, _, digits in columns)] for side, mean in means.items()
    ]
    console.show(console.table("Means", ["mean of the", *(title for _, title, _ in columns)], rows))


def _text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
