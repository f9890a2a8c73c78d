"""`prunecli compare-models`: how alike two models are inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from prunecli.errors import UsageError
from prunecli.evaluation.options import SimilarityOptions
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
    from prunecli.results.similarity import Similarity


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
