"""From a checkpoint and options to a plan: what stands for which table; then the plan's fits, and the rewrite."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import numpy as np
import torch

from prunecli.errors import PruneError, UsageError, located
from prunecli.methods.embeddings.fit import DefineFit, OutputMap, fit_define
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.embeddings.table import checkpoint_table, count_tokens
from prunecli.model.changes import EmbeddingChange, InputChange, OutputChange
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.define import UnitShape
from prunecli.model.embedding import TokenTables, can_untie
from prunecli.model.history import given as stated
from prunecli.model.history import history_step
from prunecli.model.rewrite import Rewrite, replacing, rewritten
from prunecli.modules.classes import own_config, stock_class
from prunecli.modules.define import DefineEmbedding, padding_id, require_replaceable
from prunecli.modules.fitting import FREE_SHARE
from prunecli.modules.machine import new_memory
from prunecli.progress import Progress, silent
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.stream import Copy, Generated, Output, given, zeros
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
        options: type of the result, passes over the table, seed.
        is_tied: whether the output layer has the input's table, or map table, now.
        shape: of the unit that is to be fitted to the input table; None: the input is not touched, or only cached.
        output_dim: n of the map that is to stand for the output table; None: that is not touched.
        padding_id: a token whose row is zero and stays so.
        text: what tokens are counted in; None: every token counts alike.
        step: the entry for `Structure.history`.
        reasons: plain lines that say what was chosen, and why.
    """

    tables: TokenTables
    change: EmbeddingChange
    options: EmbeddingOptions
    is_tied: bool = False
    shape: UnitShape | None = None
    output_dim: int | None = None
    padding_id: int | None = None
    text: Lines | None = None
    step: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()


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
    unit, output = tables.change.input, tables.change.output
    if options.cache and tables.change.unit is not None:  # its rows are written down
        fitting = {"map_dim", *EXPANSION, "kind", "epochs", "shared_blocks", "reduction"}
        if options.side not in (None, "input") or options.changed & fitting or text is not None:
            raise UsageError(
                f"{checkpoint.path}: its input is factorised already; `cache` writes its rows, and fits nothing",
                "Give `cache` alone, or factorise the original model.",
            )
        if output is not None and output.tied:
            output = OutputChange(output.map_dim)
        return EmbeddingPlan(
            **asked,
            change=EmbeddingChange(replace(tables.change.unit, cached=True), output),
            step=history_step(COMMAND, checkpoint, stated({"cache": True, "dtype": options.dtype})),
            reasons=("The rows of its unit become the input table; nothing is fitted.",),
        )
    sides = _sides(checkpoint, tables, options, is_tied)
    shape = chosen_shape(tables, options, "input" in sides)
    zero_row = None  # the padding token, if its row is zero
    if "input" in sides:
        table = checkpoint_table(checkpoint, f"{tables.input}.weight")
        padding = getattr(own_config(checkpoint, stock_class(checkpoint)), "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < table.vocabulary:
            zero_row = None if table.rows(padding, padding + 1).any() else padding
        unit = InputChange(
            shape.kind,
            shape.map_dim,
            *((shape.expand_dim, shape.depth, shape.max_groups) if shape.layers else (0, 0, 0)),
            zero_row is not None,
            options.cache,
            shape.shared_blocks,
            shape.reduction,
        )
        if is_tied:
            output = OutputChange()
    if "output" in sides:
        output = OutputChange(shape.map_dim, is_tied and "input" in sides and not options.cache)
    said: dict[str, Any] = {}  # about the text that tokens are counted in
    if text is not None:
        if text.splits:
            said = {"split": list(text.splits), "langs": list(text.asked) or None}
        if text.plain is not None:
            said |= {"text": [path.name for path in text.plain.files], "text_sha256": text.plain.sha256}
        said["lines"] = len(text.texts)
    side = "both" if len(sides) == 2 else sides[0]
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
        step=history_step(COMMAND, checkpoint, stated(arguments)),
        reasons=tuple(reasons),
    )


def _has_output(checkpoint: Checkpoint) -> bool:
    embedding = checkpoint.require_architecture().embedding
    return embedding is not None and stock_class(checkpoint).__name__ in embedding.classes


def _sides(
    checkpoint: Checkpoint, tables: TokenTables, options: EmbeddingOptions, is_tied: bool
) -> tuple[str, ...]:
    """The sides to factorise, in order.

    Raises:
        UsageError: the model lacks one of them, or has it factorised already.
        UnsupportedModelError: no class runs the result.
    """
    side = options.side or ("both" if is_tied else "input")
    found = ("input", "output") if side == "both" else (side,)
    where, output = checkpoint.path, tables.change.output
    if checkpoint.runs_stock:
        with located(where):
            require_replaceable(checkpoint.probed.trial)
    if "output" in found and not _has_output(checkpoint):
        raise UsageError(
            f"{where}: {stock_class(checkpoint).__name__} has no output layer over the vocabulary",
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
    if not has_unit or kind == "projective":  # the map is all there is
        names = *EXPANSION, "shared_blocks", "reduction", *(() if kind == "projective" else ("kind",))
        options.refuse(names, "is for a unit that expands", "Leave out `side=output` and `kind=projective`.")
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


@dataclass(frozen=True)
class Factors:
    """Weights that were fitted or read.

    Attributes:
        unit: of the input, to be written or cached; None: the input is not touched.
        fit: what the unit is worth; None: it is not new.
        output: None: the output layer is not touched.
    """

    unit: DefineEmbedding | None = None
    fit: DefineFit | None = None
    output: OutputMap | None = None


def fit_embeddings(checkpoint: Checkpoint, plan: EmbeddingPlan, progress: Progress = silent) -> Factors:
    """Fit what `plan_embeddings` chose.

    Raises:
        CheckpointError: weights of other shapes than config.json says, a value of a table that is not finite, or no
            tokenizer counts the text.
        PruneError: the fit does not fit in memory.
    """
    checkpoint.check()
    tables = plan.tables
    if plan.shape is not None:
        # The unit, Adam's moments, and matrices of m x m and k x k (see `fit_define`).
        unit_bytes, moment_bytes = 4 * plan.shape.parameters, 8 * plan.shape.parameters
        matrices = 8 * (plan.shape.model_dim**2 + 2 * plan.shape.features**2)
        needed, free = unit_bytes + moment_bytes + matrices, new_memory(torch.device("cpu"))
        if needed > FREE_SHARE * free:
            raise PruneError(
                f"{checkpoint.path}: the fit needs {bytes_text(needed)} (unit {bytes_text(unit_bytes)}, Adam's moments "
                f"{bytes_text(moment_bytes)}, matrices {bytes_text(matrices)}); {bytes_text(free)} are free, "
                "a tenth of it a reserve",
                "Choose a smaller `map_dim` or `expand_dim`, or free some memory.",
            )
    counts = None
    if plan.text is not None and (plan.shape is not None or plan.output_dim is not None):
        counts = count_tokens(checkpoint, plan.text.texts, tables.vocabulary, progress)
    unit, fit, output = None, None, None
    if plan.shape is not None:
        fit = fit_define(
            checkpoint_table(checkpoint, f"{tables.input}.weight", progress),
            plan.shape,
            epochs=plan.options.epochs,
            seed=plan.options.seed,
            counts=counts,
            padding_idx=plan.padding_id,
            tied_output=plan.output_dim is not None and plan.is_tied,
        )
        unit, output = fit.unit, fit.output
    elif plan.change.input is not None and plan.change.input.cached and tables.unit is not None:
        padding = padding_id(own_config(checkpoint, stock_class(checkpoint)), tables)
        unit = DefineEmbedding(tables.unit, padding_idx=padding)  # without the factor of its rows
        with torch.no_grad():
            for name, place in unit.named_parameters():
                place.copy_(torch.from_numpy(checkpoint.read(f"{tables.input}.{name}").astype(np.float32)))
    if plan.output_dim is not None and output is None:
        # No map of this n is nearer to the rows of the output table, without their mean, than its projective embedding.
        table = f"{tables.input if plan.is_tied else tables.output}.weight"
        source, padding = checkpoint_table(checkpoint, table, progress), plan.padding_id
        if padding is not None and source.rows(padding, padding + 1).any():
            padding = None
        projective = UnitShape(source.vocabulary, plan.output_dim, source.model_dim, kind="projective")
        alone = fit_define(source, projective, counts=counts, padding_idx=padding, tied_output=True)
        assert alone.output is not None
        output = replace(alone.output, quality=alone.quality)
    return Factors(unit, fit, output)


def rewrite_embeddings(checkpoint: Checkpoint, plan: EmbeddingPlan, factors: Factors | None) -> Rewrite:
    """The checkpoint with its embeddings as planned, its tensors in the order of the source.

    Args:
        checkpoint: the source.
        plan: for this checkpoint.
        factors: what was fitted for it; None: zeros in their place, for a dry run.

    Raises:
        UnsupportedModelError, UsageError: as `rewritten`.
    """
    structure = replace(checkpoint.structure, embedding=plan.change)
    shapes = embedding_shapes(checkpoint, plan.change)
    source, output = plan.tables.input, f"{plan.tables.output}.weight"
    fitted = {}  # also what is computed from the unit
    if factors is not None and (unit := factors.unit) is not None:
        if plan.change.unit is None:
            rows = (unit.num_embeddings, unit.embedding_dim)
            fitted[f"{source}.weight"] = Generated(
                rows, lambda start, stop: np.asarray(unit.rows(start, stop))
            )
        else:
            for part, held in unit.named_parameters():
                fitted[f"{source}.{part}"] = given(held.detach().numpy())
    if factors is not None and factors.output is not None:
        fitted[f"{plan.tables.output}.project.weight"] = given(factors.output.projection.T)
        fitted[output] = given(factors.output.table)
    table = f"{source}.weight" if plan.tables.unit is None else f"{source}.map.weight"
    gone = {*embedding_shapes(checkpoint, checkpoint.structure.embedding), *shapes}
    first = next(name for name in checkpoint.tensors if name in gone)
    made = []
    for name, shape in shapes.items():
        # Where the two part, the output layer takes a copy of the input's table along.
        stored = checkpoint.tensors.get(table if plan.is_tied and name == output else name)
        if name in fitted or stored is None or stored.shape != shape:
            made.append(Output(name, checkpoint.info(first).dtype, shape, fitted.get(name, zeros(shape))))
        else:
            made.append(Output(name, stored.dtype, shape, Copy(stored.name)))
    outputs = [*replacing(checkpoint, {**dict.fromkeys(gone, ()), first: made})]
    # `tie_word_embeddings` false, which says that the tables are apart, parts a bias from what it was tied to, too.
    family, change = checkpoint.require_architecture(), plan.change.output
    is_whole = plan.is_tied and change is not None and change.map_dim is None
    if is_whole and can_untie(family):
        for alias, name in family.tied.items():
            is_held = name in checkpoint.tensors and alias not in checkpoint.tensors
            if alias in family.loose and alias != output and is_held:
                outputs.append(Output(alias, *checkpoint.info(name)[1:], Copy(name)))
    return rewritten(checkpoint, structure, outputs, plan.step, dtype=plan.options.dtype)


def embedding_shapes(checkpoint: Checkpoint, change: EmbeddingChange) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the token embeddings, with `change` in the place of what the source says.

    A stock output table counts where it is one of its own.
    """
    found = checkpoint.layout.changed(replace(checkpoint.structure, embedding=change)).require_tables()
    shapes: dict[str, tuple[int, ...]] = {}
    if found.unit is None:
        shapes[f"{found.input}.weight"] = (found.vocabulary, found.model_dim)
    output = f"{found.output}.weight"
    if change.output is None and output in checkpoint.tensors:
        shapes[output] = checkpoint.info(output).shape
    return shapes | found.tensors
