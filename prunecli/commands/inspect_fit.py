"""How `inspect --fit` says what fits where: a table and a few lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.evaluation.capacity import (
    BATCH_LENGTH,
    BATCH_TOKENS,
    SENTENCE_TOKENS,
    SENTENCES,
    Capacity,
    Whole,
)
from prunecli.progress import duration_text
from prunecli.tensors.dtypes import config_dtype

if TYPE_CHECKING:
    from prunecli.model.inventory import Inventory

SHRUNK_BY = {
    "attention": "prune-heads",
    "ffn": "share-ffn",
    "embeddings": "factorize-embeddings",
}
"""Part of a model without experts -> the command that makes it smaller."""


def show_fits(fits: Capacity, inventory: Inventory) -> None:
    """The table, then what it assumes."""
    named = [(_name(whole), whole.way) for whole in fits.wholes]
    named += [(f"layer by layer, {way.dtype}", way) for way in fits.layered]
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
    title = f"What fits in {console.bytes_text(fits.budget)}"
    console.show(console.table(title, ("way", "weights", "besides", "together", "fits"), rows))
    for line in (*_assumed(fits), *_over(fits, inventory), *_time(fits)):
        console.out(line)


def next_steps(
    fits: Capacity, command: Sequence[str], dtype: str | None, *, quantised: bool
) -> Iterator[str]:
    """Whether it fits, and else `command` with the smallest ratio that does.

    Args:
        dtype: the type asked for; None: any will do.
        quantised: as stored and decoded are two things to run then, and said apart.
    """
    if quantised:
        for whole in (whole for whole in fits.wholes if whole.pruned is None):
            same = [one for one in fits.wholes if one.target == whole.target]
            way = "As stored" if whole.target is None else f"Decoded to {whole.way.dtype}"
            yield f"{way}, {_next(same, command, None)}"
        return
    if fits.wholes[0].way.fits:
        yield "It fits as it is."
        return
    wanted = [whole for whole in fits.wholes if dtype in (None, whole.target)]
    if unpruned := [whole for whole in wanted if whole.pruned is None and whole.way.fits]:
        yield f"It fits in {unpruned[0].way.dtype}."
    elif fits.ratio is not None:
        line = _next([whole for whole in wanted if whole.pruned is not None], command, "--dtype")
        yield line[0].upper() + line[1:]


def _next(ways: Sequence[Whole], command: Sequence[str], cast: str | None) -> str:
    """Of ways of one type, or (with the option that casts to it) of several, that which keeps the most."""
    if any(one.pruned is None and one.way.fits for one in ways):
        return "it fits as it is."
    ratios = [one.pruned for one in ways if one.pruned is not None and one.way.fits]
    if not ratios:
        return "it does not fit, and no ratio of its experts makes it."
    least = min(ratios, key=lambda fit: fit.ratio)
    words = [*command, "--ratio", f"{least.ratio:g}"]
    words += [cast, config_dtype(least.dtype)] if cast and least.dtype is not None else []
    return f"it does not fit with all its experts. Next: prunecli {shlex.join(words)}"


def _name(whole: Whole) -> str:
    stored = ", as stored" if whole.way.as_stored else ", decoded" if whole.is_decoded else ""
    name = "whole" if whole.pruned is None else f"ratio {whole.pruned.ratio:g}"
    return f"{name}, {whole.way.dtype}{stored}"


def _assumed(fits: Capacity) -> Iterator[str]:
    load = fits.load
    named = "text" if fits.is_stock else "sentence"
    sentences = f"1 {named}" if load.batch == 1 else f"{load.batch} {named}s"
    yield (
        f"Whole: {sentences} decoding, beam {load.beam}, {load.length} tokens, and 10% of the memory free."
    )
    if fits.is_stock:
        first = fits.wholes[0].way
        cache, decoding = first.cache_bytes or 0, first.decoding_bytes or 0
        yield (
            f"Besides: {console.bytes_text(cache)} of keys, values and states, "
            f"{console.bytes_text(decoding - cache)} of activations."
        )
    yield from fits.unknown
    if pruned := {whole.pruned.keep: whole.pruned for whole in fits.wholes if whole.pruned is not None}:
        yield (
            "; ".join(
                f"ratio {fit.ratio:g} keeps {fit.keep:,} of {fit.held:,} experts" for fit in pruned.values()
            ).capitalize()
            + "."
        )
    if not fits.layered:
        return
    if fits.is_stock:
        yield f"Layer by layer (collect-gates --memory): batches of {BATCH_TOKENS:,} tokens, {fits.length:,} a window."
    else:
        yield f"Layer by layer (--memory): batches of {BATCH_TOKENS:,} tokens, {BATCH_LENGTH} a sentence."
    if tokens := [
        f"{way.state_tokens:,} in {way.dtype}" for way in fits.layered if way.state_tokens is not None
    ]:
        yield f"Tokens' hidden states in memory: {', '.join(tokens)}; then a file."


def _over(fits: Capacity, inventory: Inventory) -> Iterator[str]:
    """A model without experts: how much too large it is, and what it is made of."""
    smallest = min((whole.way for whole in fits.wholes), key=lambda way: way.needed_bytes)
    if fits.ratio is not None or smallest.fits:
        return
    yield f"The whole model needs {console.bytes_text(smallest.needed_bytes - fits.budget)} more, in {smallest.dtype}."
    parts = [
        f"{inventory.parts[part].bytes / max(1, inventory.total.bytes):.0%} {part} ({command})"
        for part, command in SHRUNK_BY.items()
        if part in inventory.parts
    ]
    yield f"Of the weights: {', '.join(parts)}."
    yield "How much smaller these make it is yours to choose; --dry-run says the bytes."


def _time(fits: Capacity) -> Iterator[str]:
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
