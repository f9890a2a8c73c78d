"""What the fit needs of a checkpoint: its tables, its padding row, a unit that it holds, how often tokens occur."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from prunecli.errors import CheckpointError
from prunecli.methods.embeddings.table import Table
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.embedding import TokenTables
from prunecli.modules.building import stock_config
from prunecli.modules.define import DefineEmbedding, padding_id
from prunecli.progress import Progress, silent
from prunecli.running.runner import chunks
from prunecli.tensors.dtypes import is_float, itemsize, numpy_dtype
from prunecli.text.choice import Lines
from prunecli.text.tokens import load_tokenizer, require_rows, tokenized

BATCH = 4096
"""Sentences that are tokenised at once."""


def described(lines: Lines) -> dict[str, Any]:
    """What a history says of the text that tokens are counted in."""
    said: dict[str, Any] = {}
    if lines.splits:
        said |= {"split": list(lines.splits), "langs": list(lines.asked) or None}
    if lines.plain is not None:
        names = [path.name for path in lines.plain.files]
        said |= {"text": names, "text_sha256": lines.plain.sha256}
    return said | {"lines": len(lines.texts)}


def checkpoint_table(checkpoint: Checkpoint, name: str) -> Table:
    """A tensor [V, m] whose rows are read as they are asked for.

    Raises:
        CheckpointError: it is not there, no matrix, or holds no floating-point numbers.
    """
    info = checkpoint.info(name)
    if len(info.shape) != 2 or not is_float(info.dtype):
        raise CheckpointError(
            f"{checkpoint.path}: {name} {list(info.shape)} of type {info.dtype} cannot be factorised",
            "Give a checkpoint in float32, bfloat16 or float16.",
        )
    return Table(*info.shape, partial(_rows, checkpoint, name), f"{checkpoint.path}: {name}")


def _rows(checkpoint: Checkpoint, name: str, start: int, stop: int) -> NDArray[np.generic]:
    info = checkpoint.info(name)
    width = info.shape[1] * itemsize(info.dtype)
    values = np.empty((stop - start, info.shape[1]), numpy_dtype(info.dtype))
    if values.size:
        checkpoint.read_range(name, start * width, stop * width, values.reshape(-1).view(np.uint8).data)
    return values


def zero_padding_id(checkpoint: Checkpoint, table: Table) -> int | None:
    """The padding token, where its row of the table is zero."""
    found = getattr(stock_config(checkpoint), "pad_token_id", None)
    if not isinstance(found, int) or not 0 <= found < table.vocabulary:
        return None
    return None if table.rows(found, found + 1).any() else found


def read_unit(checkpoint: Checkpoint, tables: TokenTables) -> DefineEmbedding:
    """The unit of a factorised checkpoint, in float32 on the CPU, without the factor of its rows."""
    assert tables.unit is not None
    unit = DefineEmbedding(tables.unit, padding_idx=padding_id(stock_config(checkpoint), tables))
    with torch.no_grad():
        for name, place in unit.named_parameters():
            values = checkpoint.read(f"{tables.input}.{name}").astype(np.float32)
            place.copy_(torch.from_numpy(values))
    return unit


def count_tokens(
    checkpoint: Checkpoint, lines: Sequence[str], vocabulary: int, progress: Progress = silent
) -> NDArray[np.int64]:
    """Occurrences of every token in the text [V], those that the tokenizer puts around each line included.

    Raises:
        CheckpointError: no tokenizer, or one with more tokens than the table has rows.
    """
    tokenizer = load_tokenizer(checkpoint.path)
    counts = np.zeros(vocabulary, np.int64)
    with progress("counting tokens", len(lines), "lines") as advance:
        for batch in chunks(lines, BATCH):
            encoded = tokenized(tokenizer, batch, verbose=False)["input_ids"]
            require_rows(tokenizer, encoded, vocabulary)
            ids = np.fromiter((token for row in encoded for token in row), np.int64)
            counts += np.bincount(ids, minlength=vocabulary)
            advance(len(batch))
    return counts
