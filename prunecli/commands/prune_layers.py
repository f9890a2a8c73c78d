"""`prunecli prune-layers`: remove whole transformer layers, write a checkpoint without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from prunecli.commands.rewriting import How, Shown, removal
from prunecli.commands.text_options import UNLABELLED, TextOptions
from prunecli.errors import UsageError
from prunecli.methods.layers.names import LayerMetric
from prunecli.tensors.quantities import parse_share

if TYPE_CHECKING:
    from prunecli.methods.layers.plan import LayerPlan
    from prunecli.results.rewriting import LayerSelection


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
        from prunecli.methods.layers.rewrite import rewrite_layers
        from prunecli.planning import plan_layers_on_text

        if metric == "last":
            console.warn(LAST_WARNING)
        plan = plan_layers_on_text(
            opened, choice, options, texts.running, progress=how.progress, say=console.note
        )
        how.note(*plan.reasons)
        scored = choice if options.needs_text else None
        shown = how.apply(opened, rewrite_layers(opened, plan), scored, texts.device)
        how.show(lambda: _document(shown, plan, seed), lambda: _show(shown, plan))


def _rows(shown: Shown, plan: LayerPlan) -> list[dict[str, Any]]:
    """Every layer of the source: its score, where it was ranked, and whether it stays."""
    checkpoint = shown.result.source
    return [
        {
            "name": layer.name,
            "side": layer.side,
            "layer": layer.number,
            "original_layer": checkpoint.structure.original_layer(layer.side, layer.number),
            "score": plan.scores[layer.side][layer.number] if layer.side in plan.scores else None,
            "kept": layer.number in plan.kept[layer.side],
        }
        for layer in checkpoint.layout.layers
    ]


def _document(shown: Shown, plan: LayerPlan, seed: int) -> LayerSelection:
    from prunecli.results.rewriting import LayerSelection

    rows = _rows(shown, plan)
    return shown.document(
        LayerSelection,
        seed,
        layers_before=len(rows),
        layers_after=sum(row["kept"] for row in rows),
        kept=plan.kept,
        layers=rows,
    )


def _show(shown: Shown, plan: LayerPlan) -> None:
    rows = _rows(shown, plan)
    if plan.scores:
        cells = [
            [
                row["name"],
                "-" if row["score"] is None else f"{row['score']:.4g}",
                "" if row["kept"] else "removed",
            ]
            for row in rows
        ]
        console.show(console.table("Layers", ("layer", "score", ""), cells))
    totals = [
        [side, *removal(sum(row["side"] == side for row in rows), len(numbers))]
        for side, numbers in plan.kept.items()
    ]
    console.show(console.table("Depth", ("stack", "before", "kept", "removed"), totals))
    shown.show_sizes_and_place()
