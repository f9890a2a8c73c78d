"""A model's components and their representations of sentences (2309.01826, section 2.3): token means of outputs."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunecli.architectures.records import Side
from prunecli.errors import DataError, OutputError, UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.layout import Layer
from prunecli.model.patchwork import module_name
from prunecli.running.batches import TokenObserver, run_forward
from prunecli.running.examples import Batch
from prunecli.running.runner import InMemory

Features = NDArray[np.float32]
"""`[sentences, width]`: a row per sentence."""


@dataclass(frozen=True)
class Representations:
    """Outputs of a model's components for the same sentences.

    Attributes:
        components: those that the model has.
        features: one `[sentences, width]` for each component.
    """

    components: tuple[Component, ...]
    features: tuple[Features, ...]

    @property
    def width(self) -> int:
        """Width of the widest output."""
        return max((array.shape[1] for array in self.features), default=0)


def represent(
    runner: InMemory,
    components: Sequence[Component],
    batches: Sequence[Batch],
    directory: Path,
    advance: Callable[[float], None] = lambda _: None,
) -> Representations:
    """Run a model over sentences, and keep the mean of each component's outputs over a sentence's tokens.

    An output is what the component adds to the residual stream. Every token that the model reads counts, special
    tokens too; padding does not. The decoder reads the reference (forced decoding). Memory is that of the model and
    of one batch: the means go to files, 4 x components x sentences x width bytes.

    Args:
        runner: of a model with the components of its checkpoint; removed ones are left out.
        batches: their `indices` are 0 to n - 1, each once.
        directory: an empty directory, for the files. They live as long as it does.
        advance: called with the number of sentences done.

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
    features: dict[int, Features] = {}

    def forward(batch: Batch) -> None:
        observer.begin(batch, runner.device)
        headless(**batch.arguments(headless))

    def finish(batch: Batch, _output: None) -> int:
        means = observer.take()
        for number, component in enumerate(present):
            if number not in means:
                raise UnsupportedModelError(f"{component.name}: the model does not run it")
            rows: Features = means[number].cpu().numpy()
            finite = np.isfinite(rows).all(axis=1)
            if not finite.all():
                sentence = batch.indices[int(np.argmin(finite))] + 1
                raise DataError(
                    f"{component.name}: its output for sentence {sentence:,} holds NaN or infinity",
                    "The weights are damaged, or overflow the type: try `dtype=float32`.",
                )
            if number not in features:
                features[number] = _file(directory / str(number), sentences, rows.shape[1])
            features[number][list(batch.indices)] = rows
        advance(len(batch.indices))
        return 0

    with observer.watching(runner.model):
        run_forward(runner, batches, forward, finish)
    return Representations(present, tuple(features[number] for number in range(len(present))))


class ComponentObserver(TokenObserver):
    """Takes the token means of components' outputs.

    Several layers may share one module: an output belongs to the layer that is running.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = components
        self._means: dict[int, Tensor] = {}
        self._block = ""

    def hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """See `TokenObserver`."""
        sharing: dict[nn.Module, dict[str, int]] = defaultdict(dict)
        for number, component in enumerate(self._components):
            sharing[model.get_submodule(module_name(model, component.output))][component.block] = number
        for block in dict.fromkeys(component.block for component in self._components):
            layer = model.get_submodule(module_name(model, block))
            yield layer.register_forward_pre_hook(partial(self._enter, block))
        for module, numbers in sharing.items():
            yield module.register_forward_hook(partial(self._leave, numbers))

    def take(self) -> dict[int, Tensor]:
        """Number of each component that has run since the last call -> `[batch, width]` float32."""
        means, self._means = self._means, {}
        return means

    def _enter(self, block: str, _module: nn.Module, _inputs: Any) -> None:
        self._block = block

    def _leave(self, numbers: Mapping[str, int], _module: nn.Module, _inputs: Any, output: Any) -> None:
        number = numbers[self._block]
        outputs = output[0] if isinstance(output, tuple) else output
        mask = self.mask.to(outputs.device)
        if outputs.ndim == 2 and len(outputs) == mask.numel():  # OPT's FFNs take all tokens in one dimension
            outputs = outputs.view(*mask.shape, -1)
        if outputs.shape[:-1] != mask.shape:
            raise UnsupportedModelError(
                f"{self._components[number].name}: its output has the shape {list(outputs.shape)}, for "
                f"{list(mask.shape)} tokens"
            )
        # At once, so that one output at a time is held.
        total = outputs.float().masked_fill(~mask[..., None], 0).sum(dim=1)
        self._means[number] = total / mask.sum(dim=1, keepdim=True)


def _file(path: Path, sentences: int, width: int) -> Features:
    """A file that is mapped into memory; its place on the disk is taken at once.

    Raises:
        OutputError: the disk is full. A write to a mapping without a place would end the process.
    """
    size = 4 * sentences * width
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise OutputError(
                    f"{path.parent}: no space left for the outputs of the components",
                    "Free some, name another directory in TMPDIR, or compare on fewer pairs or sentences.",
                ) from error
        else:
            file.truncate(size)
    return np.memmap(path, np.float32, "r+", shape=(sentences, width))


Kind = Literal["self", "cross", "ffn"]
SHORT: dict[Kind, str] = {"self": "sa", "cross": "ca", "ffn": "ffn"}
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
    return tuple(component for layer in checkpoint.layout.layers for component in _of_layer(layer))


def _of_layer(layer: Layer) -> Iterator[Component]:
    block, ffn, stack = layer.name, layer.ffn, layer.ffn.stack
    for attention in layer.attentions:
        spec = attention.spec
        output = f"{block}.{spec.residual or spec.output}"
        yield Component(attention.name, layer.side, layer.number, spec.kind, block, output, attention.removed)
    if not (stack.ffn.name or stack.ffn.tensors):
        return  # of a found family whose FFN no key sizes
    # Where an FFN is no module, its last linear layer makes its output.
    last = "" if stack.ffn.name else f".{stack.ffn.tensors[-1].name.rpartition('.')[0]}"
    inner = stack.ffn.residual or stack.ffn.module
    output = f"{block}.{inner}" if inner else f"{ffn.name}{last}"
    yield Component(ffn.own_name, layer.side, layer.number, "ffn", block, output, ffn.removed)
