"""The section of similarity: what components of one or two models compute alike (CKA, LNS)."""

from __future__ import annotations

from prunecli.report.collect import Material
from prunecli.report.grids import Scale, heat_map, scale_key
from prunecli.report.markup import NOTHING, Html, element, join, table
from prunecli.results.schemas import Similarity, ends_of

MEASURES = {"cka": "CKA", "lns": "LNS"}


def similarity_section(material: Material) -> Html | None:
    """For each similarity.json its maps and means; None where there is none."""
    files = material.of(Similarity)
    return join([_similarity(name, found) for name, found in files]) if files else None


def _similarity(name: str, found: Similarity) -> Html:
    said = f"{' and '.join(found.checkpoints[:2])} on {_text(found)}."
    if found.benchmarks:
        said += f" Benchmarks: {', '.join(found.benchmarks)}."
    parts = [element("h3", name), element("p", said)]
    if found.mean:
        columns = list(dict.fromkeys(column for values in found.mean.values() for column in values))
        rows = [
            [side, *(_number(values.get(column), column) for column in columns)]
            for side, values in found.mean.items()
        ]
        caption = (
            "Mean over corresponding components"
            if len(found.checkpoints) > 1
            else "Mean over successive components"
        )
        parts.append(table(caption, ["side", *map(_title, columns)], rows))
    scale = Scale(0.0, 1.0)
    for measure, matrices in found.matrices.items():
        drawn = [_map(found, measure, which, scale) for which in matrices if matrices[which]]
        parts.append(element("div", *drawn, class_="charts"))
    return join([*parts, scale_key(scale, "0", "1")])


def _map(found: Similarity, measure: str, which: str, scale: Scale) -> Html:
    rows, columns = (
        [_label(c.side, c.label) for c in found.components.get(end, [])] for end in ends_of(which)
    )
    names = dict(zip(("first", "second"), found.checkpoints, strict=False))
    first, second = (names.get(end, end) for end in ends_of(which))
    whose = f"{first} (down) and {second} (across)" if which == "between" else f"components of {first}"
    caption = f"{MEASURES.get(measure, measure)}: {whose}"
    return heat_map(caption, found.matrices[measure][which], rows, columns, scale)


def _label(side: str, label: str) -> str:
    return f"{side[:1]}{label}"


def _text(found: Similarity) -> str:
    said = [str(text.get("name")) for text in found.text]
    return (
        ", ".join(said[:4]) + ("…" if len(said) > 4 else "") if said else "text that the file does not name"
    )


def _title(column: str) -> str:
    measure, _, normalised = column.partition("_")
    return f"{MEASURES.get(measure, measure)}{', % of the benchmark' if normalised else ''}"


def _number(value: float | None, column: str) -> str:
    return NOTHING if value is None else f"{value:.1f}" if column.endswith("_normalised") else f"{value:.3f}"
