"""Losses of mixtures in their stock classes, layer by layer, are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import UsageError
from prunecli.evaluation.evaluate import evaluate
from prunecli.evaluation.options import EvaluationOptions
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.modules.stock_experts import own_experts
from prunecli.pipeline import apply
from prunecli.running.runner import InMemory
from prunecli.selection.cut import cut
from prunecli.text.choice import TextChoice
from prunecli.text.tokens import load_tokenizer
from tests.evaluation.losses import TextLosses, lm_losses
from tests.evaluation.test_layer_major import LINES, assert_same, layered
from tests.methods.experts.test_layerwise import PLENTY
from tests.running.layerwise.running import no_room
from tests.selections import kept_experts
from tests.stock_mixtures import tiny_mixture
from tests.tiny import write_plain_tokenizer


def saved(folder: Path, model_type: str, **config: Any) -> Path:
    tiny_mixture(model_type, **config).save_pretrained(folder)
    write_plain_tokenizer(folder)
    return folder


def whole(path: Path, dtype: str = "float32", *, own: bool = True, **more: Any) -> TextLosses:
    """In memory, its experts added up in their order, as layer by layer; else as transformers does it."""
    model = load_model(path, device="cpu", dtype=dtype)
    tokenizer = load_tokenizer(path)
    if not own:
        return lm_losses(InMemory(model), tokenizer, LINES, 40, **more)
    with own_experts(model):
        return lm_losses(InMemory(model), tokenizer, LINES, 40, **more)


KINDS = (
    "gpt_oss",
    "granitemoehybrid",
    "qwen3_next",
)
"""Families with attentions, states or layouts of different kinds; gate statistics are collected of all by layer."""


@pytest.mark.parametrize("model_type", KINDS)
def test_every_kind_of_layer(model_type, tmp_path):
    path = saved(tmp_path / "model", model_type)
    found, work = layered(path, model_type)
    assert_same(found, whole(path))
    np.testing.assert_allclose(found.nats, whole(path, own=False).nats, rtol=1e-6)
    with open_model(path) as checkpoint:
        assert work.readings == 1
        assert 0 < work.bytes_read <= checkpoint.total_bytes


def test_a_pruned_model_whose_states_are_in_a_file(tmp_path, monkeypatch):
    source, pruned = saved(tmp_path / "model", "granitemoe"), tmp_path / "pruned"
    with open_model(source) as opened:
        kept = {layer.name: (1, 2, 4, 7) for layer in opened.mixtures}
        apply(opened, cut(opened, kept_experts(kept)), pruned)
    no_room(monkeypatch, 0)
    found, work = layered(pruned, "granitemoe", spill=tmp_path)
    assert_same(found, whole(pruned))
    assert work.spilled_bytes > 0


def evaluated(tmp_path: Path, paths: dict[str, Path], **options: Any) -> dict[str, dict[str, Any]]:
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in LINES))
    data = TextChoice(files=(tmp_path / "text",)).read("lm")
    made = evaluate(paths, data, EvaluationOptions(device="cpu", **options))
    return {result.checkpoint: result.scores for result in made.results}


def test_divergence_from_the_first_model(tmp_path):
    source, pruned = saved(tmp_path / "model", "deepseek_v3"), tmp_path / "pruned"
    with open_model(source) as opened:
        kept = {layer.name: (0, 1, 3, 4, 5, 7) for layer in opened.mixtures}
        apply(opened, cut(opened, kept_experts(kept)), pruned)
    paths = {"model": source, "pruned": pruned}
    in_layers, in_memory = evaluated(tmp_path, paths, memory=PLENTY), evaluated(tmp_path, paths)
    assert in_layers["pruned"]["kl_divergence"] > 1e-3
    for name, scores in in_memory.items():
        assert in_layers[name].keys() == scores.keys()
        numbers = {key: value for key, value in scores.items() if isinstance(value, float)}
        assert {key: in_layers[name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)


def test_a_family_that_runs_whole_is_refused(tmp_path):
    path = saved(tmp_path / "model", "kimi_linear")
    with pytest.raises(
        UsageError, match="`memory`: a model of type kimi_linear is measured with the whole model"
    ):
        evaluated(tmp_path, {"model": path}, memory=PLENTY)
