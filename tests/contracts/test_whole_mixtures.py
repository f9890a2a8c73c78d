"""Mixtures, all of whose parts are found: tokens go, and what runs the model finds its parts."""

import pytest

from prunecli.commands.compare import compare_models
from prunecli.commands.measure import score_heads
from prunecli.commands.prune import prune_layers
from prunecli.errors import UnsupportedModelError
from prunecli.methods.plans import HeadOptions, plan_heads
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from tests.commands.calls import done
from tests.contracts.test_vocabulary_method import LINES, same_logits, to_lines
from tests.families import cutting
from tests.stock_mixtures import save_mixture
from tests.tiny import config_of


@pytest.fixture
def source(tmp_path):
    # Tokens are told from positions by their number.
    return save_mixture(tmp_path / "source", "qwen3_moe", max_position_embeddings=72)


def test_with_fewer_tokens(source, tmp_path):
    with open_model(source) as checkpoint:
        assert apply(checkpoint, to_lines(checkpoint), tmp_path / "pruned").stock_support.is_stock
    assert config_of(tmp_path / "pruned")["vocab_size"] < 64
    same_logits(source, tmp_path / "pruned", LINES)


def test_what_runs_the_model_finds_its_parts(source, tmp_path):
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
        done(command, *arguments, "--text", text)


def test_norms_over_all_heads_keep_them(tmp_path):
    cutting.saved("olmo2", tmp_path)
    with open_model(tmp_path) as checkpoint, pytest.raises(UnsupportedModelError, match="a norm over all"):
        plan_heads(checkpoint, HeadOptions(metric="random", uniform=True))
