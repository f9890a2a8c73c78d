"""Lower bounds of a pass: operations of its matrix products, and how fast this machine multiplies and reads files.

Operations are those of the matrix products of weights alone. Left out are attention's scores and weighted sums (they
grow with the length of a sentence, and are small beside the products up to about d_model tokens), norms, activations,
and units in the place of a table of embeddings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from prunecli.architectures.records import Attention, Side
from prunecli.errors import CheckpointError
from prunecli.model.declared import class_names
from prunecli.model.layout import ModelLayout
from prunecli.model.mixtures import experts_per_token
from prunecli.model.parts import FfnLayer

CHUNK = 16 << 20
MOST_WEIGHTS = 1 << 22
"""Elements of the largest matrix that is multiplied; a larger one is as fast."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Products:
    """Multiply-adds of one token; an operation is half of one.

    Attributes:
        encoder: in the encoder's layers, per source token.
        cross: keys and values of cross-attention, per source token of a pair.
        decoder: in the decoder's layers but for these, per target token.
        output: of the output layer, per token of the model's last stack; 0 where the class has none.
    """

    encoder: int
    cross: int
    decoder: int
    output: int

    def operations(self, sources: int, pair_sources: int, targets: int, *, output: bool) -> int:
        """Operations (two a multiply-add) of a pass.

        Args:
            sources: tokens that the encoder reads.
            pair_sources: source tokens over all pairs: a source that serves several pairs is encoded once, and
                attended to by each.
            targets: tokens that the decoder reads, over all pairs.
            output: whether the output layer runs.
        """
        done = self.encoder * sources + self.cross * pair_sources + self.decoder * targets
        last = targets if self.decoder else sources
        return 2 * (done + self.output * last * output)


def token_products(layout: ModelLayout) -> Products:
    """What one token costs: removed heads, attentions and FFNs nothing, shared ones as often as they run, and of a
    sparse layer the router and the experts that a token is sent to.

    Raises:
        CheckpointError: config.json lacks a size, or holds one that is no count.
    """
    products: dict[Side, int] = {"encoder": 0, "decoder": 0}
    cross = 0
    for layer in layout.layers:
        for attention in layer.attentions:
            owner = attention.owner.removesuffix(f".{attention.spec.name}")
            projections = _projections(attention.spec)
            whole, keys = _matrices(layout.shapes, owner, projections), 0
            if attention.kind == "cross":  # keys and values are of the encoder's output
                output = f"{attention.spec.output}."
                own = [name for name in projections[1:] if not name.startswith(output)]
                keys = _matrices(layout.shapes, owner, own)
            cross += keys
            products[layer.side] += whole - keys
        if not layer.ffn.removed:
            products[layer.side] += _ffn(layout, layer.ffn)
    return Products(products["encoder"], cross, products["decoder"], _output(layout))


def _projections(attention: Attention) -> list[str]:
    """Names of an attention's matrices, the query's first; a table of relative positions is none."""
    return [spec.name for spec in attention.tensors if spec.units is not None and len(spec.shape) == 2]


def _ffn(layout: ModelLayout, ffn: FfnLayer) -> int:
    owner, record, shapes = ffn.owner, ffn.stack.ffn, layout.shapes
    products = [spec.name for spec in record.tensors if spec.units is not None]
    if not ffn.is_sparse:
        return _matrices(shapes, owner, products)
    mixture = layout.family.mixture
    assert mixture is not None
    router = [spec.name for spec in record.router]
    experts = next((shape[0] for name in router if (shape := shapes.get(f"{owner}.{name}"))), 0)
    chosen = min(experts_per_token(layout.sizes, mixture), experts)
    expert = f"{owner}.{str(mixture.expert).format(expert=0)}"
    return _matrices(shapes, owner, router) + chosen * _matrices(shapes, expert, products)


def _output(layout: ModelLayout) -> int:
    family, tables = layout.family, layout.tables
    if family.embedding is None or tables is None:
        return 0
    if not set(class_names(layout.config) or (family.model_class,)) & set(family.embedding.classes):
        return 0
    change = tables.change.output
    if change is None or change.map_dim is None:
        return tables.vocabulary * tables.model_dim
    return (tables.vocabulary + tables.model_dim) * change.map_dim


def _matrices(shapes: Shapes, owner: str, names: Iterable[str]) -> int:
    """Multiply-adds of one row times each of the matrices that the model has."""
    matrices = (shapes.get(f"{owner}.{name}", ()) for name in names)
    return sum(prod(shape) for shape in matrices if len(shape) == 2)


class DiskSpeed(NamedTuple):
    """How fast files were read.

    Attributes:
        rate: bytes a second; 0 if nothing was read.
        from_disk: whether the system was asked to forget these bytes first; else they may have come from its memory.
    """

    rate: float
    from_disk: bool


def forget(file: Path, size: int = 0) -> bool:
    """Ask for the first `size` bytes of a file (0: all) to leave the page cache; whether that could be asked.

    Pages that are not yet written stay.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    return True


def disk_speed(files: Sequence[Path], most_bytes: int, most_seconds: float) -> DiskSpeed:
    """Read the files one after another, up to either limit, from the disk where the system can be asked for that.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    buffer = memoryview(bytearray(min(CHUNK, most_bytes)))
    done, fresh, start = 0, True, time.perf_counter()
    for file in files:
        if done >= most_bytes or time.perf_counter() - start >= most_seconds:
            break
        fresh &= forget(file, most_bytes - done)
        try:
            with file.open("rb", buffering=0) as opened:
                while got := opened.readinto(buffer[: most_bytes - done]):
                    done += got
                    if time.perf_counter() - start >= most_seconds:
                        break
        except OSError as error:
            raise CheckpointError(
                f"{file}: cannot be read ({error.strerror})", "Copy the file again."
            ) from error
    return DiskSpeed(done / (time.perf_counter() - start), fresh)


def product_speed(
    model_dim: int, ffn_dim: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> float:
    """Operations a second (two a multiply-add) of an FFN's first matrix and many rows, measured for so many seconds."""
    inputs = max(1, model_dim)
    outputs = max(1, min(ffn_dim, MOST_WEIGHTS // inputs))
    rows = 512 if device.type == "cpu" else 4096
    left = torch.randn(rows, inputs, device=device).to(dtype)
    right = torch.randn(inputs, outputs, device=device).to(dtype)
    timer = Timer("left @ right", globals={"left": left, "right": right}, num_threads=torch.get_num_threads())
    return float(2 * rows * inputs * outputs / timer.blocked_autorange(min_run_time=seconds).median)
