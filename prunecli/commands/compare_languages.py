"""`prunecli compare-languages`: which languages, or texts of language models, use the same experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prunecli.commands import console
from prunecli.commands.command import command
from prunecli.commands.outputs import OutputOptions
from prunecli.errors import PruneError, StatisticsError, UsageError
from prunecli.methods.options import Balance, Strategy
from prunecli.options import ADVANCED, SELECTION, Share, argument, option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.results.document import Document
    from prunecli.results.languages import ExpertsPerLayer, Languages, Relation, Texts


class CompareLanguages(OutputOptions):
    """Options of the command."""

    gates: tuple[Path, ...] = argument(
        (Path("gates.json"),), "Gate statistics. Default: ./gates.json.", "GATES.json", role="input"
    )
    ratio: Share = option(
        0.75, "Fraction of the experts removed, in [0, 1), such as 0.75 or 75%.", metavar="R"
    )
    output: Path = option(
        Path(),
        "File of the result. Default: languages.json; for texts texts.json.",
        flag="--output -o",
        role="output",
    )
    langs: tuple[str, ...] = option(
        (), "Languages: all pairs between them.", metavar="A,B,C", panel=SELECTION
    )
    texts: tuple[str, ...] = option(
        (), "Language models: texts to compare. Default: all.", flag="--for", metavar="A,B", panel=SELECTION
    )
    metric: str | None = option(
        None,
        "Metric of the experts, as in prune-experts. Default: importance; for language models reap.",
        metavar="NAME",
        panel=SELECTION,
    )
    strategy: Strategy | None = option(
        None,
        "How experts are selected: side-threshold, global-threshold, per-layer. Default: side-threshold; for texts "
        "per-layer.",
        panel=SELECTION,
    )
    balance: Balance | None = option(
        None, "Encoder experts per decoder expert. Default: 1:1.", metavar="E:D", panel=SELECTION
    )
    least: int | None = option(
        None,
        "Number of experts that every layer keeps. Default: 4; for texts the router's top-k.",
        flag="--min",
        panel=SELECTION,
        ge=1,
    )
    linkage: Literal["ward", "average", "complete", "single"] = option(
        "ward", "How clusters of languages join: ward, average, complete, single.", panel=ADVANCED
    )
    layer_metric: str | None = option(
        None,
        "Metric of the experts per layer, such as top1 in Figure 1 of the paper. Default: that of --metric.",
        metavar="NAME",
        panel=ADVANCED,
    )
    groups: Path | None = option(
        None,
        "Also experts of each side by group of languages: a language, a tab and its group on each line, or {language: "
        "group} in .json.",
        panel=ADVANCED,
        role="input",
    )
    families: Path | None = option(
        None,
        "Colours of the trees in --plot and the report: a language, a tab and its family on each line, or .json.",
        panel=ADVANCED,
        role="input",
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
        TextOptions,
        compare_by_language,
        compare_by_text,
        language_options,
        similarity_matrices,
    )
    from prunecli.methods.experts.metrics import metric_named
    from prunecli.results.gates import merge, read_gates
    from prunecli.text.parallel import read_groups
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
        if options.metric is not None:
            metric_named(options.metric)
        colours = {} if options.families is None else read_groups(options.families)
        asked = TextOptions(
            options.ratio, options.metric, options.least, options.linkage, options.texts, colours
        )
        result = found = compare_by_text(statistics, asked, names)
        show = partial(show_texts, found)
        if options.plot is not None:
            plot_texts(options.plot, found)
    else:
        if options.texts:
            raise UsageError(
                "`texts` names texts of language models; these statistics are by pairs of languages.",
                "Name languages with `langs`.",
            )
        chosen = language_options(
            ratio=options.ratio,
            metric=options.metric,
            strategy=options.strategy,
            balance=options.balance,
            minimum=options.least,
            linkage=options.linkage,
            languages=options.langs,
            layer_metric=options.layer_metric,
            groups=options.groups,
            families=options.families,
        )
        result = languages = compare_by_language(statistics, chosen, names)
        show = partial(show_languages, languages)
        if len(languages.pairs) > TABLE_PAIRS:
            leave_out = ("similarity",)
        if options.plot is not None:
            similarity = languages.similarity
            if similarity is None:
                matrices = None
            elif similarity.encoder is None or similarity.decoder is None:
                matrices = similarity_matrices(statistics, chosen, languages.pairs)
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
    """Similarities, trees, and experts of each layer."""
    removed = f"{languages.ratio:.0%} of the experts removed by {languages.metric}"
    similarity = languages.similarity
    if similarity is not None:
        title = f"Jaccard similarity of the selected experts ({removed}, {languages.strategy})"
        console.show(_relations(title, similarity.relations))
        encoder, decoder = similarity.encoder, similarity.decoder
        if len(languages.pairs) <= TABLE_PAIRS and encoder is not None and decoder is not None:
            console.show(_triangles(languages.pairs, encoder, decoder))
        else:
            console.out(f"{len(languages.pairs)} pairs; --langs A,B,C lists those between a few languages.\n")
    clusters = languages.clustering
    for side, tree in (("encoder by source", clusters.encoder), ("decoder by target", clusters.decoder)):
        if tree is not None:
            console.out(f"Clusters of languages, {side} ({clusters.linkage} linkage)")
            console.out("\n".join(tree.lines) + "\n")
    if languages.experts_per_layer is not None:
        removed = f"{languages.ratio:.0%} of the experts removed by {languages.experts_per_layer.metric}"
        console.show(_experts(removed, languages.experts_per_layer))
        if languages.experts_per_layer.by_group:
            console.show(_by_group(languages.experts_per_layer))


def _relations(title: str, by_side: Mapping[str, Mapping[str, Relation | None]]) -> console.Shown:
    """One row for each side and each thing that two pairs can have in common."""
    rows = [
        [
            side,
            relation,
            str(spread.comparisons),
            f"{spread.mean:.0%}",
            f"{spread.lowest:.0%} to {spread.highest:.0%}",
        ]
        for side, by_relation in by_side.items()
        for relation, spread in by_relation.items()
        if spread is not None
    ]
    return console.table(title, ["experts of the", "pairs with", "compared", "mean", "range"], rows, 2)


def _triangles(
    pairs: Sequence[str], encoder: Sequence[Sequence[float]], decoder: Sequence[Sequence[float]]
) -> console.Shown:
    """Table 4: the encoder below the diagonal, the decoder above, where a source or target is shared."""
    columns = ["pair", *(str(number) for number in range(1, len(pairs) + 1))]
    rows = []
    for row, pair in enumerate(pairs):
        cells = [
            _cell(pair, other, (encoder if column < row else decoder)[row][column])
            for column, other in enumerate(pairs)
        ]
        rows.append([f"{row + 1} {pair}", *cells])
    return console.table("The same in %, encoder below the diagonal and decoder above", columns, rows)


def _cell(pair: str, other: str, value: float) -> str:
    shared = any(first == second for first, second in zip(pair.split("-"), other.split("-"), strict=True))
    return f"{100 * value:.0f}" if shared and pair != other else "-" if pair == other else ""


def _experts(removed: str, layers: ExpertsPerLayer) -> console.Shown:
    """Experts per layer, and in each side as a whole."""
    rows = [
        [layer, f"{mean:.1f}", f"{lowest} to {highest}"]
        for layer, mean, lowest, highest in zip(
            layers.layers, layers.mean, layers.lowest, layers.highest, strict=True
        )
    ]
    for side in dict.fromkeys(layers.sides):
        means = [mean for mean, own in zip(layers.mean, layers.sides, strict=True) if own == side]
        rows.append([f"{side}, all layers", f"{sum(means):.1f}", ""])
    title = f"Experts per layer under the global threshold ({removed}), mean over {len(layers.by_pair)} pairs"
    return console.table(title, ["layer", "experts", "range"], rows)


def _by_group(layers: ExpertsPerLayer) -> console.Shown:
    """One row per group of sources and group of targets: experts of each side (Table 16)."""
    rows = [
        [group.source, group.target, str(group.pairs), f"{group.encoder:.1f}", f"{group.decoder:.1f}"]
        for group in layers.by_group
    ]
    columns = ["from", "to", "pairs", "encoder", "decoder"]
    return console.table("The same by group of languages: experts of a side", columns, rows, 2)


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
    from prunecli.analysis.language_experts import two_triangles
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
