"""Trees as inline SVG: who descends from whom, and which languages cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prunecli.report.drawing import LETTER, figure, marker, path, series_key, shortened, text
from prunecli.report.markup import Html, element

ROW, LEVEL_GAP = 40.0, 26.0
"""Pixels from one row of a lineage to the next, and between its levels."""
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
    nodes = _walk(roots)
    heights = {id(node): 18 + ROW * row for node, _, row in nodes}
    names = shortened([node.name for node, _, _ in nodes], LETTERS)
    widths: dict[int, float] = {}  # of the text beside a level's nodes
    for node, level, _ in nodes:
        letters = max(len(names[node.name]), len(node.short))
        widths[level] = max(widths.get(level, 0.0), BOLD_LETTER * letters)
    lefts = [12.0]
    for level in range(max(widths)):
        lefts.append(lefts[-1] + widths[level] + 28 + LEVEL_GAP)
    edges, dots = [], []
    for node, level, row in nodes:
        x, y = lefts[level], 18 + ROW * row
        for child in node.children:
            right = lefts[level + 1]
            edges.append(path("M", x, y, "H", right - 18, "V", heights[id(child)], "H", right, kind="edge"))
        dots += _node(node, names[node.name], x, y)
    width = lefts[-1] + widths[max(widths)] + 40
    return figure(caption, width, 18 + ROW * (max(row for _, _, row in nodes) + 0.5), edges + dots)


def _walk(roots: Sequence[Node]) -> list[tuple[Node, int, int]]:
    """(node, level, row), parents first; a node lies in the row of its first child. Without recursion: histories may
    be long."""
    nodes: list[tuple[Node, int, int]] = []
    row = -1
    waiting = [(root, 0, True) for root in reversed(roots)]
    while waiting:
        node, level, is_new = waiting.pop()
        row += is_new
        nodes.append((node, level, row))
        waiting += [
            (child, level + 1, index > 0) for index, child in reversed(list(enumerate(node.children)))
        ]
    return nodes


def _node(node: Node, name: str, x: float, y: float) -> list[Html]:
    title = f"{node.name}{f': {node.how}' if node.how else ''}"
    behind = BOLD_LETTER * max(len(name), len(node.short)) + 8
    how = [text(x + 11, y + 13, node.short, "soft")] if node.short else []
    return [
        element("rect", x=x + 8, y=y - 12, width=behind, height=26.0, fill="var(--page)"),
        element(
            "circle", element("title", title), cx=x, cy=y, r=5.0, class_="node here" if node.here else "node"
        ),
        text(x + 11, y - 1 if node.short else y + 4, name, "bold"),
        *how,
    ]


def dendrogram(
    caption: str,
    languages: Sequence[str],
    linkage: Sequence[Sequence[float]],
    families: Mapping[str, str] | None = None,
) -> Html:
    """The tree of a linkage matrix (rows: two clusters, their distance, leaves below), leaves on the left.

    Args:
        caption: what it shows.
        languages: the leaves, by number.
        linkage: as scipy's, each row joining clusters of earlier rows or leaves.
        families: language -> family, which gives its leaf a mark and a colour; a family has the same one in every tree.
    """
    families = families or {}
    row, left, length = 20.0, 12 + LETTER * min(32, max(map(len, languages))), 380.0
    far = max(distance for _, _, distance, _ in linkage) or 1.0
    heights = {leaf: 12 + row * index for index, leaf in enumerate(leaf_order(len(languages), linkage))}
    clusters = [(left, heights[leaf]) for leaf in range(len(languages))]
    short = shortened(languages, 32)
    parts = [
        text(left - 6, y + 4, short[name], anchor="end")
        for name, (_, y) in zip(languages, clusters, strict=True)
    ]
    for first, second, distance, _ in linkage:
        (x0, y0), (x1, y1) = clusters[int(first)], clusters[int(second)]
        x = left + length * distance / far
        edge = ("M", x0, y0, "H", x, "V", y1, "H", x1)
        parts.append(path(*edge, kind="edge", title=f"joined at {distance:.3f}"))
        clusters.append((x, (y0 + y1) / 2))
    base = 12 + row * len(languages)
    for share in (0.0, 0.5, 1.0):
        x = left + length * share
        parts.append(path("M", x, base, "v5", kind="axis"))
        parts.append(text(x, base + 18, f"{far * share:.3g}", "soft", anchor="middle"))
    series = {family: index for index, family in enumerate(dict.fromkeys(families.values()))}
    parts += [
        marker(series[families[name]], left, heights[leaf], families[name])
        for leaf, name in enumerate(languages)
        if name in families
    ]
    own = {families[name] for name in languages if name in families}
    marks = series_key((index, family) for family, index in series.items() if family in own) if own else ""
    return figure(caption, left + length + 30, base + 26, parts, key=marks)


def leaf_order(leaves: int, linkage: Sequence[Sequence[float]]) -> list[int]:
    """The leaves from top to bottom such that no branches cross."""
    order: list[int] = []
    waiting = [leaves + len(linkage) - 1]
    while waiting:
        cluster = waiting.pop()
        if cluster < leaves:
            order.append(cluster)
        else:
            waiting += [int(linkage[cluster - leaves][1]), int(linkage[cluster - leaves][0])]
    return order
