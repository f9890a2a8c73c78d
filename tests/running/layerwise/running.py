"""Batches for any family, run in memory and layer by layer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.building import fill_resident, make_model
from prunecli.modules.loading import load_model
from prunecli.modules.stages import EmptyModel
from prunecli.pipeline import apply
from prunecli.running.layerwise import runner
from prunecli.running.layerwise.reading import Reader
from prunecli.running.layerwise.runner import LayerwiseRun
from prunecli.running.layerwise.states import StateStore
from prunecli.selection.cut import cut
from tests.families import tiny_family
from tests.ffn_layouts import LAYOUTS, tiny, write_changed
from tests.selections import kept_heads

CPU = torch.device("cpu")
BATCHES = (
    torch.tensor([[5, 9, 12, 2], [7, 2, 1, 1]]),
    torch.tensor([[5, 9, 12, 6, 8, 2], [7, 2, 1, 1, 1, 1], [5, 5, 5, 2, 1, 1]]),
    torch.tensor([[11, 2]]),
)


class StopError(Exception):
    """Ends a run in the middle."""


def stop() -> None:
    raise StopError


def at_step(step: int, act: Callable[[], object]) -> Callable[..., None]:
    """Progress that acts at one of its steps, the first of which is 0."""
    steps = itertools.count()

    def advance(*_: Any) -> None:
        if next(steps) == step:
            act()

    return advance


def no_room(monkeypatch: pytest.MonkeyPatch, memory: int, disk: int = 1 << 40) -> None:
    """Have so much room for states, in memory and on the disk, whatever this process takes."""
    monkeypatch.setattr(runner.Room, "in_memory", lambda _self, _plan: memory)
    monkeypatch.setattr(runner, "disk_room", lambda _directory: disk)


def without_heads(path: Path, model_type: str) -> Path:
    """A model whose attentions keep other heads each: two, three, none."""
    kept = itertools.cycle(((1, 3), (0, 1, 2), ()))
    with open_model(tiny_family(path / "source", model_type)) as opened:
        plan = kept_heads({layer.name: next(kept) for layer in opened.layout.attentions})
        apply(opened, cut(opened, plan), path / "pruned")
    return path / "pruned"


def with_shared_ffns(path: Path, case: str) -> Path:
    """A model whose second FFN is its first one, and which lacks the third."""
    names = list(LAYOUTS[case].names)
    changes = {names[1]: {"shared_with": names[0]}, names[2]: {"removed": True}}
    return write_changed(tiny(path / "source", case), path / "changed", case, changes)


def count_reads(checkpoint: Checkpoint) -> Counter[str]:
    """Name of a tensor -> bytes that are read of it from now on."""
    reads: Counter[str] = Counter()
    real = checkpoint.read_range

    def counting(name: str, start: int, end: int, buffer: Any) -> memoryview:
        reads[name] += end - start
        return real(name, start, end, buffer)

    checkpoint.read_range = counting  # type: ignore[method-assign]
    return reads


def inputs(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Arguments of one forward pass, without a cache."""
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = ids.flip(1)
    if model.can_generate():
        found["use_cache"] = False
    return found


def in_memory(path: Path, dtype: str = "float32") -> list[Any]:
    """Outputs of the model for each batch."""
    model = load_model(path, device="cpu", dtype=dtype)
    with torch.inference_mode():
        return [model(**inputs(model, ids))[0] for ids in BATCHES]


def skeleton_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> EmptyModel:
    """A skeleton, its resident tensors in place."""
    skeleton = make_model(checkpoint, CPU, dtype, output=True)
    fill_resident(skeleton, checkpoint)
    return skeleton


def by_layer(
    path: Path, memory: int = 1 << 20, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Any], int]:
    """Outputs of the model for each batch, layer by layer, and the bytes that were read of its layers."""
    found: dict[int, Any] = {}
    with open_model(path) as checkpoint:
        skeleton = skeleton_of(checkpoint, dtype)
        model = skeleton.model

        def forward(ids: torch.Tensor) -> Any:
            return model(**inputs(model, ids))[0]

        with Reader(checkpoint, 2, skeleton.widest_bytes, CPU) as reader, StateStore(memory) as states:
            LayerwiseRun(skeleton, reader, states).forward(
                [lambda ids=ids: forward(ids) for ids in BATCHES],
                finish=lambda number, logits: found.__setitem__(number, logits),
                **options,
            )
            assert states.free_memory == memory - memory % 64 or memory % 64
            return [found[number] for number in range(len(BATCHES))], reader.bytes_read


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Equal to the last bit."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
