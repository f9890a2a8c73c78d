"""The section of sizes: parameters and bytes by part, and what is left of experts and heads."""

from __future__ import annotations

from collections.abc import Sequence

from prunecli.model.ffn import describe_ffns
from prunecli.model.inventory import PARTS
from prunecli.report.charts import LETTER, drawing
from prunecli.report.collect import Found, Material
from prunecli.report.labels import told_apart
from prunecli.report.markup import (
    NOTHING,
    Html,
    element,
    figure,
    join,
    millions,
    scrolling,
    table,
)
from prunecli.tensors.quantities import bytes_text


def sizes_section(material: Material) -> Html | None:
    """Tables and a drawing of the checkpoints' sizes, those that lie elsewhere first; None without any."""
    held = [*material.elsewhere, *material.checkpoints]
    if not held:
        return None
    parts = [part for part in PARTS if any(part in one.inventory.parts for one in held)]
    return join(
        [
            _overview(held),
            _drawn(held, parts),
            table(
                "Parameters by part",
                ["checkpoint", *parts, "total"],
                [[one.name, *_by_part(one, parts), f"{one.inventory.total.parameters:,}"] for one in held],
            ),
            table(
                "Bytes by part",
                ["checkpoint", *parts, "total"],
                [
                    [
                        one.name,
                        *(
                            bytes_text(one.inventory.parts[p].bytes) if p in one.inventory.parts else NOTHING
                            for p in parts
                        ),
                        bytes_text(one.inventory.total.bytes),
                    ]
                    for one in held
                ],
            ),
        ]
    )


def _by_part(one: Found, parts: Sequence[str]) -> list[str]:
    return [f"{one.inventory.parts[p].parameters:,}" if p in one.inventory.parts else NOTHING for p in parts]


def _overview(held: Sequence[Found]) -> Html:
    rows = [
        [
            one.name,
            one.checkpoint.model_type,
            describe_ffns(one.inventory.ffns, one.checkpoint.structure.ffn) or NOTHING,
            millions(one.inventory.total.parameters),
            bytes_text(one.inventory.total.bytes),
            ", ".join(one.inventory.dtypes),
            _left([(layer.num_experts, layer.original_experts) for layer in one.inventory.layers]),
            _left([(layer.num_heads, layer.original_heads) for layer in one.inventory.attentions]),
        ]
        for one in held
    ]
    columns = ["checkpoint", "family", "FFN", "parameters", "size", "type", "experts", "heads"]
    return table("The checkpoints, counted from their headers", columns, rows, text_columns=3)


def _left(layers: Sequence[tuple[int, int]]) -> str:
    """'288 of 1,536', or '1,536' where all are left."""
    if not layers:
        return NOTHING
    held, original = (sum(counts) for counts in zip(*layers, strict=True))
    return f"{held:,}" if held == original else f"{held:,} of {original:,}"


def _drawn(held: Sequence[Found], parts: Sequence[str]) -> Html:
    """A bar for each checkpoint, made of its parts."""
    caption = "Bytes of weights by part"
    left = 14 + LETTER * min(32, max(len(one.name) for one in held))
    length, pitch = 420.0, 22.0
    most = max(one.inventory.total.bytes for one in held) or 1
    made: list[Html] = []
    short = told_apart([one.name for one in held], 32)
    for row, one in enumerate(held):
        x, y = left, 4 + pitch * row
        made.append(element("text", short[one.name], x=left - 8, y=y + 13, text_anchor="end"))
        for index, part in enumerate(parts):
            if part in one.inventory.parts:
                count = one.inventory.parts[part].bytes
                width = length * count / most
                told = element("title", f"{one.name}, {part}: {bytes_text(count)}")
                made.append(
                    element(
                        "rect", told, x=x, y=y + 2, width=max(width - 1, 0.0), height=14.0, class_=f"s{index}"
                    )
                )
                x += width
        made.append(element("text", bytes_text(one.inventory.total.bytes), x=x + 6, y=y + 13, class_="soft"))
    box = drawing(left + length + 90, 8 + pitch * len(held), caption, made)
    return figure(caption, scrolling(caption, box), _key(parts))


def _key(parts: Sequence[str]) -> Html:
    items = []
    for index, part in enumerate(parts):
        square = element("rect", width="12", height="12", class_=f"s{index}")
        sample = element("svg", square, viewBox="0 0 12 12", width="12", height="12", aria_hidden="true")
        items.append(element("li", join((sample, part))))
    return element("ul", *items, class_="key")
