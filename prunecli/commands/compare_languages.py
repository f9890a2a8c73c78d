"""`prunecli compare-languages`: which languages, or texts of language models, use the same experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.commands.command import OutputOptions, command
from prunecli.errors import PruneError, StatisticsError, UsageError
from prunecli.methods.options import LanguageOptions
from prunecli.options import argument, option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.results.document import Document
    from prunecli.results.languages import Languages, Texts


class CompareLanguages(OutputOptions, LanguageOptions):
    """Options of the command."""

    gates: tuple[Path, ...] = argument(
        (Path("gates.json"),), "Gate statistics. Default: ./gates.json.", "GATES.json", role="input"
    )
    output: Path = option(
        Path(),
        "File of the result. Default: languages.json; for texts texts.json.",
        flag="--output -o",
        role="output",
    )


@command(CompareLanguages)
def compare_languages(options: CompareLanguages) -> None:
    """Compare languages by the experts that they use, or texts by those of a language model.

    Shows how alike the experts are that language pairs with a common source or target select, which languages
    have like importance vectors, and how many experts each layer keeps under a global threshold. Of texts: how alike
    the experts are that they select, and which are those of one alone.
    """
    import numpy as np

    from prunecli.analysis.language_comparison import (
        compare_by_language,
        compare_by_text,
        similarity_matrices,
    )
    from prunecli.results.gates import merge, read_gates
    from prunecli.text.plain import MIXED

    files = options.gates
    if "gates" not in options.model_fields_set and not files[0].is_file():
        raise StatisticsError(
            "gates.json: no such file", "Name a statistics file, or make it: prunecli collect-gates."
        )
    statistics = merge([read_gates(path) for path in files], [str(path) for path in files])
    is_text = statistics.mode == "text"
    if options.output == Path():
        default = Path("texts.json" if is_text else "languages.json")
        options = options.model_copy(update={"output": default})
    options.check_outputs()
    names = [path.name for path in files]
    if statistics.mixed:
        console.note(MIXED)
    result: Document
    leave_out: tuple[str, ...] = ()
    if is_text:
        for name in ("strategy", "balance", "langs", "layer_metric", "groups"):
            if name in options.changed and getattr(options, name) != "per-layer":
                raise UsageError(
                    f"`{name}` is for translation; these statistics are of texts.",
                    "`texts` chooses among the texts.",
                )
        result = found = compare_by_text(statistics, options, names)
        show = partial(show_texts, found)
        if options.plot is not None:
            plot_texts(options.plot, found)
    else:
        if options.texts:
            raise UsageError(
                "`texts` names texts of language models; these statistics are by pairs of languages.",
                "Name languages with `langs`.",
            )
        result = languages = compare_by_language(statistics, options, names)
        show = partial(show_languages, languages)
        if len(languages.pairs) > TABLE_PAIRS:
            leave_out = ("similarity",)
        if options.plot is not None:
            similarity = languages.similarity
            if similarity is None:
                matrices = None
            elif similarity.encoder is None or similarity.decoder is None:
                matrices = similarity_matrices(statistics, options, languages.pairs)
            else:
                matrices = {
                    "encoder": np.array(similarity.encoder),
                    "decoder": np.array(similarity.decoder),
                }
            plot_languages(options.plot, languages, matrices)
    options.write(result, leave_out)
    options.show(result.to_json, show)


TABLE_PAIRS = 12
"""With more pairs than this, their similarities are summed up in the terminal, not listed."""


def show_languages(languages: Languages) -> None:
    """Print similarities, trees, and experts of each layer."""
    removed = f"{languages.ratio:.0%} of the experts removed by {languages.metric}"
    similarity, pairs, clusters = languages.similarity, languages.pairs, languages.clustering
    if similarity is not None:
        rows = [
            [
                side,
                relation,
                str(spread.comparisons),
                f"{spread.mean:.0%}",
                f"{spread.lowest:.0%} to {spread.highest:.0%}",
            ]
            for side, by_relation in similarity.relations.items()
            for relation, spread in by_relation.items()
            if spread is not None
        ]
        title = f"Jaccard similarity of the selected experts ({removed}, {languages.strategy})"
        console.table(title, ["experts of the", "pairs with", "compared", "mean", "range"], rows, 2)
        if len(pairs) <= TABLE_PAIRS and similarity.encoder is not None and similarity.decoder is not None:
            _show_triangles(pairs, similarity.encoder, similarity.decoder)
        else:
            console.out(f"{len(pairs)} pairs; --langs A,B,C lists those between a few languages.\n")
    for side, tree in (("encoder by source", clusters.encoder), ("decoder by target", clusters.decoder)):
        if tree is not None:
            console.out(f"Clusters of languages, {side} ({clusters.linkage} linkage)")
            console.out("\n".join(tree.lines) + "\n")
    if (layers := languages.experts_per_layer) is None:
        return
    counts = zip(layers.layers, layers.mean, layers.lowest, layers.highest, strict=True)
    rows = [[layer, f"{mean:.1f}", f"{lowest} to {highest}"] for layer, mean, lowest, highest in counts]
    for side in dict.fromkeys(layers.sides):
        means = [mean for mean, own in zip(layers.mean, layers.sides, strict=True) if own == side]
        rows.append([f"{side}, all layers", f"{sum(means):.1f}", ""])
    removed = f"{languages.ratio:.0%} of the experts removed by {layers.metric}"
    title = f"Experts per layer under the global threshold ({removed}), mean over {len(layers.by_pair)} pairs"
    console.table(title, ["layer", "experts", "range"], rows)
    if layers.by_group:
        rows = [
            [group.source, group.target, str(group.pairs), f"{group.encoder:.1f}", f"{group.decoder:.1f}"]
            for group in layers.by_group
        ]
        title = "The same by group of languages: experts of a side"
        console.table(title, ["from", "to", "pairs", "encoder", "decoder"], rows, 2)


def _show_triangles(
    pairs: Sequence[str], encoder: Sequence[Sequence[float]], decoder: Sequence[Sequence[float]]
) -> None:
    """Print Table 4: the encoder below the diagonal, the decoder above, where a source or target is shared."""
    rows = []
    for row, pair in enumerate(pairs):
        cells = ["-" if pair == other else "" for other in pairs]
        for column, other in enumerate(pairs):
            ends = zip(pair.split("-"), other.split("-"), strict=True)
            if pair != other and any(first == second for first, second in ends):
                cells[column] = f"{100 * (encoder if column < row else decoder)[row][column]:.0f}"
        rows.append([f"{row + 1} {pair}", *cells])
    columns = ["pair", *(str(number) for number in range(1, len(pairs) + 1))]
    console.table("The same in %, encoder below the diagonal and decoder above", columns, rows)


def plot_languages(
    path: Path, languages: Languages, similarity: Mapping[str, NDArray[np.float64]] | None
) -> None:
    """Draw trees, experts per layer and similarities.

    Args:
        path: file to write.
        languages: the result.
        similarity: side -> `[pairs, pairs]`. The map has the encoder below the diagonal and the decoder above.

    Raises:
        PruneError: there is nothing to draw.
    """
    from prunecli.analysis.language_comparison import two_triangles
    from prunecli.report.pictures import experts_per_layer, similarity_map, trees
    from prunecli.report.render import save_pictures

    clusters, layers = languages.clustering, languages.experts_per_layer
    by_side = {
        "Encoder experts, by source language": clusters.encoder,
        "Decoder experts, by target language": clusters.decoder,
    }
    pictures = trees(by_side, languages.families)
    if layers is not None:
        pictures.append(experts_per_layer(layers))
    if similarity is not None:
        triangles = two_triangles(similarity["encoder"], similarity["decoder"])
        caption = "Jaccard similarity: encoder below the diagonal, decoder above"
        pictures.append(similarity_map(caption, triangles.tolist(), languages.pairs))
    if not pictures:
        raise PruneError("There is nothing to draw: the statistics hold fewer than two languages.")
    save_pictures([pictures[:2], pictures[2:]], path)


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
    console.table(title, ["text", *texts.texts], rows)
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
    console.table("Experts of each layer that texts select", columns, counts)


def plot_texts(path: Path, texts: Texts) -> None:
    """Draw the tree and the matrix."""
    from prunecli.report.pictures import similarity_map, trees
    from prunecli.report.render import save_pictures

    drawn = trees({"Experts, by text": texts.clustering}, texts.families)
    save_pictures([[*drawn, similarity_map("Jaccard similarity", texts.similarity, texts.texts)]], path)
