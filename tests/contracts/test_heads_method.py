from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from prunecli.methods.options import HeadOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.parts import AttentionLayer
from prunecli.model.rewrite import Rewrite
from prunecli.modules.hooks import masked_heads
from prunecli.selection.cut import cut
from tests.contracts.method_contract import (
    CachedGeneration,
    InSteps,
    Method,
    MethodContract,
    WrittenFiles,
    assert_near,
    logits,
    logits_of,
    written,
)
from tests.families.records import BRANCHES
from tests.selections import kept_heads
from tests.structures import kept_ids
from tests.tiny import tiny_nllb_moe

KEPT = ((1, 3), (), (0, 2, 3), (3,), (0, 1, 2, 3))
"""Of four heads, in layer after layer."""


def keeping_heads(source: Checkpoint, kept: dict[str, tuple[int, ...]], dtype: str | None = None) -> Rewrite:
    return cut(
        source,
        kept_heads(
            kept, dtype=dtype, step={"command": "prune-heads", "source": {"fingerprint": source.fingerprint}}
        ),
    )


class HeadPruning(Method):
    """Uneven layers, one of them without heads."""

    keep_everything = HeadOptions(metric="random", ratio=0.0)
    impossible = HeadOptions(metric="random", count=10_000)
    kept = KEPT
    layers: tuple[AttentionLayer, ...] = ()

    def reduce(self, source: Checkpoint) -> Rewrite:
        self.layers = source.layout.attentions
        kept = {layer.name: ids for layer, ids in zip(self.layers, cycle(self.kept), strict=False)}
        made = keeping_heads(source, kept, self.cast)
        assert (() in self.kept) == ("auto_map" in made.config)  # not a stock model
        return made

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        self.hooks.enter_context(masked_heads(model, self.layers, masks(self.layers, rewrite)))


def masks(layers: tuple[AttentionLayer, ...], rewrite: Rewrite) -> dict[str, Any]:
    """xi_h of 2.3 for every attention that `rewrite` changes."""
    kept = kept_ids(rewrite.structure, "head")
    return {
        layer.name: torch.tensor([float(head in kept[layer.name]) for head in layer.heads])
        for layer in layers
        if layer.name in kept
    }


class TestEveryFamily(HeadPruning, MethodContract):
    cases = (
        *(name for name in BRANCHES if name not in ("opt", "bert-untied")),
        *("m2m_100", "bert-classifier"),
    )


class TestEveryDecoder(HeadPruning, CachedGeneration):
    pass


class TestFiles(HeadPruning, WrittenFiles):
    pass


class TestEveryLayout(HeadPruning, InSteps):
    def steps(self) -> tuple[Any, Any, Any]:
        """Places in the file are not ids of the original: only those of the first step are."""

        def only(ids: set[int]) -> Any:
            return lambda opened: keeping_heads(
                opened,
                {
                    layer.name: tuple(head for head in layer.heads if head in ids)
                    for layer in opened.layout.attentions
                },
                self.cast,
            )

        return only({1, 2, 3}), only({1, 3}), only({1, 3})


class TestKinds(HeadPruning):
    cases = ("bart", "gpt2")

    def test_a_kind_without_any_head(self, source):
        layers = open_model(source).layout.attentions
        original = self.original(source)
        for kind in {layer.kind for layer in layers}:
            gone = {layer.name: () for layer in layers if layer.kind == kind}
            written(source, kept_heads(gone), kind)
            zeros = {layer.name: torch.zeros(layer.count) for layer in layers if layer.name in gone}
            with masked_heads(original, layers, zeros):
                masked = logits_of(original)
            assert_near(logits(kind), masked)


class TestToFloat16(HeadPruning, WrittenFiles, MethodContract):
    """With a cast, of pickled shards."""

    cases = ("nllb-moe",)

    cast = "F16"

    def make_source(self) -> Path:
        heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        return tiny_nllb_moe(self.path, layers=2, config=heads, shards=2, pickled=True)


class TestEven(HeadPruning, WrittenFiles, MethodContract):
    """To the stock layout, with a cast."""

    cases = ("llama-tied",)
    kept = ((1, 3), (0, 1))

    cast = "BF16"

    def reduce(self, source: Checkpoint) -> Rewrite:
        made = super().reduce(source)
        assert made.config["model_type"] == "llama"
        counts = {key: made.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        assert counts == {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
        return made
