"""How `inspect --fit` says what fits where: a table and a few lines."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.evaluation.capacity import (
    BATCH_LENGTH,
    BATCH_TOKENS,
    SENTENCE_TOKENS,
    SENTENCES,
)
from prunecli.progress import duration_text
from prunecli.tensors.dtypes import config_dtype

if TYPE_CHECKING:
    from prunecli.model.inventory import Inventory
    from prunecli.results.inspection import Fit, Way

SHRUNK_BY = {
    "attention": "prune-heads",
    "ffn": "share-ffn",
    "embeddings": "factorize-embeddings",
}
"""Part of a model without experts -> the command that makes it smaller."""


def show_fits(fits: Fit, inventory: Inventory, *, is_stock: bool) -> None:
    """Print the table, then what it assumes.

    Args:
        is_stock: whether the model runs in its stock class.
    """
    quantised = bool(inventory.quantisation)
    named = [(_name(way, quantised=quantised), way) for way in (*fits.whole, *fits.pruned)]
    named += [(f"layer by layer, {way.dtype}", way) for way in fits.by_layer.ways]
    rows = [
        [
            name,
            console.bytes_text(way.weight_bytes),
            console.bytes_text(way.needed_bytes - way.weight_bytes),
            console.bytes_text(way.needed_bytes),
            "yes" if way.fits else "no",
        ]
        for name, way in named
    ]
    title = f"What fits in {console.bytes_text(fits.budget_bytes or 0)}"
    console.show(console.table(title, ("way", "weights", "besides", "together", "fits"), rows))
    for line in (*_assumed(fits, is_stock=is_stock), *_over(fits, inventory), *_time(fits)):
        console.out(line)


def next_steps(fits: Fit, command: Sequence[str], dtype: str | None, *, quantised: bool) -> Iterator[str]:
    """Whether it fits, and else `command` with the smallest ratio that does.

    Args:
        dtype: the type asked for; None: any will do.
        quantised: as stored and decoded are two things to run then, and said apart.
    """
    if quantised:
        for way in fits.whole:
            same = [one for one in fits.pruned if one.dtype == way.dtype]
            how = "As stored" if way.as_stored else f"Decoded to {way.dtype}"
            yield f"{how}, {_next(way.fits, same, command, lambda _way: False)}"
        return
    if fits.whole[0].fits:
        yield "It fits as it is."
        return
    asked = None if dtype is None else config_dtype(dtype)
    whole, pruned = (
        [way for way in ways if asked in (None, way.dtype)] for ways in (fits.whole, fits.pruned)
    )
    if fitting := [way for way in whole if way.fits]:
        yield f"It fits in {fitting[0].dtype}."
    elif fits.pruned:
        line = _next(False, pruned, command, lambda way: bool(asked) or not way.as_stored)
        yield line[0].upper() + line[1:]


def _next(fits: bool, pruned: Sequence[Way], command: Sequence[str], cast: Callable[[Way], bool]) -> str:
    """Whether the whole model `fits`, or else the ratio of `pruned` that keeps most, with its type if it is `cast`."""
    if fits:
        return "it fits as it is."
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
    named = "text" if is_stock else "sentence"
    sentences = f"1 {named}" if fits.batch == 1 else f"{fits.batch} {named}s"
    yield (
        f"Whole: {sentences} decoding, beam {fits.beam}, {fits.length} tokens, and 10% of the memory free."
    )
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
    if is_stock:
        yield (
            f"Layer by layer (collect-gates --memory): batches of {BATCH_TOKENS:,} tokens, "
            f"{fits.by_layer.batch_length:,} a window."
        )
    else:
        yield f"Layer by layer (--memory): batches of {BATCH_TOKENS:,} tokens, {BATCH_LENGTH} a sentence."
    if tokens := [
        f"{way.state_tokens:,} in {way.dtype}" for way in fits.by_layer.ways if way.state_tokens is not None
    ]:
        yield f"Tokens' hidden states in memory: {', '.join(tokens)}; then a file."


def _over(fits: Fit, inventory: Inventory) -> Iterator[str]:
    """A model without experts: how much too large it is, and what it is made of."""
    smallest = min((*fits.whole, *fits.pruned), key=lambda way: way.needed_bytes)
    if fits.pruned or smallest.fits:
        return
    more = console.bytes_text(smallest.needed_bytes - (fits.budget_bytes or 0))
    yield f"The whole model needs {more} more, in {smallest.dtype}."
    parts = [
        f"{inventory.parts[part].bytes / max(1, inventory.total.bytes):.0%} {part} ({command})"
        for part, command in SHRUNK_BY.items()
        if part in inventory.parts
    ]
    yield f"Of the weights: {', '.join(parts)}."
    yield "How much smaller these make it is yours to choose; --dry-run says the bytes."


def _time(fits: Fit) -> Iterator[str]:
    single = fits.one_pass
    if single is None:
        return
    text = f"{SENTENCES} sentences, {SENTENCE_TOKENS} tokens, 1 pair"
    yield f"Layer by layer over FLORES-200 dev (assumed: {text}):"
    cached = "" if single.from_disk else " (perhaps from the system's memory)"
    if rate := single.disk_bytes_per_second:
        yield (
            f"  reading {console.bytes_text(single.bytes)} at {console.bytes_text(rate)}/s{cached}: "
            f"{duration_text(single.reading_seconds)}"
        )
    for on in single.computing:
        device = on.device.partition(" ")[0]
        threads = "1 thread" if on.threads == 1 else f"{on.threads} threads"
        speed = _number(on.operations_per_second / 1e9)
        yield (
            f"  computing {_number(single.operations / 1e12)} TFLOP at {speed} GFLOPS "
            f"({device}, {on.dtype}, {threads}): {duration_text(on.computing_seconds)}"
        )
        yield f"  both at a time, {device}: {duration_text(on.seconds)} at least"


def _number(value: float) -> str:
    """0.02478 -> "0.0248", 1204.2 -> "1,204"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
