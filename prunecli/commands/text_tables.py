"""What `compare-languages` shows of texts: tables of shared experts, a tree, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.results.languages import Texts


def show_texts(texts: Texts) -> None:
    """Jaccard similarities, the tree, and experts by layer."""
    removed = f"{texts.ratio:.0%} of the experts removed by {texts.metric}"
    rows = [
        [
            text,
            *(
                "" if other == text else f"{100 * value:.0f}"
                for other, value in zip(texts.texts, row, strict=True)
            ),
        ]
        for text, row in zip(texts.texts, texts.similarity, strict=True)
    ]
    title = f"Jaccard similarity of the selected experts in % ({removed})"
    console.show(console.table(title, ["text", *texts.texts], rows))
    if texts.clustering is not None:
        console.out(f"Clusters of texts ({texts.linkage} linkage)")
        console.out("\n".join(texts.clustering.lines) + "\n")
    columns = ["layer", "experts", "all texts", *(f"only {text}" for text in texts.texts), "similarity"]
    counts = [
        [
            layer.layer,
            str(layer.kept),
            str(len(layer.common)),
            *(str(len(layer.own.get(text, []))) for text in texts.texts),
            "-" if layer.jaccard is None else f"{layer.jaccard:.0%}",
        ]
        for layer in texts.layers
    ]
    console.show(console.table("Experts of each layer that texts select", columns, counts))


def plot_texts(path: Path, texts: Texts) -> None:
    """Draw the tree and the matrix."""
    from prunecli.report.pictures import similarity_map, trees
    from prunecli.report.render import save_pictures

    drawn = trees({"Experts, by text": texts.clustering}, texts.families)
    save_pictures([[*drawn, similarity_map("Jaccard similarity", texts.similarity, texts.texts)]], path)
