"""What each tensor of the trimmed checkpoint is made of: pure, nothing is read but names and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prunecli.errors import CheckpointError, UnsupportedModelError, UsageError
from prunecli.methods.vocabulary.ids import renumbered, with_defaults
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.rewrite import Rewrite, rewritten
from prunecli.tensors.dtypes import parse_dtype
from prunecli.tensors.stream import Copy, Output, Rows, Slices, joined

if TYPE_CHECKING:
    from prunecli.methods.vocabulary.plan import VocabularyPlan
    from prunecli.methods.vocabulary.select import TokenChoice

SIZE = "vocab_size"


def vocabulary_size(checkpoint: Checkpoint) -> int:
    """Rows of the embeddings.

    Raises:
        CheckpointError: config.json holds no such number.
    """
    size = checkpoint.layout.sizes.value(SIZE)
    if type(size) is not int or size < 1:
        raise CheckpointError(f'{checkpoint.path}: config.json: "{SIZE}" is {size!r}, not a count')
    return size


def vocabulary_axes(checkpoint: Checkpoint) -> dict[str, int]:
    """Tensor -> the axis along which the tokens lie, of every tensor that has one.

    Of declared tensors it is the axis that grows with the vocabulary; of the parts that only some classes of a family
    have (`final_logits_bias`, `lm_head.bias`) the one that is as long as it.

    Raises:
        UnsupportedModelError: another size of the model equals the vocabulary's, so that such a part cannot be told.
    """
    layout, size = checkpoint.layout, vocabulary_size(checkpoint)
    shapes = layout.shapes
    grown = layout.changed(config={**layout.config, SIZE: size + 1}).shapes
    declared = {
        name: next(
            axis for axis, (one, other) in enumerate(zip(shape, grown[name], strict=True)) if one != other
        )
        for name, shape in shapes.items()
        if shape != grown[name]
    }
    axes: dict[str, int] = {}
    config = checkpoint.config
    for name, info in checkpoint.tensors.items():
        if name in declared:
            axes[name] = declared[name]
        elif name not in shapes and layout.is_extra(name) and size in info.shape:
            # A task head of as many labels as tokens, or of a model as wide, looks like an output layer.
            others = [key for key, value in config.items() if value == size and not key.endswith(SIZE)]
            if len(config.get("id2label") or ()) == size:
                others.append("id2label")
            if others:
                raise UnsupportedModelError(
                    f"{checkpoint.path}: {name} may have an axis of tokens or of {others[0]}: both count {size}",
                    "trim-vocabulary cannot tell which; resize the embeddings by a row first.",
                )
            axes[name] = info.shape.index(size)
    return axes


def rewrite_vocabulary(checkpoint: Checkpoint, plan: VocabularyPlan) -> Rewrite:
    """The checkpoint with only the tokens that the plan keeps, its tensors in the order of the source.

    Raises:
        CheckpointError, UnsupportedModelError, UsageError: a config.json or table that cannot be cut; see `rewritten`.
    """
    whole = rewritten(
        checkpoint,
        checkpoint.structure,
        trimmed_tensors(checkpoint, plan.tokens.kept, plan.dtype),
        plan.step,
        plan.tokens.decision,
    )
    return replace(whole, config=trimmed_config(checkpoint, whole.config, plan.tokens), files=plan.files)


def trimmed_config(checkpoint: Checkpoint, config: Mapping[str, Any], tokens: TokenChoice) -> dict[str, Any]:
    """A config.json of the checkpoint with the new size and ids; ids that it leaves to its class are written out."""
    full = with_defaults(config, default_ids(checkpoint))
    patched = renumbered(full, tokens.renumbering)
    changed = {key: value for key, value in patched.items() if key in config or value != full[key]}
    return resized(checkpoint, changed, len(tokens.kept))


def default_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ids that transformers takes where config.json names none (`eos_token_id`: 50256 of GPT-2)."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(checkpoint.require_architecture().model_type)
    size = vocabulary_size(checkpoint)
    return {
        key: value
        for key, value in defaults.to_dict().items()
        if key.endswith("_token_id") and type(value) is int and 0 <= value < size
    }


def embedding_sizes(checkpoint: Checkpoint, rewrite: Rewrite) -> tuple[tuple[int, int], tuple[int, int]]:
    """Elements of the tensors with an axis of tokens, before and after; and their bytes."""
    axes = vocabulary_axes(checkpoint)
    before = [checkpoint.tensors[name] for name in axes]
    after = [output.info for output in rewrite.outputs if output.name in axes]
    numbers = sum(info.numel for info in before), sum(info.numel for info in after)
    return numbers, (sum(info.nbytes for info in before), sum(info.nbytes for info in after))


def trimmed_tensors(
    checkpoint: Checkpoint, kept: Sequence[int], dtype: str | None = None
) -> tuple[Output, ...]:
    """The tensors, in the order of the source, of the checkpoint with only the tokens `kept`.

    Args:
        checkpoint: the source.
        kept: ids, ascending: the new id of a token is its place among them.
        dtype: type of the floating-point tensors (`float16`, `F16`, …); None: as stored.

    Raises:
        UsageError: ids that the checkpoint does not have, or that are not ascending.
    """
    size = vocabulary_size(checkpoint)
    rows = tuple(kept)
    if not rows or rows[0] < 0 or rows[-1] >= size or any(a >= b for a, b in pairwise(rows)):
        raise UsageError(
            f"The ids to keep are not ascending ids of a vocabulary of {size}.",
            "Give each id once, in the order of the vocabulary.",
        )
    ranges = tuple(joined((row, row + 1) for row in rows))
    target = None if dtype is None else parse_dtype(dtype)
    axes = vocabulary_axes(checkpoint)
    outputs = []
    for name, info in checkpoint.tensors.items():
        shape = list(info.shape)
        expression: Copy | Rows | Slices = Copy(name)
        if name in axes and len(rows) < size:
            axis = axes[name]
            shape[axis] = len(rows)
            expression = Slices(name, axis, ranges) if axis else Rows(name, rows)
        outputs.append(Output(name, info.cast(target).dtype, tuple(shape), expression))
    return tuple(outputs)


def resized(checkpoint: Checkpoint, config: dict[str, Any], size: int) -> dict[str, Any]:
    """`config` with `size` tokens under every key that holds the number (Marian's `decoder_vocab_size` too)."""
    before = vocabulary_size(checkpoint)
    others = [key for key, value in config.items() if key.endswith(SIZE) and value == before]
    return {**config, SIZE: size, **dict.fromkeys(others, size)}
