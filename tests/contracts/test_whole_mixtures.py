"""Mixtures, all of whose parts are found: what a stock class can hold of a method's results is the masked model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.commands.compare import compare_models
from prunecli.commands.prune import prune_layers
from prunecli.commands.score_heads import score_heads
from prunecli.errors import UnsupportedModelError
from prunecli.methods.ffn.narrow import NarrowOptions, plan_widths
from prunecli.methods.heads.plan import HeadOptions, plan_heads
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.modules.loading import load_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from prunecli.selection.selection import Selection
from tests.commands.calls import call
from tests.contracts.test_mixtures import choose, logits, save_tiny, stock_class, without
from tests.contracts.test_vocabulary_method import LINES, same_logits, to_lines
from tests.selections import kept_experts, kept_heads
from tests.tiny import write_plain_tokenizer

MIXTURES = (
    "mixtral",
    "qwen3_moe",
)
HEADS = {"model.layers.0.self_attn": (1,), "model.layers.1.self_attn": (0,), "model.layers.2.self_attn": (1,)}


@pytest.fixture(params=MIXTURES)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(model_type: str, tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "source", model_type)


def made(
    source: Path,
    output: Path,
    decide: Callable[[Checkpoint], Rewrite],
    model_type: str,
    *,
    compared: bool = True,
) -> tuple[Any, Any]:
    """The stock model of the original and of the result, which transformers opens without a word.

    Args:
        compared: whether that model is also what `load_model` makes of it.
    """
    with open_model(source) as checkpoint:
        applied = apply(checkpoint, decide(checkpoint), output)
    assert applied.stock_support.is_stock
    with open_model(output) as checkpoint:
        checkpoint.check()
    stock = stock_class(model_type)
    model, info = stock.from_pretrained(output, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = load_model(output, device="cpu", dtype="float32")
    assert type(loaded) is stock
    if compared:  # by ids that it has
        assert torch.equal(logits(loaded, model_type), logits(model.eval(), model_type))
    return stock.from_pretrained(source).eval(), model


def drop_layers(model: Any, numbers: tuple[int, ...]) -> None:
    """Let what comes into these layers go by them."""
    for number in numbers:
        layer = model.model.layers[number]
        layer.register_forward_hook(lambda _, given, __: given[0])


def test_every_tensor_is_found(source: Path) -> None:
    with open_model(source) as checkpoint:
        checkpoint.check()
        assert set(checkpoint.layout.shapes) == set(checkpoint.tensors)


def test_without_layers(source: Path, model_type: str, tmp_path: Path) -> None:
    gone, kept = (0, 2), (1,)
    full, pruned = made(
        source,
        tmp_path / "pruned",
        lambda checkpoint: cut(checkpoint, Selection({"decoder.layers": kept})),
        model_type,
    )
    before = logits(full, model_type)
    drop_layers(full, gone)
    expected = logits(full, model_type)
    assert not torch.equal(expected, before)
    torch.testing.assert_close(logits(pruned, model_type), expected, rtol=0, atol=1e-6)


def test_with_fewer_heads(source: Path, model_type: str, tmp_path: Path) -> None:
    full, pruned = made(
        source,
        tmp_path / "pruned",
        lambda checkpoint: cut(checkpoint, kept_heads(HEADS)),
        model_type,
    )
    before = logits(full, model_type)
    for name, (kept,) in HEADS.items():
        output = full.get_submodule(name).o_proj.weight
        width = output.shape[1] // 2  # of the queries of one of two key/value heads
        output.data[:, (1 - kept) * width : (2 - kept) * width] = 0
    expected = logits(full, model_type)
    assert not torch.equal(expected, before)
    torch.testing.assert_close(logits(pruned, model_type), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3_moe"])
def test_with_narrower_dense_layers(source: Path, model_type: str, tmp_path: Path) -> None:
    options = NarrowOptions(ratio=0.5, metric="random", dense_only=True)

    def narrow(checkpoint: Checkpoint) -> Rewrite:
        plan = plan_widths(checkpoint, options)
        units.extend(plan.kept["model.layers.1.mlp.units"])
        return cut(checkpoint, plan)

    units: list[int] = []
    full, pruned = made(source, tmp_path / "pruned", narrow, model_type)
    assert pruned.config.intermediate_size == 24
    assert pruned.config.moe_intermediate_size == 24
    before = logits(full, model_type)
    full.model.layers[1].mlp.down_proj.weight.data[:, [u for u in range(48) if u not in units]] = 0
    expected = logits(full, model_type)
    assert not torch.equal(expected, before)
    torch.testing.assert_close(logits(pruned, model_type), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3_moe"])
def test_after_one_another(source: Path, model_type: str, tmp_path: Path) -> None:
    """Layers that went before experts, and others after them."""

    def prune(checkpoint: Checkpoint) -> Rewrite:
        return cut(checkpoint, kept_experts(kept))

    first, second = tmp_path / "shallow", tmp_path / "pruned"
    made(source, first, lambda opened: cut(opened, Selection({"decoder.layers": (1, 2)})), model_type)
    with open_model(first) as checkpoint:
        kept = choose(checkpoint)
    shallow, _ = made(first, second, prune, model_type)
    with open_model(first) as checkpoint, without(shallow, checkpoint, kept):
        drop_layers(shallow, (0,))
        expected = logits(shallow, model_type)
    _, last = made(
        second,
        tmp_path / "last",
        lambda opened: cut(opened, Selection({"decoder.layers": (2,)})),
        model_type,
    )
    torch.testing.assert_close(logits(last, model_type), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3_moe"])
def test_with_fewer_tokens(source: Path, model_type: str, tmp_path: Path) -> None:
    write_plain_tokenizer(source)
    path = source / "config.json"  # tokens are told from positions by their number
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 72}))
    _, pruned = made(source, tmp_path / "pruned", to_lines, model_type, compared=False)
    assert pruned.config.vocab_size < 64
    same_logits(source, tmp_path / "pruned", LINES)


@pytest.mark.parametrize("model_type", ["qwen3_moe"])
def test_what_runs_the_model_finds_its_parts(source: Path, model_type: str, tmp_path: Path) -> None:
    write_plain_tokenizer(source)
    text = tmp_path / "text.txt"
    text.write_text("\n".join([f"{line} {more}" for line in LINES for more in LINES] * 3))
    output = tmp_path / "shallow"
    for command, *arguments in (
        (prune_layers, source, "--metric", "cosine", "--count", 1, "-o", output),
        (prune_layers, source, "--metric", "perplexity", "--count", 1, "--dry-run"),
        *(
            (score_heads, source, "--metric", metric, "-o", tmp_path / f"{metric}.json")
            for metric in ("gradient", "ablation")
        ),
        (compare_models, source, output, "-o", tmp_path / "similarity.json"),
    ):
        result = call(command, *arguments, "--text", text)
        assert result.status == 0, result.err


@pytest.mark.parametrize("model_type", ["olmoe"])
def test_norms_over_all_heads_keep_them(source: Path, model_type: str) -> None:
    with open_model(source) as checkpoint, pytest.raises(UnsupportedModelError, match="a norm over all"):
        plan_heads(checkpoint, HeadOptions(metric="random", uniform=True))
