"""`prunecli compare-models`: how alike two models are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from prunecli.choices import paths
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    checkpoint_directory,
    checkpoint_or_demo,
    checkpoints_here,
)
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    ComputeDtypeOption,
    refuse_absent,
)
from prunecli.commands.outputs import Outputs
from prunecli.commands.text_options import TextOptions
from prunecli.errors import UsageError
from prunecli.tensors.hub.names import checkpoint_path

MeasureChoice = Literal["cka", "lns", "both"]
"""Values of --measure."""


@flattened
def compare_models(
    checkpoint: CheckpointArgument = None,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER",
            parser=checkpoint_path,
            callback=refuse_absent,
            help="The checkpoint to compare it with; default: CHECKPOINT is compared with itself, component by "
            "component.",
        ),
    ] = None,
    benchmarks: Annotated[
        list[Path] | None,
        typer.Option(
            help="Checkpoints like CHECKPOINT from other seeds: their similarity to it is 100%; may be given again.",
            metavar="CHECKPOINT",
            parser=checkpoint_path,
            callback=refuse_absent,
        ),
    ] = None,
    random_baseline: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also the similarity to random weights of CHECKPOINT's architecture, the mean over so many seeds.",
            metavar="SEEDS",
        ),
    ] = None,
    texts: Annotated[TextOptions, Without({"whole_files", "labelled"})] = TextOptions(split="test"),
    measure: Annotated[
        MeasureChoice,
        typer.Option(help="cka: linear CKA; lns: local neighbourhood similarity."),
    ] = "both",
    neighbours: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Neighbours of LNS, as a share of the sentences."),
    ] = 0.05,
    dtype: ComputeDtypeOption = "auto",
    outputs: Annotated[
        Outputs, Helps(plot="Draw the heat maps of all components.", output="The similarities.")
    ] = Outputs(output=Path("similarity.json")),
) -> None:
    """Compare what the components of two models make of the same sentences: every attention and every FFN.

    The decoder reads the references. Several language pairs are compared one by one, and averaged.
    """
    from prunecli import demo
    from prunecli.analysis.model_similarity import (
        MEASURES,
        SimilarityOptions,
        compare,
        neighbours_of,
        parallel_portions,
        plain_portions,
        random_label,
    )
    from prunecli.analysis.similarity_results import similarity_of
    from prunecli.commands.similarity_table import show_comparison
    from prunecli.evaluation.options import labels_for
    from prunecli.model.checkpoint import open_model
    from prunecli.model.history import pruned_pairs
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import dtype_name, fitting_dtype
    from prunecli.results.header import header
    from prunecli.results.similarity import Similarity
    from prunecli.text.plain import read_plain

    outputs.check()
    if checkpoint is not None:
        compared = [checkpoint_directory(path) for path in (checkpoint, other) if path is not None]
    elif here := checkpoints_here():
        of = f", the first of {len(here)} checkpoints here" if len(here) > 1 else ""
        console.note(f"No checkpoint given: comparing the bundled demo model with {here[0]}{of}.")
        compared = [demo.CHECKPOINT, here[0]]
    else:
        compared = [checkpoint_or_demo(None)]
    if benchmarks and len(compared) == 1:
        raise UsageError("--benchmarks goes with two models", "Name the checkpoint to compare with.")
    if random_baseline and len(compared) == 1:
        raise UsageError("--random-baseline goes with two models", "Name the checkpoint to compare with.")
    labels = labels_for([*compared, *map(checkpoint_directory, benchmarks or ())])
    opened = {label: open_model(path) for label, path in labels.items()}
    options = SimilarityOptions(
        measures=MEASURES if measure == "both" else (measure,),
        neighbours=neighbours,
        batch_tokens=texts.batch_tokens,
        context=texts.context,
        device=texts.device,
        dtype=dtype_name(fitting_dtype(opened, choose_devices(texts.device), dtype, say=console.note)),
        random_seeds=tuple(range(random_baseline or 0)),
    )
    if texts.context is not None and not texts.text:
        raise UsageError("--context goes with --text", "Leave it out.")
    choice = texts.choice(compared)
    if choice.files:
        if any(given for name, given in choice.given.items() if name not in ("--text", "--context")):
            raise UsageError(
                "--text does not go with --data, --source-file, --target-file, --langs or --pairs",
                "Plain text is for models with one stack; leave out one of the two.",
            )
        portions = plain_portions(read_plain(paths(choice.files), max_sentences=texts.max_sentences))
    else:
        parallel, directions = choice.parallel(console.note)
        if texts.pairs is None and texts.langs is None:
            directions = pruned_pairs(list(labels.values()), directions) or directions
        portions = parallel_portions(parallel, directions)
    names = list(opened)
    found = compare(opened, portions, options, console.progress(outputs.quiet))
    shown = names[: len(compared)]
    main = found[shown[-1]]
    references = {name: found[name] for name in names[2:]}
    randoms = [found[random_label(seed)] for seed in options.random_seeds]
    result = similarity_of(
        main,
        list(references.values()),
        randoms,
        **header(Similarity.FORMAT, list(opened.values()), None),
        checkpoints=list(opened),
        benchmarks=list(references),
        **({"random_seeds": list(options.random_seeds)} if randoms else {}),
        device=options.device,
        dtype=options.dtype,
        context=texts.context,
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
    outputs.write(result, leave_out=("matrices",))
    if outputs.plot is not None:
        from prunecli.report.pictures import component_maps
        from prunecli.report.render import save_pictures

        save_pictures(component_maps(result), outputs.plot)

    def show() -> None:
        show_comparison(main, shown, list(references.values()), randoms)
        least, width = min(map(len, portions)), max(main.widths)
        many = f"each of {len(portions)} pairs, averaged" if len(portions) > 1 else portions[0].name
        console.out(f"{least:,} sentences of {many}.")
        if "cka" in main.similarities and least < width:
            console.out(
                f"With fewer sentences than the width of the outputs ({least:,} < {width:,}) CKA comes out too high: "
                "give more, or --benchmarks to compare with."
            )

    outputs.show(result.to_json, show)
