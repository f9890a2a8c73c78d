"""`prunecli inspect`: what a checkpoint holds and whether it fits, from headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prunecli.commands import console
from prunecli.commands.checkpoints import CHECKPOINT, DEMO, DemoName, checkpoint_or_demo
from prunecli.commands.command import command
from prunecli.commands.outputs import OutputOptions, check_table, write_table, written
from prunecli.errors import CheckpointError, UnsupportedModelError, UsageError
from prunecli.methods.options import Balance, LoadOptions
from prunecli.options import ADVANCED, CheckpointPath, Size, option

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.inventory import Inventory, Quantisation
    from prunecli.model.names import Surmise
    from prunecli.selection.select import Budget


class Inspect(OutputOptions, LoadOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"output", "plot", "quiet"})

    checkpoint: CheckpointPath | None = CHECKPOINT
    fit: Size | None = option(
        None,
        "Memory, such as 32GiB: show what fits in it (whole, pruned, layer by layer), and how long a pass takes.",
        metavar="SIZE",
    )
    dtype: str | None = option(
        None, "For --fit: type of the weights. Default: as in the checkpoint.", metavar="TYPE", panel=ADVANCED
    )
    balance: Balance | None = option(
        None,
        "For --fit: encoder experts kept per decoder expert. Default: as in prune-experts.",
        metavar="E:D",
        panel=ADVANCED,
    )
    multiple_of: int = option(
        1,
        "For --fit: keep a multiple of N experts in each layer, as prune-experts does.",
        panel=ADVANCED,
        ge=1,
    )
    demo_model: DemoName = DEMO


@command(Inspect)
def inspect(options: Inspect) -> None:
    """Count a checkpoint's parameters and bytes by part, layers, experts and heads, changed FFNs and embeddings.

    Only headers are read (and 16 values of each tensor for the fingerprint that --json prints). With --fit, disk and
    matrix products are measured too, for about two seconds.
    """
    from prunecli.model.inventory import take_inventory
    from prunecli.tensors.dtypes import parse_dtype

    stored_as = None if options.dtype is None else parse_dtype(options.dtype)
    if options.fit is None:
        for name in ("dtype", "balance", "multiple_of", *LoadOptions.model_fields):
            if name in options.changed:
                raise UsageError(f"`{name}` goes with `fit`", "Give `fit`, or leave it out.")
    table, answer = options.table, None
    check_table(table, force=options.force)
    with _opened(options) as opened:
        inventory = take_inventory(opened)
        request = None if options.fit is None else _request(opened, options)
        if options.fit is not None and request is not None:
            from prunecli.evaluation.capacity import what_fits
            from prunecli.model.cost import usual_load

            answer = what_fits(opened, options.fit, stored_as, request, usual_load(opened, **options.load))
        if options.as_json or table is not None:
            from prunecli.results.inspection import Inspection

            inspection = Inspection.of(opened, inventory, answer)
            write_table(table, inspection, force=options.force)
        if options.as_json:
            console.print_json(inspection.to_json())
            return
        _show(opened, inventory)
        if answer is not None and request is not None:
            words = ["prune-experts", str(options.checkpoint or opened.path)]
            words += _how(opened, request, options.multiple_of)
            from prunecli.commands.inspect_fit import next_steps, show_fits

            show_fits(answer, inventory, is_stock=opened.runs_stock)
            for line in next_steps(answer, words, stored_as, quantised=bool(inventory.quantisation)):
                console.out(line)
        if table is not None:
            console.note(written(table))


def _opened(options: Inspect) -> Checkpoint:
    """The checkpoint; for a hub model that is not here, what config.json and headers say."""
    from prunecli.model.described import describe_checkpoint

    checkpoint = options.checkpoint
    if checkpoint is None:
        checkpoint = checkpoint_or_demo(None, options.demo_model)
    return describe_checkpoint(checkpoint, say=console.note, progress=console.progress())


def _request(opened: Checkpoint, options: Inspect) -> Budget:
    """How prune-experts removes experts, in whatever number."""
    from prunecli.methods.experts.options import check_kind, of_language_model, request_of
    from prunecli.methods.options import ExpertOptions
    from prunecli.selection.select import Budget

    asked = ExpertOptions(balance=options.balance, multiple_of=options.multiple_of)
    if opened.family is None or not opened.mixtures:
        return Budget()
    check_kind(asked, of_language_model(opened))
    return request_of(opened, asked, opened.mixtures)


def _how(opened: Checkpoint, request: Budget, multiple_of: int) -> list[str]:
    """The options of prune-experts that say so."""
    from prunecli.methods.experts.options import balance_text, of_language_model

    balance = []
    if request.balance is not None and not of_language_model(opened):
        balance = ["--balance", balance_text(request.balance)]
    return balance + (["--multiple-of", str(multiple_of)] if multiple_of > 1 else [])


def _show(opened: Checkpoint, inventory: Inventory) -> None:
    from prunecli.model.embedding import describe_embeddings
    from prunecli.model.parts import describe_parts, ranges
    from prunecli.tensors.dtypes import config_dtype

    total = inventory.total
    rows = [
        [
            part,
            f"{amount.tensors:,}",
            f"{amount.parameters:,}",
            console.bytes_text(amount.bytes),
            f"{amount.bytes / max(1, total.bytes):.1%}",
        ]
        for part, amount in (*inventory.parts.items(), ("total", total))
    ]
    dtypes, count = " and ".join(map(config_dtype, inventory.dtypes)) or "empty", len(opened.files)
    files = opened.files[0].name if count == 1 else f"{count} {opened.files[0].suffix} files"
    console.out(f"{_shown(opened.path)}: {opened.model_type}, {dtypes}, {files}")
    console.show(console.table("Parameters", ("part", "tensors", "parameters", "bytes", "share"), rows))
    if inventory.layers:
        experts = [
            [
                layer.name,
                _held(len(layer.computed), layer.original_experts)
                + (f", {len(layer.constants)} constants" if layer.constants else ""),
            ]
            for layer in inventory.layers
        ]
        console.show(console.table("Experts", ("sparse layer", "experts"), experts))
    if inventory.attentions:
        console.show(console.table("Heads", ("attention", "layers", "heads in each"), _heads(inventory)))
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
    if inventory.surmise is not None:
        _show_surmise(opened, inventory, inventory.surmise)
    if opened.structure.history:
        console.out("\n".join(["History:", *(f"  {_step(step)}" for step in opened.structure.history)]))


def _show_quantisation(found: Quantisation) -> None:
    ways = "; ".join(f"{count:,} matrices {scheme}" for scheme, count in found.schemes.items())
    held = f"{ways}; " if ways else ""
    method = found.method or "method not named"
    console.out(f"Quantised: {method}: {held}{found.bits_per_parameter:.2f} bits a parameter over all")
    if found.absent:
        more = ", …" if len(found.absent) > 3 else ""
        names = f"{', '.join(found.absent[:3])}{more}"
        console.note(
            f"config.json names {len(found.absent)} modules in its quantisation that are not there: {names}"
        )


def _shown(path: Path) -> str:
    """Where it is; of a snapshot in the hub's cache, which model it is."""
    from prunecli.tensors.hub.names import origin

    found = origin(path)
    return f"{found['path']} at {found['revision'][:7]}" if "revision" in found else str(path)


def _show_surmise(opened: Checkpoint, inventory: Inventory, found: Surmise) -> None:
    """What the names of tensors suggest, and what can be done with the checkpoint."""
    from prunecli.model.inventory import Amount

    rows = []
    for group, names in found.modules.items():
        held = [opened.tensors[name] for name in names]
        amount = Amount(len(held), sum(info.numel for info in held), sum(info.nbytes for info in held))
        share = f"{amount.bytes / max(1, inventory.total.bytes):.1%}"
        label = f"{group} (embeddings?)" if group in found.tables else group
        rows.append([label, f"{amount.tensors:,}", console.bytes_text(amount.bytes), share])
    console.show(console.table("By name of module", ("module", "tensors", "bytes", "share"), rows))
    for column, layers in found.layers.items():
        console.out(f"{column}: {layers} layers, by their numbers")
    for group, experts in found.experts.items():
        console.out(f"{group}: {experts} experts, by their names")
    if opened.family is not None:
        console.note(
            f'Of the family "{opened.model_type}" the experts are declared: prune-experts and collect-gates work. Its '
            "layers, heads, hidden units and tokens are found by asking its class when a command needs them."
        )
        return
    try:
        family, sizes = opened.require_architecture(), opened.layout.sizes
    except (CheckpointError, UnsupportedModelError) as error:
        console.note(f"Nothing can be removed from it: {error.message}")
        return
    parts = [f"{sizes.depth(stack):,} {stack.side} layers ({stack.depth})" for stack in family.stacks]
    parts += [
        f"{sizes.count(key):,} hidden units of an FFN ({key})"
        for key in dict.fromkeys(stack.ffn.width for stack in family.stacks if stack.ffn.tensors)
    ]
    parts += [f"{sizes.count(key)} heads ({key})" for key in family.head_counts]
    if family.found.vocabulary is not None:
        parts.append(f"{sizes.count(family.found.vocabulary):,} tokens ({family.found.vocabulary})")
    console.note(
        f"Found by asking {family.model_class}, and tried on a small copy: {'; '.join(parts)}. What is removed from "
        "these leaves a stock model."
    )


def _heads(inventory: Inventory) -> list[list[str]]:
    """A line for each kind of attention while all of its layers have their heads, else one for each layer."""
    rows = []
    for kind in dict.fromkeys(layer.kind for layer in inventory.attentions):
        layers = [layer for layer in inventory.attentions if layer.kind == kind]
        held = [(layer.num_heads, layer.original_heads) for layer in layers]
        if len(set(held)) == 1:
            rows.append([kind, str(len(layers)), _held(*held[0])])
        else:
            rows += [[layer.name, "1", _held(layer.num_heads, layer.original_heads)] for layer in layers]
    return rows


def _held(held: int, original: int) -> str:
    return f"{held}" if held == original else f"{held} of {original}"


def _step(step: Any) -> str:
    """One step of the history as it would be typed, and from what."""
    from prunecli.report.history import step_text

    source = step.get("source")
    named = isinstance(source, dict) and source.get("path")
    return step_text(step, *([f"from {source['path']}"] if named else []))
