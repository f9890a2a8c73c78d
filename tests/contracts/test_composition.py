"""Reductions one after another, in several orders."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.options import ExpertOptions, HeadOptions, LayerOptions, NarrowOptions
from prunecli.methods.sharing.options import AttentionOptions, FfnOptions
from prunecli.model.checkpoint import open_model
from prunecli.model.inventory import take_inventory
from tests.contracts.method_contract import Decide, logits_of, written
from tests.contracts.test_vocabulary_method import to_lines
from tests.factorised import options as embedding_options
from tests.families.records import CASES
from tests.ffn_layouts import tiny
from tests.opening import headed_class, load
from tests.training import runs
from tests.training.runs import language_model, options, train, translation

ORDERS = (
    ("experts", "heads", "ffns", "embeddings", "vocabulary"),
    ("vocabulary", "embeddings", "ffns", "heads", "experts"),
    ("attention", "heads", "layers", "embeddings", "cache", "experts", "vocabulary", "widths", "ffns"),
)
TRAINED = (
    "vocabulary",
    "widths",
    "ffns",
    "attention",
    "finetune",
    "layers",
    "embeddings",
    "experts",
    "heads",
)
COMMANDS = {
    "experts": "prune-experts",
    "heads": "prune-heads",
    "ffns": "share-ffn",
    "attention": "share-attention",
    "widths": "prune-ffn",
    "layers": "prune-layers",
    "embeddings": "factorize-embeddings",
    "cache": "factorize-embeddings",
    "vocabulary": "trim-vocabulary",
    "finetune": "finetune",
}
LINES = ("the hen and the tin hat", "no hen on the tin", "then ten on")


def side_of(case: str) -> str:
    """Side of the stack whose FFNs are shared."""
    return "decoder" if CASES[case].task == "lm" else "encoder"


EXPERTS, HEADS = ExpertOptions(metric="random", ratio=0.4), HeadOptions(metric="random", ratio=0.3)


def finetuned(case: str, source: Path, output: Path) -> Path:
    """Trained for two updates, and written as the command does."""
    state = output.with_name(f"{output.name}-state")
    data = language_model() if CASES[case].task == "lm" else translation()
    made = train(source, state, options(steps=2, learning_rate=1e-2), data)
    return runs.written(source, made, output)


def steps(case: str) -> dict[str, Decide]:
    """Step -> a fixed choice."""
    side = side_of(case)
    return {
        "experts": EXPERTS,
        "heads": HEADS,
        "ffns": FfnOptions(**{side: "share"}, dense_only=True),
        "widths": NarrowOptions(ratio=0.3, metric="norms", dense_only=True),
        "layers": LayerOptions(remove=f"{side}:1"),
        "attention": AttentionOptions(**{side: "share"}),
        "embeddings": embedding_options(),
        "cache": EmbeddingOptions(cache=True),
        "vocabulary": partial(to_lines, lines=LINES),
    }


def check(path: Path, order: tuple[str, ...]) -> None:
    """Check that a result reloads strictly, opens in both ways, generates, is inspected, and has its history."""
    opened = open_model(path)
    opened.check()
    assert [step["command"] for step in opened.structure.history] == [COMMANDS[step] for step in order]
    inventory = take_inventory(opened)
    assert inventory.total.parameters == opened.total_parameters
    if "layers" not in order[order.index("heads") + 1 :]:  # which may take the layers that lost heads
        assert any(layer.count < layer.original_heads for layer in inventory.attentions)
    assert any(layer.is_shared for layer in inventory.ffns)
    auto = headed_class(opened.config)
    model = load(path)
    theirs = getattr(transformers, auto).from_pretrained(path, trust_remote_code=True, dtype=torch.float32)
    assert torch.equal(logits_of(theirs), logits_of(model))
    assert torch.isfinite(logits_of(model)).all()
    if model.can_generate():
        found = [one.generate(torch.tensor([[5, 6, 7, 2]]), max_new_tokens=3) for one in (model, theirs)]
        assert torch.equal(*found)


def composed(case: str, order: tuple[str, ...], folder: str) -> Path:
    """The checkpoint after these steps, without those that the family has no use for; it is checked."""
    path, known = tiny(f"{folder}/source", case), steps(case)
    wanted = order if case == "nllb-moe" else tuple(step for step in order if step != "experts")
    for number, step in enumerate(wanted):
        output = Path(f"{folder}/{number}-{step}")
        path = finetuned(case, path, output) if step == "finetune" else written(path, known[step], output)
    check(path, wanted)
    return path


def again(case: str, path: Path) -> Path:
    chain = [
        embedding_options(side="input", map_dim=2),
        HEADS,
        FfnOptions(**{side_of(case): "drop"}, dense_only=True),
        partial(to_lines, lines=LINES[:1]),
        *([EXPERTS] if case == "nllb-moe" else []),
    ]
    for number, step in enumerate(chain):
        path = written(path, step, f"again-{number}")
    return path


@pytest.mark.parametrize("case", ["nllb-moe", "t5", "bert", "phi3", "gemma2"])
def test_reductions_compose(case):
    last = composed(case, ORDERS[2], "made")
    further = again(case, last)
    assert torch.isfinite(logits_of(load(further))).all()
    before = open_model(last)
    after = open_model(further)
    added = 5 if case == "nllb-moe" else 4
    assert after.structure.history[:-added] == before.structure.history
    assert after.total_parameters != before.total_parameters


@pytest.mark.parametrize("case", ["nllb-moe", "qwen2"])
def test_reductions_and_training_compose(case):
    composed(case, TRAINED, "made")


@pytest.mark.parametrize("case", ["nllb-moe", "t5"])
def test_the_order_changes_only_the_tables_of_tokens(case):
    """They are fitted to the rows that there are."""
    held = []
    for number, order in enumerate(ORDERS[:2]):
        opened = open_model(composed(case, order, str(number)))
        tables = opened.layout.require_tables()
        fitted = (f"{tables.input}.", f"{tables.output}.")
        held.append(
            {name: opened.read(name).tobytes() for name in opened.tensors if not name.startswith(fitted)}
        )
        held.append((replace(opened.structure, history=()), opened.model_type))
    assert held[:2] == held[2:]
