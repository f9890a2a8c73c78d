"""A decision made concrete: what every method's `rewrite_…` returns, and `prunecli.pipeline.apply` carries out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.opening import result_config
from prunecli.model.quantised import method_of, owners_of
from prunecli.model.stock import stock_support
from prunecli.model.structure import Structure
from prunecli.tensors.dtypes import config_dtype, parse_dtype
from prunecli.tensors.json_files import GENERATION, read_object
from prunecli.tensors.stream import Copy, Output, is_plain_copy, sources

if TYPE_CHECKING:
    from prunecli.model.decision import Decision


@dataclass(frozen=True)
class Rewrite:
    """Everything about a result that is known before a byte is read.

    Attributes:
        structure: of the result, its history included.
        outputs: every tensor of the result.
        config: config.json of the result, but for the type of its weights.
        files: side files that differ from the source's, by name; None: it is left out.
        decision: by what it was chosen what stays; None: nothing was chosen.
        earlier: decisions of the steps of the history right before the last, if this rewrite carries them out too.
    """

    structure: Structure
    outputs: tuple[Output, ...]
    config: Mapping[str, Any]
    files: Mapping[str, bytes | None] = field(default_factory=dict)
    decision: Decision | None = None
    earlier: tuple[Decision, ...] = ()


def replacing(source: Checkpoint, made: Mapping[str, Sequence[Output]]) -> Iterator[Output]:
    """Yield a copy of each tensor of `source`, or what `made` has in the place of the tensor."""
    for name, info in source.tensors.items():
        yield from made.get(name, [Output(*info, Copy(name))])


def rewritten(
    source: Checkpoint,
    structure: Structure,
    outputs: Iterable[Output],
    step: Mapping[str, object] | None = None,
    decision: Decision | None = None,
    dtype: str | None = None,
) -> Rewrite:
    """The rewrite of `source` to this structure, `step` added to its history, with the config.json that says so.

    Args:
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …). If None, that of `outputs`.

    Raises:
        UnsupportedModelError: no stock class runs the result, and prunecli runs the family in no other way; or a
            tensor is computed from, or cut out of, a quantised weight.
        UsageError: a cast of a quantised model.
        CheckpointError: config.json lacks a size, or says what cannot be.
    """
    source.refuse_constants()
    if source.runs_stock and not (
        (support := stock_support(source, structure)).is_stock or support.is_fitted
    ):
        units = "prune-ffn" if source.family is None else "prune-experts"
        heads = ", prune-heads --uniform" if source.resolved.family.head_width is not None else ""
        raise UnsupportedModelError(
            f"{source.path}: {support.reason}; models of type {source.model_type} run in their stock class alone",
            f"Use {support.nearest or f'prune-layers{heads}, {units} or trim-vocabulary'}.",
        )
    target = None if dtype is None else parse_dtype(dtype)
    outputs = tuple(output._replace(dtype=output.info.cast(target).dtype) for output in outputs)
    _refuse_quantised(source, outputs)
    if step:
        structure = structure.after(step)
    files, path = {}, source.path / GENERATION
    if structure.axes != source.structure.axes and path in source.side_files.carried:
        generation = read_object(path)
        # Whisper times words by heads that are named by the numbers of layers and heads.
        if generation.pop("alignment_heads", None):
            files[GENERATION] = json.dumps(generation, indent=2).encode()
    config = result_config(source, structure)
    return Rewrite(structure, outputs, config, files, decision=decision if step else None)


def _refuse_quantised(source: Checkpoint, outputs: tuple[Output, ...]) -> None:
    """Quantised weights are copied, or cut between experts; a cast would part the others from their scales."""
    method = method_of(source.config)
    if not source.quantised and not method:
        return
    owners = owners_of(source.quantised.values())
    by_expert = {name for layer in (source.mixtures if source.family else ()) for name in layer.cut}
    for output in outputs:
        if is_plain_copy(source, output):
            continue
        expression = output.expression
        for name in sources(expression):
            if (isinstance(expression, Copy) and not expression.taken) or name in by_expert:
                if output.dtype != source.info(name).dtype:
                    raise UsageError(
                        f"`dtype={config_dtype(output.dtype)}`: the weights are quantised ({method}); a cast would "
                        "part them from their scales.",
                        "Leave `dtype` out: quantised weights are kept as they are.",
                    )
            elif (weight := owners.get(name) or source.quantised.get(name)) is not None:
                raise source.quantised_refusal(weight.name)
            elif not source.quantised:
                raise UnsupportedModelError(
                    f"{source.path}: config.json says that the weights are quantised ({method}), in a way that "
                    f"prunecli does not know: it copies {name} and does nothing else with it",
                    "Give the model before it was quantised.",
                )
