"""Rows of an embedding table, read in slices, and what they weigh."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.progress import Progress, silent
from prunecli.results.rewriting import TableQuality
from prunecli.running.runner import chunks
from prunecli.tensors.dtypes import is_float
from prunecli.tensors.stream import Copy, compute
from prunecli.text.tokens import load_tokenizer, require_rows, tokenized

Array = NDArray[np.float32]
Rows = Callable[[int, int], NDArray[np.generic]]
"""(start, stop) -> those rows [stop - start, m], of any floating type."""
CHUNK_ROWS = 4096
COSINE_WEIGHT = 0.2
"""Weight of 1 - cosine beside the squared error."""


@dataclass(frozen=True)
class Table:
    """A pretrained table that is never held as a whole.

    Attributes:
        vocabulary: its rows V.
        model_dim: its width m.
        read: a slice of its rows.
        name: for messages.
        progress: told of every pass over the rows.
        weights: of the rows [V], see `row_weights`; None until they are known.
        variance: weighted mean of |e - mean|^2; 1 for a table of equal rows.
    """

    vocabulary: int
    model_dim: int
    read: Rows
    name: str = "The embedding table"
    progress: Progress = silent
    weights: Any = None
    variance: float = 1.0

    def rows(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop` in float32.

        Raises:
            CheckpointError: one of them is not finite.
        """
        found = np.asarray(self.read(start, stop)).astype(np.float32)
        bad = ~np.isfinite(found).all(axis=1)
        if bad.any():
            raise CheckpointError(
                f"{self.name}: row {start + int(bad.argmax())} holds a value that is not finite",
                "The checkpoint is damaged; copy it again.",
            )
        return found

    def chunks(self, what: str = "") -> Iterator[tuple[int, int, Array]]:
        """Start, stop and rows, from the first row to the last; `what` is done, for the progress."""
        with self.progress(what, self.vocabulary, "rows") as advance:
            for start in range(0, self.vocabulary, CHUNK_ROWS):
                stop = min(start + CHUNK_ROWS, self.vocabulary)
                yield start, stop, self.rows(start, stop)
                advance(stop - start)

    def loss(self, numbers: Tensor, rows: Tensor, reconstruction: Tensor) -> Tensor:
        """Mean error of the rows e that have these numbers [B], weighted; a scalar with a gradient.

        The error |e - o|^2 / variance + `COSINE_WEIGHT` (1 - cos(e, o)) of a row and its reconstruction o; the first
        term is 1 minus the explained variance.
        """
        errors = (rows - reconstruction).square().sum(-1) / self.variance
        angles = 1 - functional.cosine_similarity(rows, reconstruction)
        return (torch.from_numpy(self.weights)[numbers] * (errors + COSINE_WEIGHT * angles)).mean()


def row_weights(
    vocabulary: int,
    counts: NDArray[np.integer] | None = None,
    ignored: tuple[int, ...] = (),
) -> Array:
    """Weight of each row's error [V]: the root of count + 1, divided by the mean; all 1 without counts.

    A token that the text lacks counts as one that it holds once, less one: a little, not nothing. The counts of a
    text fall so steeply that without the root a handful of tokens would decide the fit.

    Args:
        vocabulary: rows of the table.
        counts: occurrences of every token in a text [V].
        ignored: rows that weigh nothing, such as a padding row of zeros.
    """
    weights = np.ones(vocabulary, np.float64)
    if counts is not None:
        weights = np.sqrt(np.asarray(counts, np.float64) + 1)
    weights[list(ignored)] = 0
    return np.asarray(weights / weights.sum() * np.count_nonzero(weights), np.float32)


Double = NDArray[np.float64]
SMALLEST = 1e-12
"""Directions with less than this part of the largest variance are not stretched to variance 1."""


@dataclass(frozen=True)
class Projective:
    """e -> mean + x (scales * basis)^T with x = (e - mean) basis / scales: rank n and an offset.

    No projective embedding of the same n has a smaller weighted squared error (Eckart and Young). The columns of x
    have mean 0 and variance 1, so that every column of the map table matters alike to what reads it.

    Attributes:
        mean: [m].
        basis: [m, n], orthonormal columns.
        scales: [n], the standard deviation of each direction.
    """

    mean: Double
    basis: Double
    scales: Double

    def mapped(self, rows: Array) -> Array:
        """[rows, m] -> x [rows, n]."""
        return np.asarray((rows - self.mean) @ (self.basis / self.scales), np.float32)

    def expanded(self, mapped: Array) -> Tensor:
        """x [rows, n] -> rows [rows, m], in float32."""
        expansion, mean = (torch.from_numpy(part.astype(np.float32)) for part in (self.expansion, self.mean))
        return torch.from_numpy(mapped) @ expansion + mean

    @property
    def expansion(self) -> Double:
        """From x to rows without their mean: [n, m]."""
        return np.asarray((self.basis * self.scales).T)


def moments(table: Table) -> tuple[Double, Double]:
    """Weighted mean [m] and covariance [m, m] of the rows e: sum of w (e - mean)(e - mean)^T over the sum of w.

    One pass over the table, summed in float64: exact up to rounding, and m x m values of memory.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    width, weights = table.model_dim, table.weights
    total = float(weights.sum(dtype=np.float64))
    weighted_sum, products = np.zeros(width), np.zeros((width, width))
    for start, stop, rows in table.chunks("measuring the table"):
        scaled = rows * np.sqrt(weights[start:stop, None], dtype=np.float64)
        weighted_sum += weights[start:stop].astype(np.float64) @ rows
        products += scaled.T @ scaled
    mean = weighted_sum / total
    return mean, products / total - np.outer(mean, mean)


def projective(mean: Double, covariance: Double, map_dim: int, parts: int = 1) -> Projective:
    """The `map_dim` directions of largest variance.

    Args:
        mean, covariance: moments of the table.
        map_dim: n, at most m and a multiple of `parts`.
        parts: the directions are dealt out to this many equal parts of x in turn, so that each group of the first
            expansion layer reads strong and weak ones.
    """
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(values)[::-1][:map_dim].reshape(-1, parts).T.ravel()
    largest = max(float(values[-1]), 0.0)
    scales = np.where(values[order] > SMALLEST * largest, np.sqrt(np.maximum(values[order], 0)), 0.0)
    scales[scales == 0] = np.sqrt(largest) if largest else 1.0
    basis = vectors[:, order]
    # Eigenvectors have no sign; the largest entry is made positive, so that every machine finds the same ones.
    signs = np.sign(basis[np.abs(basis).argmax(axis=0), np.arange(map_dim)])
    return Projective(mean, basis * signs, scales)


Reconstruct = Callable[[int, int, Array], Tensor]
"""(start, stop, those rows) -> their reconstruction [stop - start, m]."""


@torch.no_grad()
def measure(table: Table, reconstruct: Reconstruct, what: str = "comparing rows") -> TableQuality:
    """One pass over the table, its rows compared with their reconstructions.

    Raises:
        CheckpointError: a value of the table is not finite.
    """
    squared = cosine = 0.0
    for start, stop, rows in table.chunks(what):
        weights = torch.from_numpy(table.weights[start:stop]).double()
        own, other = torch.from_numpy(rows), reconstruct(start, stop, rows)
        squared += float(weights @ (own - other).square().sum(-1).double())
        cosine += float(weights @ functional.cosine_similarity(own, other).double())
    total = float(table.weights.sum(dtype="float64"))
    relative, mean_cosine = squared / total / table.variance, cosine / total
    return TableQuality(
        explained_variance=1 - relative,
        mean_cosine=mean_cosine,
        error=relative + COSINE_WEIGHT * (1 - mean_cosine),
    )


BATCH = 4096
"""Sentences that are tokenised at once."""


def checkpoint_table(checkpoint: Checkpoint, name: str, progress: Progress = silent) -> Table:
    """A tensor [V, m] whose rows are read as they are asked for; `progress` is told of every pass over them.

    Raises:
        CheckpointError: it is not there, no matrix, or holds no floating-point numbers.
    """
    info = checkpoint.info(name)
    if len(info.shape) != 2 or not is_float(info.dtype):
        raise CheckpointError(
            f"{checkpoint.path}: {name} {list(info.shape)} of type {info.dtype} cannot be factorised",
            "Give a checkpoint in float32, bfloat16 or float16.",
        )
    where = f"{checkpoint.path}: {name}"
    return Table(
        *info.shape,
        lambda start, stop: compute(Copy(name), checkpoint, start, stop, info.dtype, where),
        where,
        progress,
    )


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
