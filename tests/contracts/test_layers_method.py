"""Removing layers keeps the contract of methods, and gives stock models."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import UnsupportedModelError
from prunecli.methods.experts.plan import plan_experts
from prunecli.methods.options import ExpertOptions
from prunecli.methods.plans import HeadOptions, LayerOptions, plan_heads
from prunecli.methods.sharing.options import FfnOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.rewrite import Rewrite
from prunecli.results.gates import SUMS, GateSums
from prunecli.results.matching import match_gates, match_scores
from tests.contracts.method_contract import (
    CachedGeneration,
    InSteps,
    Method,
    MethodContract,
    WrittenFiles,
    assert_near,
    assert_same,
    logits,
    logits_of,
    made_of,
    stock_model,
    written,
)
from tests.families import tiny_family
from tests.families.records import BRANCHES, CASES
from tests.gates import gate_statistics
from tests.opening import load
from tests.reference.masks import passed_by
from tests.scores import scores_by_hand

CHANGES = {
    "bart": {"num_hidden_layers": 3},  # the encoder's once more, as transformers 4 wrote it
    "t5": {"num_decoder_layers": None},  # as many as the encoder's
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma2": {"layer_types": None},  # alternate
    "gemma3_text": {"layer_types": None, "sliding_window_pattern": 2},
}
"""What config.json may say of layers by their numbers."""


def stacks_of(case: str) -> tuple[str, ...]:
    """Beginnings of the names of the layers of each stack: "model.encoder.layers"."""
    names = (re.match(r"(.*?)\.\d+(?=\.|$)", name)[1] for name in CASES[case].ffns.names)
    return tuple(dict.fromkeys(names))


class LayerPruning(Method):
    """The first layer of each stack goes, which no regular pattern would remove."""

    keep_everything = LayerOptions(count=0, metric="last")
    impossible = LayerOptions(count=99, metric="random")

    def make_source(self) -> Path:
        self.stacks = stacks_of(self.case)
        return tiny_family(self.path, self.case, **CHANGES.get(self.case, {}))

    def reduce(self, source: Checkpoint) -> Rewrite:
        layers = "encoder:0,decoder:0" if len(self.stacks) > 1 else "0"
        return made_of(source, LayerOptions(remove=layers, dtype=self.cast))

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        self.hooks.enter_context(passed_by(model, [f"{stack}.0" for stack in self.stacks]))


class TestEveryFamily(LayerPruning, MethodContract):
    cases = dict.fromkeys((*(name for name in BRANCHES if name != "bert-untied"), *CHANGES, "smollm3"))


class TestEveryDecoder(LayerPruning, CachedGeneration):
    pass


class TestFiles(LayerPruning, WrittenFiles):
    pass


class TestEveryLayout(LayerPruning, InSteps):
    def test_it_is_a_stock_model(self, case, source):
        out = written(source, self.reduce, "out")
        if case != "nllb-moe":
            assert_near(logits_of(stock_model(out, source)), logits(out))
            return
        assert [mixture.layer for mixture in open_model(out).mixtures] == [0, 2, 0, 2]

    def steps(self) -> tuple[Any, Any, Any]:
        """Layers 0 and 2; the second time the latter is number 1."""
        side = "encoder:" if len(self.stacks) > 1 else ""

        return tuple(LayerOptions(remove=f"{side}{layers}") for layers in ("0", "1", "0,2"))

    @pytest.mark.parametrize("method", ["heads", "ffns"])
    def test_other_parts_that_went_before_stay_gone(self, method, source):
        """Heads of the layers that stay; FFNs shared by all, whose holder goes, as if the layers had gone first."""

        other = HeadOptions(metric="random", ratio=0.3)
        if method == "ffns":
            sides = {layer.side: "share" for layer in open_model(source).layout.ffns}
            other = FfnOptions(**sides, init="last", dense_only=True)

        written(source, other, "other")
        written("other", self.reduce, "both")
        original = load("other")
        self.mask(original, None)
        assert_near(logits("both"), logits_of(original))
        if method == "ffns":
            written(source, self.reduce, "layers")
            written("layers", other, "swapped")
            assert_same("both", "swapped")


class TestToBFloat16(LayerPruning, WrittenFiles, MethodContract):
    cases = ("llama",)
    cast = "BF16"


def test_a_layer_that_knows_its_number_keeps_it():
    source = tiny_family("source", "gpt2", scale_attn_by_inverse_layer_idx=True)
    opened = open_model(source)
    with pytest.raises(UnsupportedModelError, match="depends on its number"):
        made_of(opened, LayerOptions(remove="0"))
    written(opened, LayerOptions(count=1, metric="last"), "out")
    model = load(source)
    with passed_by(model, ["transformer.h.2"]):
        assert_near(logits("out"), logits_of(model))


def test_scores_of_the_original_follow_their_layers():
    """Layer 0 goes, then what was layer 1."""
    source = tiny_family("source", "gpt2")
    opened = open_model(source)
    names = [layer.name for layer in opened.layout.attentions]
    values = {name: np.array([1.0, 2, 3, 4]) + 10 * number for number, name in enumerate(names)}
    scores = scores_by_hand(values, fingerprint=opened.fingerprint, model_type="gpt2", task="lm", examples=1)
    options = HeadOptions(scores=scores, count=2, normalize="none")
    once = written(source, LayerOptions(remove="0"), "once")
    assert plan_heads(open_model(once), options).kept == {
        f"{names[0]}.heads": (2, 3),
        f"{names[1]}.heads": (0, 1, 2, 3),
    }
    twice = written(once, LayerOptions(remove="0"), "twice")
    opened = open_model(twice)
    assert plan_heads(opened, options).kept == {f"{names[0]}.heads": (2, 3)}
    found = match_scores(scores, opened, axes_of(opened, "head"))
    assert found.values[f"{names[0]}.heads"] == [21, 22, 23, 24]


def test_gates_of_the_original_follow_their_layers():
    """The encoder layer 1 goes, and the sparse layer 3 becomes number 2."""
    source = tiny_family("source", "nllb-moe")
    opened = open_model(source)
    names = tuple(layer.name for layer in opened.mixtures)
    rows = np.arange(4.0)[:, None] * np.ones((1, 8))
    sums = GateSums(tokens=np.arange(4), **dict.fromkeys(SUMS[1:], rows))
    gates = gate_statistics(names, {"eng_Latn-fra_Latn": sums}, opened.fingerprint)
    out = written(source, LayerOptions(remove="encoder:1"), "out")
    opened = open_model(out)
    found = match_gates(gates, opened)
    assert found.layers == tuple(layer.name for layer in opened.mixtures)
    assert found.layers == ("model.encoder.layers.2.ffn", *names[2:])
    assert found.entries["eng_Latn-fra_Latn"].tokens.tolist() == [1, 2, 3]
    assert found.entries["eng_Latn-fra_Latn"].top1[:, 0].tolist() == [1, 2, 3]
    plan_experts(opened, ExpertOptions(gates=gates, ratio=0.5))
