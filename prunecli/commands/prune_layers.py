"""`prunecli prune-layers`: remove whole transformer layers, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prunecli.commands import console
from prunecli.commands.groups import Helps, Without, flattened
from prunecli.commands.options import (
    CheckpointArgument,
    ScoreFiles,
    SelectionOptions,
    SideName,
    StreamOption,
)
from prunecli.commands.rewriting import How
from prunecli.commands.text_options import UNLABELLED, TextOptions
from prunecli.errors import UsageError
from prunecli.methods.names import LayerMetric


@flattened
def prune_layers(
    checkpoint: CheckpointArgument = None,
    selection: Annotated[
        SelectionOptions,
        Without({"keep", "least", "multiple_of", "uniform"}),
        Helps(
            ratio="Fraction of the layers to remove, encoder and decoder ranked together; rounded up. Default: 0.25.",
            count="Number of layers to remove, instead of --ratio.",
        ),
    ] = SelectionOptions(),
    side: Annotated[
        SideName | None,
        typer.Option(help="The only stack that --ratio or --count count in."),
    ] = None,
    encoder: Annotated[
        int | None,
        typer.Option(min=0, help="Layers that the encoder loses."),
    ] = None,
    decoder: Annotated[
        int | None,
        typer.Option(min=0, help="Layers that the decoder loses."),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="The layers to remove, by number from 0: 3,7-9; of a model with both stacks encoder:3,decoder:1-2.",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="LIST|FILE",
            help="The layers to keep, written like --remove (a stack that the list does not name keeps all layers), or "
            "a file: what --dry-run --json printed.",
        ),
    ] = None,
    metric: Annotated[
        LayerMetric | None,
        typer.Option(
            help="What a layer is worth: cosine or cka, how little its output is like its input; perplexity, how much "
            "that of the text rises without it; embedding, how far the text's vector moves without it; last, how near "
            "it is to the beginning; random. The first four run the model on --data or --text. Default: "
            "that of --scores, or cosine; for a model without a head embedding.",
        ),
    ] = None,
    contiguous: Annotated[
        bool,
        typer.Option(
            "--contiguous",
            help="Layers side by side: those whose input is most like their output (an angle).",
        ),
    ] = False,
    texts: Annotated[TextOptions, UNLABELLED] = TextOptions(),
    files: ScoreFiles = ScoreFiles(),
    stream: StreamOption = False,
    how: How = How(Path("pruned-layers")),
) -> None:
    """Remove whole layers, those that change the hidden states least; the result is a stock model with fewer.

    One layer of each stack stays. Quality comes back by training: prunecli finetune.
    """
    from prunecli.methods.layers.plan import LAST_WARNING, LayerOptions, plan_layers
    from prunecli.methods.units import TextRun

    options = selection.of(
        LayerOptions,
        encoder=encoder,
        decoder=decoder,
        remove=remove,
        keep=keep,
        side=side,
        metric=metric,
        scores=files.scores,
        contiguous=contiguous,
    )
    choice = texts.choice(checkpoint)
    options.check()
    named = choice.first_given
    if not options.needs_text and named is not None:
        raise UsageError(f"{named}: nothing here looks at text.", "Leave it out, or rank by --metric cosine.")
    if stream and options.needs_text:
        raise UsageError(
            f"--stream: --metric {metric or 'cosine'} runs the model, all of which has to be here for that.",
            "Leave --stream out, or choose by --metric last, random or by name.",
        )
    save = files.saver(measures=options.needs_text, force=how.force)
    with how.open(checkpoint, stream=stream) as opened:
        if metric == "last":
            console.warn(LAST_WARNING)
        run = TextRun(choice, texts.running, save, how.progress, console.note)
        plan = plan_layers(opened, options, run)
        how.note(*plan.reasons)
        scored = choice if options.needs_text else None
        how.prune(opened, plan, options.seed, scored=scored, device=texts.device)
