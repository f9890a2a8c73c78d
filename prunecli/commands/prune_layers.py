"""`prunecli prune-layers`: remove whole transformer layers, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prunecli.commands import console
from prunecli.commands.groups import flattened
from prunecli.commands.options import (
    CheckpointArgument,
    DtypeOption,
    SeedOption,
    SideName,
    StreamOption,
)
from prunecli.commands.rewriting import How
from prunecli.commands.text_options import UNLABELLED, TextOptions
from prunecli.errors import UsageError
from prunecli.methods.layers.names import LayerMetric
from prunecli.tensors.quantities import parse_share


@flattened
def prune_layers(
    checkpoint: CheckpointArgument = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            parser=parse_share,
            metavar="R",
            help="Fraction of the layers to remove, encoder and decoder ranked together; never less is removed. "
            "Default: 0.25.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=0, help="Layers to remove, instead of --ratio."),
    ] = None,
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
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="The layers to remove, by number from 0: 3,7-9; of a model with both stacks encoder:3,decoder:1-2.",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="The layers to keep, written like --layers; a stack that it does not name keeps all.",
        ),
    ] = None,
    metric: Annotated[
        LayerMetric | None,
        typer.Option(
            help="What a layer is worth: cosine or cka, how little its output is like its input; perplexity, how much "
            "that of the text rises without it; embedding, how far the text's vector moves without it; last, how near "
            "it is to the beginning; random. The first four run the model on --data or --text. Default: cosine; for a "
            "model without a head embedding.",
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
    dtype: DtypeOption = None,
    seed: SeedOption = 0,
    stream: StreamOption = False,
    how: How = How(Path("pruned-layers")),
) -> None:
    """Remove whole layers, those that change the hidden states least; the result is a stock model with fewer.

    One layer of each stack stays. Quality comes back by training: prunecli finetune.
    """
    from prunecli.methods.layers.plan import LAST_WARNING, LayerOptions, refuse_contradictions

    options = LayerOptions(
        ratio=ratio,
        count=count,
        encoder=encoder,
        decoder=decoder,
        layers=layers,
        keep=keep,
        side=side,
        metric=metric,
        contiguous=contiguous,
        dtype=dtype,
        seed=seed,
    )
    choice = texts.choice(checkpoint)
    refuse_contradictions(options)
    named = choice.first_given
    if not options.needs_text and named is not None:
        raise UsageError(f"{named}: nothing here looks at text.", "Leave it out, or rank by --metric cosine.")
    if stream and options.needs_text:
        raise UsageError(
            f"--stream: --metric {metric or 'cosine'} runs the model, all of which has to be here for that.",
            "Leave --stream out, or choose by --metric last, random or by name.",
        )
    with how.open(checkpoint, stream=stream) as opened:
        from prunecli.planning import plan_layers_on_text
        from prunecli.selection.cut import cut

        if metric == "last":
            console.warn(LAST_WARNING)
        plan = plan_layers_on_text(
            opened, choice, options, texts.running, progress=how.progress, say=console.note
        )
        how.note(*plan.reasons)
        scored = choice if options.needs_text else None
        shown = how.apply(opened, cut(opened, plan), scored, texts.device)
        how.show(lambda: shown.selected(plan, seed), lambda: shown.show_selected(plan))
