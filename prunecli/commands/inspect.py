"""`prunecli inspect` and `explain`: the contents of a checkpoint, and why prunecli kept or removed its parts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import CHECKPOINT, DEMO, DemoName, checkpoint_or_demo
from prunecli.commands.command import AS_JSON, OutputOptions, command
from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.methods.options import LoadOptions
from prunecli.options import CheckpointPath, Options, Size, advanced_option, argument, option

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.inventory import Inventory


class Inspect(OutputOptions, LoadOptions):
    """Options of the command."""

    LEFT_OUT = ("output", "plot", "quiet")

    checkpoint: CheckpointPath | None = CHECKPOINT
    fit: Size | None = option(
        "Memory, such as 32GiB: show what fits in it (whole, pruned, layer by layer).",
        metavar="SIZE",
    )
    dtype: str | None = advanced_option(
        "For --fit: type of the weights. Default: as in the checkpoint.", metavar="TYPE", needs="fit"
    )
    demo_model: DemoName = DEMO


@command
def inspect(options: Inspect) -> None:
    """Count a checkpoint's parameters and bytes by part, layers, experts and heads, changed FFNs and embeddings.

    Only headers are read (and 16 values of each tensor for the fingerprint that --json prints).
    """
    from prunecli.model.described import describe_checkpoint
    from prunecli.model.inventory import take_inventory
    from prunecli.tensors.dtypes import parse_dtype

    stored_as = None if options.dtype is None else parse_dtype(options.dtype)
    table, answer = options.table, None
    options.check_table()
    # For a hub model that is not here, what config.json and headers say.
    checkpoint = options.checkpoint or checkpoint_or_demo(None, options.demo_model)
    with describe_checkpoint(checkpoint, **console.listeners()) as opened:
        inventory = take_inventory(opened)
        if options.fit is not None:
            from prunecli.evaluation.capacity import what_fits
            from prunecli.model.cost import usual_load

            answer = what_fits(opened, options.fit, stored_as, usual_load(opened, **options.load))
        if options.as_json or table is not None:
            from prunecli.results.inspection import Inspection

            inspection = Inspection.of(opened, inventory, answer)
            options.write_table(inspection)
        if options.as_json:
            console.print_json(inspection.to_json())
            return
        console.show(_blocks(opened, inventory))
        if answer is not None:
            quantised, named = bool(inventory.quantisation), str(options.checkpoint or opened.path)
            assumed = answer.assumed(is_stock=opened.runs_stock)
            next_steps = answer.next_steps(named, stored_as, quantised=quantised)
            console.show([answer.shown(quantised=quantised), *assumed, *next_steps])
        if table is not None:
            console.note(f"Written to {table}.")


def _blocks(opened: Checkpoint, inventory: Inventory) -> console.Blocks:
    from prunecli.model.embedding import describe_embeddings
    from prunecli.model.parts import describe_parts, ranges
    from prunecli.tensors.dtypes import config_dtype
    from prunecli.tensors.hub.names import with_origins

    rows = [
        {
            "part": part,
            "tensors": f"{amount.tensors:,}",
            "parameters": f"{amount.parameters:,}",
            **_share(amount.bytes, inventory),
        }
        for part, amount in {**inventory.parts, "total": inventory.total}.items()
    ]
    dtypes, count = " and ".join(map(config_dtype, inventory.dtypes)) or "empty", len(opened.files)
    files = opened.files[0].name if count == 1 else f"{count} {opened.files[0].suffix} files"
    yield f"{with_origins(str(opened.path))}: {opened.model_type or 'no model_type'}, {dtypes}, {files}"
    yield console.table("Parameters", rows)
    experts = [
        {
            "sparse layer": layer.name,
            "experts": _held(len(layer.computed), layer.original_experts)
            + (f", {len(layer.constants)} constants" if layer.constants else ""),
        }
        for layer in inventory.layers
    ]
    yield console.table("Experts", experts)
    yield console.table("Heads", _heads(inventory))
    for stack in inventory.stacks:
        if len(stack.layers) < stack.original_layers:
            numbers = ranges(stack.layers)
            yield f"Layers of the {stack.side}: {numbers} of the original {stack.original_layers}"
    if changed := describe_parts(inventory.attentions, {}):
        yield f"Attention: {changed}"
    if changed := describe_parts(inventory.ffns, opened.structure.widths):
        yield f"FFN: {changed}"
    if changed := describe_embeddings(inventory.tables):
        yield f"Embeddings: {changed}"
    if (quantised := inventory.quantisation) is not None:
        ways = "; ".join(f"{count:,} matrices {scheme}" for scheme, count in quantised.schemes.items())
        held = f"{ways}; " if ways else ""
        method = quantised.method or "method not named"
        yield f"Quantised: {method}: {held}{quantised.bits_per_parameter:.2f} bits a parameter over all"
    modules = [
        {
            "module": module,
            "tensors": f"{len(names):,}",
            **_share(sum(opened.tensors[name].nbytes for name in names), inventory),
        }
        for module, names in inventory.modules.items()
    ]
    yield console.table("Other, by name of module", modules)
    if opened.runs_stock:
        _show_found(opened, inventory)
    if opened.structure.history:
        from prunecli.report.history import step_text

        yield "History:"
    for step in opened.structure.history:
        source = step.get("source", {}).get("path")
        yield f"  {step_text(step, *([f'from {source}'] if source else []))}"


def _show_found(opened: Checkpoint, inventory: Inventory) -> None:
    """Print what can be removed from a checkpoint whose family is not declared."""
    from prunecli.model.find_axes import axes_of
    from prunecli.model.probe import UNSTATED

    try:
        family, sizes = opened.require_architecture(), opened.layout.sizes
    except CheckpointError as error:
        what = "Experts alone" if inventory.layers and not opened.has_constants else "Nothing"
        console.note(f"{what} can be removed from it: {error.message}")
        return
    parts = [
        f"{sizes.depth(stack):,} {stack.side} layers ({stack.depth})"
        for stack in family.stacks
        if stack.depth in family.found.movable
    ]
    widths = dict.fromkeys(stack.ffn.width for stack in family.stacks if stack.ffn.tensors)
    parts += [f"{sizes.count(key):,} hidden units in each layer ({key})" for key in widths if key != UNSTATED]
    parts += [f"{sizes.count(key)} heads ({key})" for key in family.head_counts]
    parts += [f"{sizes.count(key):,} hidden units of each expert ({key})" for key in family.found.experts]
    for key in family.vocabulary[:1]:
        parts.append(f"{sizes.count(key):,} tokens ({key})")
    with suppress(UnsupportedModelError):
        (axis,) = axes_of(opened, "channel")
        parts.append(f"{axis.count:,} channels of the hidden states ({axis.keys[0]})")
    heads = {attention.heads for stack in family.stacks for attention in stack.attentions}
    apart = [f"{sizes.count(UNSTATED):,} hidden units in each layer"] if UNSTATED in widths else []
    apart += ["heads"] if family.found.uneven.keys() & heads and not family.head_counts else []
    console.note(
        f"Found by asking {family.model_class}, and tried on a small copy: {'; '.join(parts)}. What is removed from "
        "these leaves a stock model."
        + (f" The result without some of these needs prunecli: {'; '.join(apart)}." if apart else "")
    )


def _heads(inventory: Inventory) -> list[dict[str, str]]:
    """A line for each kind of attention while all of its layers have their heads, else one for each layer."""
    counts: dict[str, list[str]] = {}
    for layer in inventory.attentions:
        counts.setdefault(layer.kind, []).append(_held(layer.count, layer.original_heads))
    rows = {kind: (len(own), own[0]) for kind, own in counts.items() if len(set(own)) == 1}
    for layer in inventory.attentions:
        if layer.kind not in rows:
            rows[layer.name] = 1, _held(layer.count, layer.original_heads)
    return [
        {"attention": name, "layers": str(layers), "heads in each": heads}
        for name, (layers, heads) in rows.items()
    ]


def _share(size: int, inventory: Inventory) -> dict[str, str]:
    """Bytes, and their share of all bytes."""
    return {"bytes": console.bytes_text(size), "share": f"{size / max(1, inventory.total.bytes):.1%}"}


def _held(held: int, original: int) -> str:
    return f"{held}" if held == original else f"{held} of {original}"


class Explain(Options):
    """Options of the command."""

    directory: Path = argument("A result of prunecli.", "DIR", ..., role="input")
    what: tuple[str, ...] = argument(
        'What to explain: expert 7 of layer 3; head 2 of decoder cross-attention layer 1; token "▁house". Default: '
        "where each layer was cut.",
        "WHAT",
        (),
        repeated=True,
    )
    as_json: bool = AS_JSON


@command
def explain(options: Explain) -> None:
    """Say why an expert, head, hidden unit, layer or token was kept or dropped, from the result's directory alone.

    Experts, heads, layers and units are numbered as in the original model. No weights are read, and the statistics need
    not be there.
    """
    from prunecli.analysis.explanation import Explained, parse_question
    from prunecli.results.decisions import Explanation, document

    question = parse_question(options.what) if options.what else None
    explained = Explained.open(options.directory)
    if question is None:
        console.result(document(explained.decisions).to_json, explained.overview, as_json=options.as_json)
    else:
        answers = explained.answers(question)
        made = Explanation(
            format=Explanation.FORMAT,
            prunecli=prunecli.__version__,
            question=" ".join(options.what),
            answers=answers,
        )
        console.result(made.to_json, (answer.text for answer in answers), as_json=options.as_json)
