"""A model's components and their representations of sentences (2309.01826, section 2.3): token means of outputs."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunecli.architectures.records import Side
from prunecli.errors import DataError, OutputError, UnsupportedModelError, UsageError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Bools, Floats
from prunecli.model.patchwork import module_name
from prunecli.modules.hooks import states_of
from prunecli.running.batches import TokenObserver, run_forward
from prunecli.running.examples import Batch
from prunecli.running.runner import Advance, InMemory, ignored

Features = NDArray[np.float32]
"""`[sentences, width]`: a row per sentence."""


def represent(
    runner: InMemory,
    components: Sequence[Component],
    batches: Sequence[Batch],
    directory: Path,
    advance: Advance = ignored,
) -> dict[Component, Features]:
    """Run a model over sentences, and keep the mean of each component's outputs over a sentence's tokens.

    An output is what the component adds to the residual stream. Every token that the model reads counts, special
    tokens too; padding does not. The decoder reads the reference (forced decoding). Memory is that of the model and
    of one batch: the means go to files, 4 x components x sentences x width bytes.

    Args:
        runner: of a model with the components of its checkpoint; removed ones are left out.
        batches: their `indices` are 0 to n - 1, each once.
        directory: an empty directory, for the files. They live as long as it does.
        advance: called with the number of sentences done.

    Returns:
        Each component that the model has -> its outputs.

    Raises:
        DataError: a representation is NaN or infinite; the message names the component and the sentence.
        UnsupportedModelError: the model has no component, or one gave no output.
        OutputError: the disk is full.
    """
    present = tuple(component for component in components if not component.removed)
    if not present:
        raise UnsupportedModelError("the model has no layer, so that there is nothing to compare")
    observer, headless = ComponentObserver(present), runner.model.base_model  # logits are not needed
    sentences = sum(len(batch.indices) for batch in batches)
    found: dict[Component, Features] = {}

    def forward(batch: Batch) -> None:
        observer.begin(batch, runner.device)
        headless(**batch.arguments(headless))

    def finish(batch: Batch, _output: None) -> int:
        means = observer.take()
        for component in present:
            if component not in means:
                raise UnsupportedModelError(f"{component.name}: the model does not run it")
            rows = means[component].cpu().numpy()
            finite = np.isfinite(rows).all(axis=1)
            if not finite.all():
                sentence = batch.indices[int(np.argmin(finite))] + 1
                raise DataError(
                    f"{component.name}: its output for sentence {sentence:,} holds NaN or infinity",
                    "The weights are damaged, or overflow the type: try `dtype=float32`.",
                )
            if component not in found:
                found[component] = _file(directory / str(len(found)), sentences, rows.shape[1])
            found[component][list(batch.indices)] = rows
        advance(len(batch.indices))
        return 0

    with observer.watching(runner.model):
        run_forward(runner, batches, forward, finish)
    return found


class ComponentObserver(TokenObserver):
    """Takes the token means of components' outputs.

    Several layers may share one module: an output belongs to the layer that is running.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = components
        self._means: dict[Component, Tensor] = {}
        self._block = ""

    def hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """See `TokenObserver`."""
        sharing: dict[nn.Module, dict[str, Component]] = defaultdict(dict)
        for component in self._components:
            sharing[model.get_submodule(module_name(model, component.output))][component.block] = component
        for block in dict.fromkeys(component.block for component in self._components):
            layer = model.get_submodule(module_name(model, block))
            yield layer.register_forward_pre_hook(partial(self._enter, block))
        for module, own in sharing.items():
            yield module.register_forward_hook(partial(self._leave, own))

    def take(self) -> dict[Component, Tensor]:
        """Each component that has run since the last call -> `[batch, width]` float32."""
        means, self._means = self._means, {}
        return means

    def _enter(self, block: str, _module: nn.Module, _inputs: Any) -> None:
        self._block = block

    def _leave(self, own: Mapping[str, Component], _module: nn.Module, _inputs: Any, output: Any) -> None:
        component = own[self._block]
        outputs = states_of(output)
        mask = self.mask.to(outputs.device)
        if outputs.ndim == 2 and len(outputs) == mask.numel():  # OPT's FFNs take all tokens in one dimension
            outputs = outputs.view(*mask.shape, -1)
        if outputs.shape[:-1] != mask.shape:
            raise UnsupportedModelError(
                f"{component.name}: its output has the shape {list(outputs.shape)}, for "
                f"{list(mask.shape)} tokens"
            )
        # At once, so that one output at a time is held.
        total = outputs.float().masked_fill(~mask[..., None], 0).sum(dim=1)
        self._means[component] = total / mask.sum(dim=1, keepdim=True)


def _file(path: Path, sentences: int, width: int) -> Features:
    """A file that is mapped into memory; its place on the disk is taken at once.

    Raises:
        OutputError: the disk is full. A write to a mapping without a place would end the process.
    """
    found = np.memmap(path, np.float32, "w+", shape=(sentences, width))
    with path.open("rb+") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, found.nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise OutputError(
                    f"{path.parent}: no space left for the outputs of the components",
                    "Free some, name another directory in TMPDIR, or compare on fewer pairs or sentences.",
                ) from error
    return found


Kind = Literal["self", "cross", "ffn"]
SHORT = {"self": "sa", "cross": "ca", "ffn": "ffn"}
"""Kind -> what Figure 1 of 2309.01826 calls it."""
Key = tuple[Side, int, Kind]
"""Which component of a model it is, whatever the family calls it."""


@dataclass(frozen=True)
class Component:
    """One component of a model.

    Attributes:
        name: of the attention, as in `Structure`, or `FfnLayer.own_name`.
        side: of which stack.
        layer: its number in the stack.
        kind: self-attention, cross-attention or FFN.
        block: name of its layer.
        output: name of the module whose output is added to the residual stream.
        removed: the checkpoint holds no such component.
    """

    name: str
    side: Side
    layer: int
    kind: Kind
    block: str
    output: str
    removed: bool = False

    @property
    def key(self) -> Key:
        """Key of the corresponding component in another model."""
        return self.side, self.layer, self.kind

    @property
    def label(self) -> str:
        """Label of Figure 1: "0.sa" is the self-attention of the first layer."""
        return f"{self.layer}.{SHORT[self.kind]}"


def components(checkpoint: Checkpoint) -> tuple[Component, ...]:
    """Every component, the encoder's first, in the order in which a token goes through them.

    Raises:
        UnsupportedModelError: the family is not declared.
        CheckpointError: config.json lacks a size, or says of its FFNs what cannot be.
    """
    found = []
    for layer in checkpoint.layout.layers:
        block, ffn, spec = layer.name, layer.ffn, layer.ffn.stack.ffn
        where = layer.side, layer.number
        for one in layer.attentions:
            output = f"{block}.{one.spec.residual or one.spec.output}"
            found.append(Component(one.name, *where, one.spec.kind, block, output, one.removed))
        if not (spec.name or spec.tensors):
            continue  # of a found family whose FFN no key sizes
        # Where an FFN is no module, its last linear layer makes its output.
        last = "" if spec.name else f".{spec.tensors[-1].name.rpartition('.')[0]}"
        inner = spec.residual or spec.module
        output = f"{block}.{inner}" if inner else f"{ffn.name}{last}"
        found.append(Component(ffn.own_name, *where, "ffn", block, output, ffn.removed))
    return tuple(found)


BLOCK_BYTES = 128 << 20
"""Memory for the blocks of Gram matrices."""
CONSTANT = 1e-12
"""Features whose centred part is a smaller share of their square norm than this are the same for every sentence."""


def linear_cka(features: Sequence[Features], *, block_bytes: int = BLOCK_BYTES) -> Floats:
    """CKA(X, Y) = ||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of centred X, Y, for every pair of components.

    2.3 prints ||A B^T||_F^2 above the line, which does not go with its n x d matrices; this is Kornblith's quotient,
    computed as <K, L>_F / (||K||_F ||L||_F) with the Gram matrices K = X X^T and L = Y Y^T, which is the same number:
    for m components that takes m n^2 d + m^2 n^2 operations in the place of m^2 n d^2. The Gram matrices `[n, n]` are
    made and used a block of rows at a time, of which only the part right of the diagonal: memory is twice `block_bytes`
    and a float64 copy of one component, whatever the number of tokens or components.

    Args:
        features: m times `[n, d]`, row i of each for sentence i; the widths d may differ.
        block_bytes: less takes less memory; the result stays the same but for rounding.

    Returns:
        `[m, m]` float64, symmetric, in [0, 1]; NaN in the rows and columns of features that are the same for every
        sentence, which no measure tells apart.
    """
    count, sentences = len(features), len(features[0])
    means = [array.mean(axis=0, dtype=np.float64) for array in features]
    products = np.zeros((count, count))
    rows = min(sentences, max(1, block_bytes // (8 * count * sentences)))
    for start in range(0, sentences, rows):
        end = min(start + rows, sentences)
        grams = np.empty((count, end - start, sentences - start))
        for place, (array, mean) in enumerate(zip(features, means, strict=True)):
            centred = array[start:] - mean
            np.matmul(centred[: end - start], centred.T, out=grams[place])
        square = grams[:, :, : end - start].reshape(count, -1)
        right = grams[:, :, end - start :].reshape(count, -1)
        products += square @ square.T + 2 * (right @ right.T)
    norms = np.sqrt(np.diagonal(products))
    norms[constant(features)] = np.nan
    similarity: Floats = np.clip(products / np.outer(norms, norms), 0, 1)
    np.fill_diagonal(similarity, np.where(np.isnan(norms), np.nan, 1.0))
    return similarity


def constant(features: Sequence[Features]) -> Bools:
    """`[m]`: which of the features are the same for every sentence, but for rounding."""
    found = []
    for array in features:
        wide = array.astype(np.float64)
        whole = float(np.square(wide).sum())
        wide -= wide.mean(axis=0)
        found.append(float(np.square(wide).sum()) <= CONSTANT * whole)
    return np.array(found, dtype=np.bool_)


GRID = 2.0**40
"""Cosines that agree to 1 / GRID are equal: the last digits depend on the order of additions."""


def neighbour_count(share: float, sentences: int) -> int:
    """k for a share of the sentences (5 % in the paper), to the nearest whole number.

    Raises:
        UsageError: k is 0, or there are not so many other sentences.
    """
    k = round(share * sentences)
    if not 1 <= k <= sentences - 1:
        raise UsageError(
            f"`neighbours={share:g}` of {sentences:,} sentences: {k} neighbours",
            f"Choose a share that makes 1 to {sentences - 1:,} of them, or give more sentences.",
        )
    return k


def local_neighbourhood_similarity(
    features: Sequence[Features], k: int, *, block_bytes: int = BLOCK_BYTES
) -> Floats:
    """LNS = mean over sentences s of Jaccard(k-NN_1(s), k-NN_2(s)), for every pair of components.

    Neighbours are the k other sentences of the highest cosine; of equal ones the first. Exact: all n^2 cosines of a
    component are looked at, a block of rows at a time. Memory is `block_bytes`, a float64 copy of one component, and
    m n^2 / 8 bytes for who is whose neighbour: 0.3 GB for 96 components and 5,000 sentences.

    Args:
        features: m times `[n, d]`, row i of each for sentence i; the widths d may differ.
        k: 1 to n - 1.
        block_bytes: less takes less memory; the result stays the same but for rounding.

    Returns:
        `[m, m]` float64, symmetric, in [0, 1]; NaN in the rows and columns of features that are the same for every
        sentence, whose neighbours mean nothing.
    """
    count, sentences = len(features), len(features[0])
    nearest = np.stack([_nearest(array, k, block_bytes) for array in features], axis=1)
    total = np.zeros((count, count))
    rows = max(1, block_bytes // (4 * count * sentences))
    for start in range(0, sentences, rows):
        member = np.unpackbits(nearest[start : start + rows], axis=2, count=sentences).astype(np.float32)
        both = np.matmul(member, member.transpose(0, 2, 1)).astype(np.float64)
        total += (both / (2 * k - both)).sum(axis=0)
    similarity = total / sentences
    same = constant(features)
    similarity[same, :] = np.nan
    similarity[:, same] = np.nan
    return similarity


def _nearest(array: Features, k: int, block_bytes: int) -> NDArray[np.uint8]:
    """`[n, ceil(n / 8)]`: which sentences are the k nearest of each, as packed bits."""
    wide = array.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    wide /= np.where(norms > 0, norms, 1)
    sentences = len(wide)
    rows = max(1, block_bytes // (24 * sentences))
    found = []
    for start in range(0, sentences, rows):
        cosines = wide[start : start + rows] @ wide.T
        np.rint(cosines * GRID, out=cosines)
        own = np.arange(len(cosines))
        cosines[own, start + own] = -np.inf  # a sentence is no neighbour of itself
        found.append(np.packbits(_largest(cosines, k), axis=1))
    return np.concatenate(found)


def _largest(values: Floats, k: int) -> Bools:
    """Mask of the k largest values of each row; the first of equal values."""
    last = np.partition(values, -k, axis=1)[:, -k, None]
    chosen = values >= last
    surplus = chosen.sum(axis=1) - k
    for row in np.flatnonzero(surplus):
        tied = np.flatnonzero(values[row] == last[row])
        chosen[row, tied[len(tied) - surplus[row] :]] = False
    return chosen
