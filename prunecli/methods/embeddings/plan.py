"""From a checkpoint and options to a plan: what stands for which table. No weight is fitted, nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Literal

from prunecli.errors import UsageError, located
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.embeddings.table import checkpoint_table
from prunecli.model.changes import EmbeddingChange, InputChange, OutputChange
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.define import UnitShape
from prunecli.model.embedding import TokenTables
from prunecli.model.history import given, history_step
from prunecli.modules.classes import model_class, own_config
from prunecli.modules.define import require_replaceable
from prunecli.text.choice import Lines

COMMAND = "factorize-embeddings"
EXPANSION = ("expand_dim", "depth", "max_groups")
"""Options of the layers that expand."""


@dataclass(frozen=True)
class EmbeddingPlan:
    """Plan of a factorisation.

    Attributes:
        tables: the token embeddings as they are.
        change: how they will differ from the stock ones.
        shape: of the unit that is to be fitted to the input table; None: the input is not touched, or only cached.
        output_dim: n of the map that is to stand for the output table; None: that is not touched.
        is_tied: whether the output layer has the input's table, or map table, now.
        padding_id: a token whose row is zero and stays so.
        options: type of the result, passes over the table, seed.
        text: what tokens are counted in; None: every token counts alike.
        step: the entry for `Structure.history`.
        reasons: plain lines that say what was chosen, and why.
    """

    tables: TokenTables
    change: EmbeddingChange
    shape: UnitShape | None
    output_dim: int | None
    is_tied: bool
    padding_id: int | None
    options: EmbeddingOptions
    text: Lines | None
    step: Mapping[str, object]
    reasons: tuple[str, ...]


def plan_embeddings(
    checkpoint: Checkpoint, options: EmbeddingOptions, text: Lines | None = None
) -> EmbeddingPlan:
    """Choose sides and dimensions.

    Raises:
        UnsupportedModelError: the family, or where it keeps its embeddings, is not declared.
        UsageError: a table that is factorised already, a side that the model lacks, dimensions that cannot be.
    """
    text = text if text is not None and text.texts else None
    tables = checkpoint.layout.require_tables()
    name = f"{tables.output}.weight"
    is_tied = _has_output(checkpoint) and name in checkpoint.layout.ties and name not in checkpoint.tensors
    asked: dict[str, Any] = {"tables": tables, "is_tied": is_tied, "options": options, "text": text}
    if options.cache and tables.unit is not None:
        return _cached(checkpoint, tables, options, asked)
    sides = _sides(checkpoint, tables, options, is_tied)
    shape = chosen_shape(tables, options, "input" in sides)
    zero_row = None  # the padding token, if its row is zero
    if "input" in sides:
        table = checkpoint_table(checkpoint, f"{tables.input}.weight")
        padding = getattr(own_config(checkpoint, model_class(checkpoint)), "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < table.vocabulary:
            zero_row = None if table.rows(padding, padding + 1).any() else padding
    unit, output = tables.change.input, tables.change.output
    if "input" in sides:
        expansion = (shape.expand_dim, shape.depth, shape.max_groups) if shape.layers else (0, 0, 0)
        layers = shape.shared_blocks, shape.reduction
        is_zero = zero_row is not None
        unit = InputChange(shape.kind, shape.map_dim, *expansion, is_zero, options.cache, *layers)
        if is_tied:
            output = OutputChange()
    if "output" in sides:
        output = OutputChange(shape.map_dim, is_tied and "input" in sides and not options.cache)
    said: dict[str, Any] = {}  # about the text that tokens are counted in
    if text is not None:
        if text.splits:
            said = {"split": list(text.splits), "langs": list(text.asked) or None}
        if text.plain is not None:
            names = [path.name for path in text.plain.files]
            said |= {"text": names, "text_sha256": text.plain.sha256}
        said["lines"] = len(text.texts)
    side = "both" if len(sides) == 2 else next(iter(sides))
    arguments = {
        **options.recorded(),
        "side": side,
        "kind": shape.kind if "input" in sides else None,
        "map_dim": shape.map_dim,
        **{name: getattr(shape, name) if shape.layers else None for name in EXPANSION},
        **said,
        "seed": options.seed,
    }
    default = "" if options.side else " (default)"
    which = "both sides" if side == "both" else f"the {side} side"
    tied = "share a table" if is_tied else "have tables of their own"
    reasons = [f"Factorising {which}{default}; input and output {tied}."]
    chosen = ("map_dim", "expand_dim") if shape.layers else ("map_dim",)
    left_out = [f"`{name}={getattr(shape, name)}`" for name in chosen if getattr(options, name) is None]
    if left_out:
        reasons.append(f"Not given, so: {', '.join(left_out)}.")
    if text is None:
        reasons.append("Every token counts alike; `data` or `files` weighs them by their frequency.")
    return EmbeddingPlan(
        **asked,
        change=EmbeddingChange(unit, output),
        shape=shape if "input" in sides else None,
        output_dim=shape.map_dim if "output" in sides else None,
        padding_id=zero_row,
        step=history_step(COMMAND, checkpoint, given(arguments)),
        reasons=tuple(reasons),
    )


def _cached(
    checkpoint: Checkpoint, tables: TokenTables, options: EmbeddingOptions, asked: dict[str, Any]
) -> EmbeddingPlan:
    """Write down the rows of the unit that the checkpoint holds."""
    fitting = {"map_dim", *EXPANSION, "kind", "epochs", "shared_blocks", "reduction"}
    if options.side not in (None, "input") or options.changed & fitting or asked["text"] is not None:
        raise UsageError(
            f"{checkpoint.path}: its input is factorised already; `cache` writes its rows, and fits nothing",
            "Give `cache` alone, or factorise the original model.",
        )
    unit, output = tables.change.unit, tables.change.output
    assert unit is not None
    cached = replace(unit, cached=True)
    if output is not None and output.tied:
        output = OutputChange(output.map_dim)
    return EmbeddingPlan(
        **asked,
        change=EmbeddingChange(cached, output),
        shape=None,
        output_dim=None,
        padding_id=None,
        step=history_step(COMMAND, checkpoint, given({"cache": True, "dtype": options.dtype})),
        reasons=("The rows of its unit become the input table; nothing is fitted.",),
    )


def _has_output(checkpoint: Checkpoint) -> bool:
    embedding = checkpoint.require_architecture().embedding
    return embedding is not None and model_class(checkpoint).__name__ in embedding.classes


def _sides(
    checkpoint: Checkpoint, tables: TokenTables, options: EmbeddingOptions, is_tied: bool
) -> frozenset[Literal["input", "output"]]:
    """The sides to factorise.

    Raises:
        UsageError: the model lacks one of them, or has it factorised already.
        UnsupportedModelError: no class runs the result.
    """
    side = options.side or ("both" if is_tied else "input")
    found: frozenset[Literal["input", "output"]] = (
        frozenset({"input", "output"}) if side == "both" else frozenset({side})
    )
    where, output = checkpoint.path, tables.change.output
    if checkpoint.runs_stock:
        with located(where):
            require_replaceable(checkpoint.probed.trial)
    if "output" in found and not _has_output(checkpoint):
        raise UsageError(
            f"{where}: {model_class(checkpoint).__name__} has no output layer over the vocabulary",
            "Choose `side=input`.",
        )
    if "input" in found and tables.unit is not None:
        raise UsageError(
            f"{where}: its input embedding is factorised already (to {tables.unit.map_dim})",
            "Factorise the original model; `cache` writes the rows of this one as a table.",
        )
    if "output" in found and output is not None and output.map_dim is not None:
        raise UsageError(
            f"{where}: its output layer is factorised already (to {output.map_dim})",
            "Factorise the original model, or choose `side=input`.",
        )
    if options.cache and "input" not in found:
        raise UsageError("`cache` writes the rows of the input's unit", "Choose `side=input` or `side=both`.")
    return found


NARROWER, WIDER = 8, 2
"""Where no dimensions are given: k is 2 m, as in the paper's translation model (4.2: k = 1024, m = 512); n is
m / 8, half of the n = 128 there."""


def chosen_shape(tables: TokenTables, options: EmbeddingOptions, has_unit: bool) -> UnitShape:
    """The dimensions, those that are not given chosen so that they divide.

    Raises:
        UsageError: dimensions that cannot be.
    """
    kind = options.kind or "define"
    if not has_unit:  # the output's map is all there is
        asked = options.changed & {*EXPANSION, "shared_blocks", "reduction"}
        asked |= set() if kind == "projective" or options.kind is None else {"kind"}
        for name in sorted(asked):
            raise UsageError(f"`{name}` is for the unit of the input", "Choose `side=input` or `side=both`.")
        kind = "projective"
    depth = 3 if options.depth is None else options.depth
    groups = 4 if options.max_groups is None else options.max_groups
    n, k = options.map_dim, options.expand_dim
    if n is None or k is None:
        # The divisor of n and of the inner widths; 1 if no unit is possible, which `UnitShape` refuses.
        unit = 1
        if kind != "projective" and groups > 0 and depth > 0:
            size = 2 * lcm(*range(1, groups + 1))  # that every number of groups divides
            unit = UnitShape(1, size, size + 1, 2 * size, depth, groups, kind).group_multiple
        if n is None:
            n = min(max(round(tables.model_dim / NARROWER / unit), 1) * unit, max(tables.model_dim - 1, 1))
        if k is None and not options.reduction:
            k = (2 if kind == "hgt-residual" else 1) * tables.model_dim
        elif k is None:
            k = max(round(WIDER * tables.model_dim / (2 * unit)), 1) * 2 * unit
            k = max(k, -(-n // unit) * 2 * unit)
    if kind == "projective" and n == tables.model_dim:
        raise UsageError(
            f"The map dimension {n} is the model's width: a projection of it is a table as large as before",
            f"Give `map_dim` below {n}; a unit that expands may have as much.",
        )
    return UnitShape(
        tables.vocabulary,
        n,
        tables.model_dim,
        k,
        depth,
        groups,
        kind,
        options.shared_blocks,
        options.reduction,
    )
