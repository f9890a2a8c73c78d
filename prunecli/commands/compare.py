"""`prunecli compare-models`, `compare-heads` and `compare-languages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prunecli.commands import console
from prunecli.commands.checkpoints import (
    CHECKPOINT,
    checkpoint_directory,
    checkpoint_or_demo,
    checkpoints_here,
    with_demo_text,
)
from prunecli.commands.command import OutputOptions, command, plot_option, result_option
from prunecli.errors import PruneError, StatisticsError, UsageError
from prunecli.evaluation.options import SimilarityOptions
from prunecli.methods.options import LanguageOptions
from prunecli.options import (
    ADVANCED,
    TEXT,
    CheckpointPath,
    argument,
    option,
    paths,
)
from prunecli.text.choice import TextChoice

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from prunecli.results.document import Document
    from prunecli.results.languages import Languages, Texts
    from prunecli.results.similarity import HeadComparison, Similarity


class CompareModels(OutputOptions, TextChoice, SimilarityOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"whole_files", "labelled"})

    checkpoint: CheckpointPath | None = CHECKPOINT
    other: CheckpointPath | None = argument(
        None,
        "Checkpoint to compare with. Default: CHECKPOINT is compared with itself, component by component.",
        "OTHER",
        role="checkpoint",
    )
    split: str = option("test", "Split of --data.", panel=TEXT)
    benchmarks: tuple[CheckpointPath, ...] = option(
        (),
        "Checkpoint like CHECKPOINT from another seed, whose similarity to it counts as 100%; may be given again.",
        metavar="CHECKPOINT",
        panel=ADVANCED,
        role="checkpoint",
    )
    output: Path = result_option("similarity.json", "File of the similarities.")
    plot: Path | None = plot_option("Draw the heat maps of all components")


@command(CompareModels)
def compare_models(options: CompareModels) -> None:
    """Compare what the components of two models make of the same sentences: every attention and every FFN.

    The decoder reads the references. Several language pairs are compared one by one, and averaged.
    """
    from prunecli import demo
    from prunecli.analysis.model_similarity import (
        compare,
        neighbours_of,
        parallel_portions,
        plain_portions,
        random_label,
        similarity_of,
    )
    from prunecli.evaluation.options import labels_for
    from prunecli.model.checkpoint import open_model
    from prunecli.model.history import pruned_pairs
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import dtype_name, fitting_dtype
    from prunecli.results.document import header
    from prunecli.results.similarity import Similarity
    from prunecli.text.plain import read_plain

    options.check_outputs()
    if options.checkpoint is not None:
        named = filter(None, (options.checkpoint, options.other))
        compared = [checkpoint_directory(path) for path in named]
    elif here := checkpoints_here():
        of = f", the first of {len(here)} checkpoints here" if len(here) > 1 else ""
        console.note(f"No checkpoint given: comparing the bundled demo model with {here[0]}{of}.")
        compared = [demo.CHECKPOINT, here[0]]
    else:
        compared = [checkpoint_or_demo(None)]
    for name in ("benchmarks", "random_baseline"):
        if getattr(options, name) and len(compared) == 1:
            raise UsageError(f"`{name}` goes with two models", "Name the checkpoint to compare with.")
    labels = labels_for([*compared, *map(checkpoint_directory, options.benchmarks)])
    opened = {label: open_model(path) for label, path in labels.items()}
    dtype = fitting_dtype(opened, choose_devices(options.device), options.dtype, say=console.note)
    options = options.model_copy(update={"dtype": dtype_name(dtype)})
    if options.context is not None and not options.files:
        raise UsageError("`context` goes with `files`", "Leave it out.")
    choice = with_demo_text(options, compared)
    if choice.files:
        if any(given for name, given in choice.given.items() if name not in ("files", "context")):
            raise UsageError(
                "`files` does not go with `data`, `source_file`, `target_file`, `langs` or `pairs`",
                "Plain text is for models with one stack; leave out one of the two.",
            )
        portions = plain_portions(read_plain(paths(choice.files), max_sentences=options.max_sentences))
    else:
        parallel, directions = choice.parallel(console.note)
        if options.pairs is None and options.langs is None:
            directions = pruned_pairs(list(labels.values()), directions) or directions
        portions = parallel_portions(parallel, directions)
    names = list(opened)
    found = compare(opened, portions, options, console.progress(options.quiet))
    shown = names[: len(compared)]
    main = found[shown[-1]]
    references = {name: found[name] for name in names[2:]}
    randoms = [found[random_label(seed)] for seed in options.seeds]
    result = similarity_of(
        main,
        list(references.values()),
        randoms,
        **header(Similarity.FORMAT, list(opened.values()), None),
        checkpoints=list(opened),
        benchmarks=list(references),
        **({"random_seeds": list(options.seeds)} if randoms else {}),
        device=options.device,
        dtype=options.dtype,
        context=options.context,
        text=[
            {
                "name": portion.name,
                "sentences": len(portion),
                "neighbours": neighbours_of(portion, options),
                "sha256": portion.sha256,
            }
            for portion in portions
        ],
    )
    options.write(result, leave_out=("matrices",))
    if options.plot is not None:
        from prunecli.report.pictures import component_maps
        from prunecli.report.render import save_pictures

        save_pictures(component_maps(result), options.plot)

    def show() -> None:
        show_comparison(result, shown)
        least, width = min(map(len, portions)), max(main.widths)
        many = f"each of {len(portions)} pairs, averaged" if len(portions) > 1 else portions[0].name
        console.out(f"{least:,} sentences of {many}.")
        if "cka" in main.similarities and least < width:
            console.out(
                f"With fewer sentences than the width of the outputs ({least:,} < {width:,}) CKA comes out too high: "
                "give more, or --benchmarks to compare with."
            )

    options.show(result.to_json, show)


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
        console.table(title, columns, cells, text_columns=2 if alone else 1)
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
    console.table("Means", ["mean of the", *(title for _, title, _ in columns)], rows)


def _text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


FORMS = ("3f", "2g", "3f", "2g")
"""Decimal places of r and p, of both correlations."""


class CompareHeads(OutputOptions):
    """Options of the command."""

    first: Path = argument(..., "Scores of heads, from score-heads.", "A.json", role="input")
    second: Path = argument(..., "Scores of the same heads on another text or task.", "B.json", role="input")
    output: Path = result_option("head-comparison.json")
    plot: Path | None = plot_option("Also draw a point for each head")


@command(CompareHeads)
def compare_heads(options: CompareHeads) -> None:
    """Compare the importance of heads on two texts or tasks.

    Correlations of all heads and of each kind of attention: Pearson's of the values, Spearman's of their ranks.
    """
    from prunecli.results.unit_scores import read_scores

    first, second = options.first, options.second
    if first.resolve() == second.resolve():
        raise UsageError(f"{first} is given twice", "Name the scores on two texts or tasks.")
    scores = read_scores(first), read_scores(second)
    options.check_outputs()

    from prunecli.results.similarity import compare_heads as compare

    same_name = first.name == second.name
    comparison = compare(scores, (str(first), str(second)) if same_name else (first.name, second.name))
    options.write(comparison)
    if options.plot is not None:
        from prunecli.report.pictures import head_comparison
        from prunecli.report.render import save_pictures

        save_pictures([[head_comparison(comparison)]], options.plot)
    options.show(comparison.to_json, lambda: show_heads(comparison))


def show_heads(comparison: HeadComparison) -> None:
    rows = []
    for one in comparison.correlations:
        values = one.pearson, one.pearson_p, one.spearman, one.spearman_p
        texts = [
            "-" if value is None else f"{value:.{form}}" for value, form in zip(values, FORMS, strict=True)
        ]
        rows.append([one.of, f"{one.heads:,}", *texts])
    title = f"Importance of heads, {comparison.first.file} and {comparison.second.file}"
    console.table(title, ["attention", "heads", "Pearson r", "p", "Spearman r", "p"], rows)
    if comparison.left_out:
        console.out(f"Heads that only one of the two has are left out: {comparison.left_out:,}.")
    fingerprints = {model.fingerprint for model in comparison.models}
    if len(fingerprints) > 1:
        console.out("The scores are of two models: heads are compared by name and original number.")


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
