"""Trees as inline SVG: who descends from whom, and which languages cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prunecli.report.charts import LETTER, drawing
from prunecli.report.labels import told_apart
from prunecli.report.markup import Html, element, figure, number, scrolling

PITCH = 40.0
BOLD_LETTER = 8.0
LETTERS = 44
"""Letters of a name beside a node; the whole of it is told on pointing."""


@dataclass
class Node:
    """A checkpoint of a lineage.

    Attributes:
        name: of the checkpoint or checkpoints.
        how: the step that made it; "" for an original.
        here: whether it lies in the directory.
        children: what was made from it.
        short: of `how` what tells it from its siblings; shown beside the node.
    """

    name: str
    how: str
    here: bool
    children: list[Node] = field(default_factory=list)
    short: str = ""


def lineage(caption: str, roots: Sequence[Node]) -> Html:
    """The trees from left to right, a filled dot for each checkpoint that lies in the directory."""
    flat = _walk(roots)
    rows = {id(node): row for node, _, row in flat}
    depth = max(level for _, level, _ in flat)
    names = told_apart([node.name for node, _, _ in flat], LETTERS)
    widths = [
        28
        + BOLD_LETTER
        * max(max(len(names[node.name]), len(node.short)) for node, level, _ in flat if level == at)
        for at in range(depth + 1)
    ]
    lefts = [12 + sum(widths[:level]) + 26 * level for level in range(depth + 1)]
    parts: list[Html] = []
    for node, level, row in flat:
        x, y = lefts[level], 18 + PITCH * row
        for child in node.children:
            right, below = lefts[level + 1], 18 + PITCH * rows[id(child)]
            bend = f"M{number(x)} {number(y)}H{number(right - 18)}V{number(below)}H{number(right)}"
            parts.append(element("path", d=bend, class_="edge"))
    for node, level, row in flat:
        parts += _node(node, names[node.name], lefts[level], 18 + PITCH * row)
    height = 18 + PITCH * (max(row for _, _, row in flat) + 0.5)
    made = drawing(lefts[-1] + widths[-1] + 12, height, caption, parts)
    return figure(caption, scrolling(caption, made))


def _walk(roots: Sequence[Node]) -> list[tuple[Node, int, int]]:
    """(node, level, row), parents first; a node lies in the row of its first child. Without recursion: histories may
    be long."""
    found: list[tuple[Node, int, int]] = []
    row = -1
    waiting = [(root, 0, True) for root in reversed(roots)]
    while waiting:
        node, level, is_new = waiting.pop()
        row += is_new
        found.append((node, level, row))
        waiting += [
            (child, level + 1, index > 0) for index, child in reversed(list(enumerate(node.children)))
        ]
    return found


def _node(node: Node, name: str, x: float, y: float) -> list[Html]:
    told = element("title", f"{node.name}{f': {node.how}' if node.how else ''}")
    behind = BOLD_LETTER * max(len(name), len(node.short)) + 8
    how = [element("text", node.short, x=x + 11, y=y + 13, class_="soft")] if node.short else []
    return [
        element("rect", x=x + 8, y=y - 12, width=behind, height=26.0, fill="var(--page)"),
        element("circle", told, cx=x, cy=y, r=5.0, class_="node here" if node.here else "node"),
        element("text", name, x=x + 11, y=y - 1 if node.short else y + 4, class_="bold"),
        *how,
    ]


def dendrogram(caption: str, languages: Sequence[str], linkage: Sequence[Sequence[float]]) -> Html:
    """The tree of a linkage matrix (rows: two clusters, their distance, leaves below), leaves on the left.

    Args:
        caption: what it shows.
        languages: the leaves, by number.
        linkage: as scipy's, each row joining clusters of earlier rows or leaves.
    """
    order = leaf_order(len(languages), linkage)
    rows = {leaf: index for index, leaf in enumerate(order)}
    pitch, left, length = 20.0, 12 + LETTER * min(32, max(map(len, languages))), 380.0
    far = max(row[2] for row in linkage) or 1.0
    places: list[tuple[float, float]] = [(left, 12 + pitch * rows[leaf]) for leaf in range(len(languages))]
    short = told_apart(languages, 32)
    parts = [
        element("text", short[name], x=left - 6, y=places[leaf][1] + 4, text_anchor="end")
        for leaf, name in enumerate(languages)
    ]
    for first, second, distance, _ in linkage:
        (x0, y0), (x1, y1) = places[int(first)], places[int(second)]
        x = left + length * distance / far
        path = f"M{number(x0)} {number(y0)}H{number(x)}V{number(y1)}H{number(x1)}"
        parts.append(element("path", element("title", f"joined at {distance:.3f}"), d=path, class_="edge"))
        places.append((x, (y0 + y1) / 2))
    base = 12 + pitch * len(languages)
    for share in (0.0, 0.5, 1.0):
        x = left + length * share
        parts.append(element("path", d=f"M{number(x)} {number(base)}v5", class_="axis"))
        parts.append(
            element("text", f"{far * share:.3g}", x=x, y=base + 18, text_anchor="middle", class_="soft")
        )
    made = drawing(left + length + 30, base + 26, caption, parts)
    return figure(caption, scrolling(caption, made))


def leaf_order(leaves: int, linkage: Sequence[Sequence[float]]) -> list[int]:
    """The leaves from top to bottom such that no branches cross."""
    found: list[int] = []
    waiting = [leaves + len(linkage) - 1]
    while waiting:
        cluster = waiting.pop()
        if cluster < leaves:
            found.append(cluster)
        else:
            waiting += [int(linkage[cluster - leaves][1]), int(linkage[cluster - leaves][0])]
    return found
