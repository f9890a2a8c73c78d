"""`prunecli inspect`: what a checkpoint holds and whether it fits, from headers alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.commands.checkpoints import CHECKPOINT, DEMO, DemoName, checkpoint_or_demo
from prunecli.commands.command import OutputOptions, command
from prunecli.errors import CheckpointError, UnsupportedModelError, UsageError
from prunecli.methods.options import LoadOptions
from prunecli.options import CheckpointPath, Size, advanced_option, option
from prunecli.tensors.quantities import counted, option_size

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.inventory import Inventory, Quantisation
    from prunecli.results.inspection import Fit, Way


class Inspect(OutputOptions, LoadOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"output", "plot", "quiet"})

    checkpoint: CheckpointPath | None = CHECKPOINT
    fit: Size | None = option(
        None,
        "Memory, such as 32GiB: show what fits in it (whole, pruned, layer by layer).",
        metavar="SIZE",
    )
    dtype: str | None = advanced_option(
        None, "For --fit: type of the weights. Default: as in the checkpoint.", metavar="TYPE"
    )
    demo_model: DemoName = DEMO


@command(Inspect)
def inspect(options: Inspect) -> None:
    """Count a checkpoint's parameters and bytes by part, layers, experts and heads, changed FFNs and embeddings.

    Only headers are read (and 16 values of each tensor for the fingerprint that --json prints).
    """
    from prunecli.model.described import describe_checkpoint
    from prunecli.model.inventory import take_inventory
    from prunecli.tensors.dtypes import parse_dtype

    stored_as = None if options.dtype is None else parse_dtype(options.dtype)
    if options.fit is None:
        for name in ("dtype", *LoadOptions.model_fields):
            if name in options.changed:
                raise UsageError(f"`{name}` goes with `fit`", "Give `fit`, or leave it out.")
    table, answer = options.table, None
    options.check_table()
    # For a hub model that is not here, what config.json and headers say.
    checkpoint = options.checkpoint or checkpoint_or_demo(None, options.demo_model)
    with describe_checkpoint(checkpoint, say=console.note, progress=console.progress()) as opened:
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
        _show(opened, inventory)
        if answer is not None:
            quantised = bool(inventory.quantisation)
            words = ["prune-experts", str(options.checkpoint or opened.path)]
            show_fits(answer, is_stock=opened.runs_stock, quantised=quantised)
            for line in next_steps(answer, words, stored_as, quantised=quantised):
                console.out(line)
        if table is not None:
            console.note(f"Written to {table}.")


def _show(opened: Checkpoint, inventory: Inventory) -> None:
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
    console.out(
        f"{with_origins(str(opened.path))}: {opened.model_type or 'no model_type'}, {dtypes}, {files}"
    )
    console.table("Parameters", rows)
    experts = [
        {
            "sparse layer": layer.name,
            "experts": _held(len(layer.computed), layer.original_experts)
            + (f", {len(layer.constants)} constants" if layer.constants else ""),
        }
        for layer in inventory.layers
    ]
    console.table("Experts", experts)
    console.table("Heads", _heads(inventory))
    for stack in inventory.stacks:
        if len(stack.layers) < stack.original_layers:
            numbers = ranges(stack.layers)
            console.out(f"Layers of the {stack.side}: {numbers} of the original {stack.original_layers}")
    if changed := describe_parts(inventory.attentions, {}):
        console.out(f"Attention: {changed}")
    if changed := describe_parts(inventory.ffns, opened.structure.widths):
        console.out(f"FFN: {changed}")
    if changed := describe_embeddings(inventory.tables):
        console.out(f"Embeddings: {changed}")
    if inventory.quantisation is not None:
        _show_quantisation(inventory.quantisation)
    modules = [
        {
            "module": module,
            "tensors": f"{len(names):,}",
            **_share(sum(opened.tensors[name].nbytes for name in names), inventory),
        }
        for module, names in inventory.modules.items()
    ]
    console.table("Other, by name of module", modules)
    if opened.runs_stock:
        _show_found(opened, inventory)
    if opened.structure.history:
        from prunecli.report.history import step_text

        console.out("History:")
    for step in opened.structure.history:
        source = step.get("source", {}).get("path")
        console.out(f"  {step_text(step, *([f'from {source}'] if source else []))}")


def _show_quantisation(found: Quantisation) -> None:
    ways = "; ".join(f"{count:,} matrices {scheme}" for scheme, count in found.schemes.items())
    held = f"{ways}; " if ways else ""
    method = found.method or "method not named"
    console.out(f"Quantised: {method}: {held}{found.bits_per_parameter:.2f} bits a parameter over all")


def _show_found(opened: Checkpoint, inventory: Inventory) -> None:
    """Print what can be removed from a checkpoint whose family is not declared."""
    from prunecli.model.find_axes import axes_of

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
    parts += [
        f"{sizes.count(key):,} hidden units in each layer ({key})"
        for key in dict.fromkeys(stack.ffn.width for stack in family.stacks if stack.ffn.tensors)
    ]
    parts += [f"{sizes.count(key)} heads ({key})" for key in family.head_counts]
    parts += [f"{sizes.count(key):,} hidden units of each expert ({key})" for key in family.found.experts]
    for key in family.vocabulary[:1]:
        parts.append(f"{sizes.count(key):,} tokens ({key})")
    with suppress(UnsupportedModelError):
        (axis,) = axes_of(opened, "channel")
        parts.append(f"{axis.count:,} channels of the hidden states ({axis.keys[0]})")
    console.note(
        f"Found by asking {family.model_class}, and tried on a small copy: {'; '.join(parts)}. What is removed from "
        "these leaves a stock model."
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


def show_fits(fits: Fit, *, is_stock: bool, quantised: bool) -> None:
    """Print the table, then what it assumes.

    Args:
        is_stock: whether the model runs in its stock class.
        quantised: whether its weights are stored as codes.
    """
    named = [(_name(way, quantised=quantised), way) for way in (*fits.whole, *fits.pruned)]
    named += [(f"layer by layer, {way.dtype}", way) for way in fits.by_layer.ways]
    rows = [
        {
            **vars(way),
            "way": name,
            "besides": way.needed_bytes - way.weight_bytes,
            "is": ("no", "yes")[way.fits],
        }
        for name, way in named
    ]
    columns = {
        "way": "{way}",
        "weights": "{weight_bytes!b}",
        "besides": "{besides!b}",
        "together": "{needed_bytes!b}",
        "fits": "{is}",
    }
    console.table(f"What fits in {console.bytes_text(fits.budget_bytes or 0)}", rows, columns)
    for line in _assumed(fits, is_stock=is_stock):
        console.out(line)


def next_steps(fits: Fit, command: Sequence[str], dtype: str | None, *, quantised: bool) -> Iterator[str]:
    """Yield whether the model fits, and else what makes it fit: `command` with the smallest ratio, or shrink.

    Args:
        dtype: the type asked for; None: any will do.
        quantised: as stored and decoded are two things to run then, and said apart.
    """
    from prunecli.tensors.dtypes import config_dtype

    if quantised:
        for way in fits.whole:
            same = [one for one in fits.pruned if one.dtype == way.dtype]
            how = "As stored" if way.as_stored else f"Decoded to {way.dtype}"
            yield f"{how}, {'it fits as it is.' if way.fits else _next(same, command, lambda _way: False)}"
        return
    asked = None if dtype is None else config_dtype(dtype)
    whole, pruned = (
        [way for way in ways if asked in (None, way.dtype)] for ways in (fits.whole, fits.pruned)
    )
    fitting = [way for way in whole if way.fits]
    if fits.whole[0].fits:
        yield "It fits as it is."
    elif fitting:
        yield f"It fits in {fitting[0].dtype}."
    elif fits.pruned:
        line = _next(pruned, command, lambda way: bool(asked) or not way.as_stored)
        yield line[0].upper() + line[1:]
    else:
        smallest, budget = min(fits.whole, key=lambda way: way.needed_bytes), fits.budget_bytes or 0
        yield f"It needs {console.bytes_text(smallest.needed_bytes - budget)} more, in {smallest.dtype}."
        words = ["shrink", command[1], "--fit", option_size(budget)]
        yield f"Next, with text of your own: prunecli {shlex.join(words)} --text FILE"


def _next(pruned: Sequence[Way], command: Sequence[str], cast: Callable[[Way], bool]) -> str:
    """The ratio of `pruned` that keeps most and fits, with its type if it is `cast`."""
    ratios = [way for way in pruned if way.fits]
    if not ratios:
        return "it does not fit, and no ratio of its experts makes it."
    least = min(ratios, key=lambda way: way.ratio or 0)
    words = [*command, "--ratio", f"{least.ratio:g}"]
    words += ["--dtype", least.dtype] if cast(least) else []
    return f"it does not fit with all its experts. Next: prunecli {shlex.join(words)}"


def _name(way: Way, *, quantised: bool) -> str:
    stored = ", as stored" if way.as_stored else ", decoded" if quantised else ""
    name = "whole" if way.ratio is None else f"ratio {way.ratio:g}"
    return f"{name}, {way.dtype}{stored}"


def _assumed(fits: Fit, *, is_stock: bool) -> Iterator[str]:
    texts = counted(fits.batch or 1, "text")
    yield f"Whole: {texts} decoding, beam {fits.beam}, {fits.length:,} tokens, and 10% of the memory free."
    if is_stock:
        first = fits.whole[0]
        cache, decoding = first.cache_bytes or 0, first.decoding_bytes or 0
        yield (
            f"Besides: {console.bytes_text(cache)} of keys, values and states, "
            f"{console.bytes_text(decoding - cache)} of activations."
        )
    yield from fits.unknown
    if pruned := {way.keep: way for way in fits.pruned}:
        yield (
            "; ".join(
                f"ratio {way.ratio:g} keeps {way.keep:,} of {way.held:,} experts" for way in pruned.values()
            ).capitalize()
            + "."
        )
    if not fits.by_layer.ways:
        return
    batch = f"batches of {fits.by_layer.batch_tokens:,} tokens, {fits.by_layer.batch_length:,}"
    if is_stock:
        yield f"Layer by layer (collect-gates --memory): {batch} a window."
    else:
        yield f"Layer by layer (--memory): {batch} a sentence."
    if tokens := [
        f"{way.state_tokens:,} in {way.dtype}" for way in fits.by_layer.ways if way.state_tokens is not None
    ]:
        yield f"Tokens' hidden states in memory: {', '.join(tokens)}; then a file."
