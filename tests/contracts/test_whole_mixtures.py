"""Mixtures, all of whose parts are found: tokens go, and what runs the model finds its parts."""

from pathlib import Path

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
def source():
    # Tokens are told from positions by their number.
    return save_mixture("source", "qwen3_moe", max_position_embeddings=72)


def test_with_fewer_tokens(source):
    checkpoint = open_model(source)
    assert apply(checkpoint, to_lines(checkpoint), "pruned").stock_support.is_stock
    assert config_of("pruned")["vocab_size"] < 64
    same_logits(source, Path("pruned"), LINES)


def test_what_runs_the_model_finds_its_parts(source):
    Path("text.txt").write_text("\n".join([f"{line} {more}" for line in LINES for more in LINES] * 3))
    for command, line in (
        (prune_layers, "--metric cosine --count 1 -o shallow"),
        (prune_layers, "--metric perplexity --count 1 --dry-run"),
        (score_heads, "--metric gradient -o gradient.json"),
        (score_heads, "--metric ablation -o ablation.json"),
        (compare_models, "shallow -o similarity.json"),
    ):
        done(command, source, line, "--text text.txt")


def test_norms_over_all_heads_keep_them():
    cutting.saved("olmo2", "model")
    with pytest.raises(UnsupportedModelError, match="a norm over all"):
        plan_heads(open_model("model"), HeadOptions(metric="random", uniform=True))
