"""On a real card: commands find what they find on a CPU, and training can be repeated bit by bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prunecli
from prunecli.modules.loading import load_model
from prunecli.training.options import TrainingOptions
from tests.gpu.conftest import HAS_CARD
from tests.tiny import json_of

pytestmark = pytest.mark.skipif(not HAS_CARD, reason="no GPU here")

PAIR = prunecli.TextChoice(
    data=prunecli.demo.DATA, pairs=(("qba_Latn", "qbo_Latn"),), split="val", max_sentences=100
)
SHARE_OF_TIES = 1e-3
"""Choices that rounding may decide otherwise."""


def gates(model: Path, choice: Any, name: str, **options: Any) -> dict[str, Any]:
    prunecli.collect_gates(model, choice, output=name, **options)
    return json_of(name)["entries"]


@pytest.mark.parametrize("where", [{}, {"memory": 2 << 30}], ids=["whole", "layer by layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_of_the_demo(where, dtype):
    want = gates(prunecli.demo.CHECKPOINT, PAIR, "cpu.json", device="cpu", dtype="float32")
    found = gates(prunecli.demo.CHECKPOINT, PAIR, "gpu.json", device="cuda", dtype=dtype, **where)
    near = 1e-3 if dtype == "float32" else 0.03
    for pair, sums in want.items():
        assert found[pair]["tokens"] == sums["tokens"]
        for name in ("top1", "top2"):
            ours, theirs = np.array(found[pair][name], float), np.array(sums[name], float)
            share = SHARE_OF_TIES if dtype == "float32" else 0.05
            assert np.abs(ours - theirs).sum() <= 2 * share * theirs.sum()
        for name in ("gate_sum", "conf1_sum"):
            ours, theirs = np.array(found[pair][name]), np.array(sums[name])
            assert np.abs(ours - theirs).sum() <= 2 * near * theirs.sum()


def test_gates_of_the_language_model():
    text = prunecli.demo.LM_DATA / "val.prose"
    choice = [prunecli.Corpus("prose", (text,), tuple(text.read_text(encoding="utf-8").splitlines()))]
    model = prunecli.demo.LM_CHECKPOINT
    want = gates(model, choice, "cpu.json", device="cpu", dtype="float32")
    for dtype, near in (("float32", 1e-3), ("bfloat16", 0.05)):
        found = gates(model, choice, f"{dtype}.json", device="cuda", dtype=dtype)
        for text, sums in want.items():
            assert found[text]["tokens"] == sums["tokens"]
            for name in ("top1", "gate_sum", "norm_sum", "gate_norm_sum"):
                ours, theirs = np.array(found[text][name], float), np.array(sums[name], float)
                assert np.abs(ours - theirs).sum() <= 2 * near * np.abs(theirs).sum()


def test_translations():
    scores = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16"), ("cuda", "float16")):
        options = prunecli.EvaluationOptions(device=device, dtype=dtype)
        result = prunecli.evaluate({"demo": prunecli.demo.CHECKPOINT}, PAIR, options)
        scores[device, dtype] = result.results[0].mean["chrf++"]
    want = scores["cpu", "float32"]
    assert scores == pytest.approx(dict.fromkeys(scores, want), abs=0.5)


def test_scores_of_heads():
    found = [
        prunecli.score_heads(prunecli.demo.CHECKPOINT, PAIR, prunecli.ScoreOptions(device=device))
        for device in ("cpu", "cuda")
    ]
    for axis, values in found[0].values.items():
        np.testing.assert_allclose(found[1].values[axis], values, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_can_be_repeated(dtype):
    """Two whole runs, and one that is resumed in the middle."""
    options = TrainingOptions(steps=8, warmup=2, batch_tokens=512, device="cuda", dtype=dtype)
    weights = []
    for number in range(2):
        target = prunecli.Destination(Path(str(number)), save_every=4)
        prunecli.finetune(prunecli.demo.CHECKPOINT, PAIR, target, options)
        weights.append((target.output / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_shrunken_model():
    choice = prunecli.TextChoice(files=(prunecli.demo.LM_DATA / "val.prose",))
    prunecli.shrink(prunecli.demo.LM_CHECKPOINT, choice, output="shrunk")
    whole, cut = load_model(prunecli.demo.LM_CHECKPOINT), load_model("shrunk")
    assert cut.device.type == "cuda"
    assert cut.num_parameters() <= 0.75 * whole.num_parameters()
