"""Hidden units of experts: a result with fewer computes what the original does whose units are zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.commands.prune import prune_ffn
from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.ffn.activations import ExpertUnitObserver
from prunecli.methods.ffn.narrow import plan_widths
from prunecli.methods.options import NarrowOptions
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.modules.loading import load_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from prunecli.selection.selection import Selection
from tests.commands.calls import call
from tests.contracts.test_mixtures import choose, logits, save_tiny, stock_class
from tests.selections import kept_experts
from tests.tiny import write_plain_tokenizer

APART = (
    "qwen3_moe",
    "deepseek_v3",
)
"""Types whose files hold experts apart; the last has experts that serve every token."""
STACKED = ("gpt_oss", "granitemoe")


def expert_axes(checkpoint: Checkpoint) -> list[Axis]:
    return [axis for axis in axes_of(checkpoint, "unit") if axis.keys]


def masked(source: Path, model_type: str, kept: dict[str, tuple[int, ...]], axes: list[Axis]) -> Any:
    """The stock model whose hidden units that go are zero where the output layer reads them.

    Stated anew: from the tensors in the files, not from the carriers' ranges.
    """
    from safetensors.torch import load_file, save_file

    path = source / "model.safetensors"
    tensors = load_file(path)
    for axis in axes:
        gone = [unit for unit in axis.ids if unit not in kept[axis.name]]
        for name in axis.carriers:
            tensor = tensors[name]
            if name.endswith(("down_proj.weight", "w2.weight", "experts.down_proj")):
                tensor[:, gone] = 0
            elif name.endswith("output_linear.weight"):  # [experts, width, ffn]
                tensor[:, :, gone] = 0
    other = source.with_name("masked")
    other.mkdir()
    for file in source.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    return stock_class(model_type).from_pretrained(other).eval()


@pytest.mark.parametrize("model_type", [*APART, *STACKED])
def test_reduced_equals_masked(model_type: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", model_type)
    generator = np.random.default_rng(0)
    with open_model(source) as checkpoint:
        axes = expert_axes(checkpoint)
        assert axes
        held = len(axes[0].ids)
        kept = {axis.name: tuple(sorted(map(int, generator.permutation(held)[: held // 2]))) for axis in axes}
        applied = apply(checkpoint, cut(checkpoint, Selection(kept)), tmp_path / "pruned")
    assert applied.stock_support.is_stock
    full = stock_class(model_type).from_pretrained(source).eval()
    pruned, told = stock_class(model_type).from_pretrained(tmp_path / "pruned", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = logits(masked(source, model_type, kept, axes), model_type)
    assert not torch.allclose(expected, logits(full, model_type), atol=1e-4)
    torch.testing.assert_close(logits(pruned.eval(), model_type), expected, rtol=0, atol=1e-6)


def test_before_and_after_experts(tmp_path: Path) -> None:
    """Whole experts may go before or after: both ways give the same tensors."""

    def narrower(source: Path, output: Path) -> Path:
        with open_model(source) as opened:
            plan = plan_widths(opened, NarrowOptions(metric="norms", experts=True, ratio=0.5))
            apply(opened, cut(opened, plan), output)
        return output

    def fewer(source: Path, output: Path) -> Path:
        with open_model(source) as opened:
            apply(opened, cut(opened, kept_experts(experts)), output)
        return output

    source = save_tiny(tmp_path / "source", "qwen3_moe")
    with open_model(source) as checkpoint:
        experts = choose(checkpoint)
    one = fewer(narrower(source, tmp_path / "a"), tmp_path / "ab")
    other = narrower(fewer(source, tmp_path / "b"), tmp_path / "ba")
    files = [(path / "model.safetensors").read_bytes() for path in (one, other)]
    assert files[0] == files[1]
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert configs[0]["moe_intermediate_size"] == configs[1]["moe_intermediate_size"] == 8


def test_norms_are_those_of_each_expert(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    with open_model(source) as checkpoint:
        plan = plan_widths(checkpoint, NarrowOptions(metric="norms", experts=True, width=8))
        axes = expert_axes(checkpoint)
    state = stock_class("qwen3_moe").from_pretrained(source).state_dict()
    for axis in axes:
        block, _, expert = axis.module.rpartition(".")
        gate, up = state[f"{block}.gate_up_proj"][int(expert)].double().chunk(2)
        down = state[f"{block}.down_proj"][int(expert)].double()
        norms = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        assert set(plan.kept[axis.name]) == set(norms.topk(8).indices.tolist())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss"])
def test_activations_are_weighted_by_the_router(model_type: str, tmp_path: Path) -> None:
    """The mean of (g a)^2 over the tokens of each expert, padding left out."""
    from tests.reference.expert_units import squared_activations

    source = save_tiny(tmp_path / "source", model_type)
    ids = torch.tensor([[5, 9, 12, 6, 8, 11], [7, 13, 4, 0, 0, 0]])
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    model = load_model(source, device="cpu", dtype="float32")
    with open_model(source) as checkpoint:
        axes = expert_axes(checkpoint)
        observer = ExpertUnitObserver(checkpoint, axes)
        observer.mask = observer._decoder_mask = mask.bool()
        with torch.no_grad(), observer.watching(model):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        found = observer.take()
    expected, tokens = squared_activations(model, ids, mask)
    assert expected.keys() <= found["values"].keys()
    for name, own in expected.items():
        np.testing.assert_allclose(found["values"][name], own, rtol=1e-4, atol=1e-10)
        assert found["counts"][name] == max(tokens[name], 1)


def test_one_number_for_all(tmp_path: Path) -> None:
    with open_model(save_tiny(tmp_path / "source", "qwen3_moe")) as checkpoint:
        axis = expert_axes(checkpoint)[0]
        with pytest.raises(UsageError, match=r"config\.json has one number for both"):
            cut(checkpoint, Selection({axis.name: (0, 1)}))
        with pytest.raises(UsageError, match="`experts`: all experts keep the same number"):
            plan_widths(checkpoint, NarrowOptions(experts=True, uniform=False))


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    from tests.families import tiny_family

    with (
        open_model(tiny_family(tmp_path / "dense", "llama")) as checkpoint,
        pytest.raises(UnsupportedModelError, match=r"no key of config\.json counts hidden units of experts"),
    ):
        plan_widths(checkpoint, NarrowOptions(experts=True, metric="norms"))


def test_the_command(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    write_plain_tokenizer(source)
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h\n" * 40)
    found = call(prune_ffn, source, "--experts", "--text", text, "--ratio", "0.5", "-o", tmp_path / "out")
    assert found.status == 0, found.err
    assert "model.layers.0.mlp.experts" in found.out
    assert ".experts.0 " not in found.out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["moe_intermediate_size"] == 8


def test_widths_are_those_that_transformers_runs(tmp_path: Path) -> None:
    """8 or 16 of 24 units can stay, unless asked otherwise."""
    options = NarrowOptions(experts=True, metric="norms", width=12)
    with open_model(save_tiny(tmp_path / "source", "qwen3_moe")) as checkpoint:
        with pytest.raises(UsageError, match="`width=12` is no multiple of 8"):
            plan_widths(checkpoint, options)
        kept = plan_widths(checkpoint, options.model_copy(update={"multiple_of": 1})).kept
    assert {len(units) for units in kept.values()} == {12}
