"""What layers do to hidden states and to the loss, against sentences that are run one by one."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import PruneError
from prunecli.methods.layers.score import layer_scores
from prunecli.model.checkpoint import open_model
from prunecli.modules.pooling import read_pooling
from prunecli.running.batches import task_batches
from prunecli.running.examples import IGNORED, Batch
from prunecli.running.runner import InMemory
from prunecli.text.tokens import load_tokenizer
from tests.contracts.test_layers_method import stacks_of
from tests.methods.heads.test_score import TEXTS, VectorSubject
from tests.methods.test_measuring import lines, opened
from tests.methods.test_measuring_activations import batch_of, run_singly
from tests.opening import load
from tests.reference import similarity as reference
from tests.reference.masks import passed_by

CASES = ("m2m_100", "nllb-moe", "t5", "bert", "opt", "gpt2", "gemma2")


def states_by_hand(model: Any, case: str) -> dict[str, list[list[Any]]]:
    """Side -> x_0 to x_L, each `[tokens][width]`, one sentence at a time."""
    found = {}

    def keep(rows: list[Any], value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        rows += value.reshape(-1, value.shape[-1]).double().tolist()

    for stack in stacks_of(case):
        side = "encoder" if "encoder" in stack or case == "bert" else "decoder"
        layers = list(model.get_submodule(stack))
        *before, after = found[side] = [[] for _ in range(len(layers) + 1)]
        for layer, own in zip(layers, before, strict=True):
            layer.register_forward_pre_hook(
                lambda _, arguments, options, own=own: keep(own, arguments or options["hidden_states"]),
                with_kwargs=True,
            )
        layers[-1].register_forward_hook(lambda _, __, output, own=after: keep(own, output))
    run_singly(model)
    return found


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_states(models, case):
    source = models[case]
    model, states = load(source), states_by_hand(load(source), case)
    both = model.config.is_encoder_decoder
    batches = [batch_of((0, 1), both), batch_of((2,), both)]
    opened = open_model(source)
    cosine = layer_scores(opened, InMemory(model), batches, "cosine")
    cka = layer_scores(opened, InMemory(model), batches, "cka")
    assert set(cosine.ids) == set(cka.ids) == {f"{side}.layers" for side in states}
    for side, own in states.items():
        name = f"{side}.layers"
        ends = list(pairwise(own))
        expected = [reference.block_influence(*pair) for pair in ends]
        np.testing.assert_allclose(cosine.importance()[name], expected, atol=2e-6)
        apart = [1 - reference.gram_cka(*pair) for pair in ends]
        np.testing.assert_allclose(cka.importance()[name], apart, atol=2e-6)
        distances = [[reference.angular_distance(x, y) for y in own] for x in own]
        found = np.array(cosine.distances[name]) / cosine.counts[name]
        np.testing.assert_allclose(found, distances, atol=5e-4)  # arccos near 1
    assert not cka.distances


@pytest.mark.parametrize("case", ["t5", "gpt2", "openai-gpt"])  # the last one's layers return lists
def test_the_loss_without_a_layer_is_that_of_the_model_that_passes_it_by(case):
    _, checkpoint, model = opened(case)
    both = model.config.is_encoder_decoder
    batches = [labelled(batch, both) for batch in (batch_of((0, 1), both), batch_of((2,), both))]
    found = layer_scores(checkpoint, InMemory(model), batches, "perplexity").importance()
    whole = loss_of(model, batches)
    for layer, own in zip(checkpoint.layout.layers, np.concatenate([*found.values()]), strict=True):
        with passed_by(model, [layer.name]):
            assert own == pytest.approx(loss_of(model, batches) - whole, abs=1e-5)


def test_the_vector_without_a_layer_is_that_of_the_model_that_passes_it_by():
    subject = VectorSubject(Path())
    pooling, runner = read_pooling(subject.path), InMemory(load(subject.path))
    batches = task_batches(load_tokenizer(subject.path), runner.model, lines(TEXTS, "embedding"), 20, pooling)
    found = layer_scores(open_model(subject.path), runner, batches, "embedding", pooling)
    (own,) = found.importance().values()
    for number, score in enumerate(own):
        with passed_by(subject.model, [f"encoder.layer.{number}"]):
            assert score == pytest.approx(1 - subject.cosine(), abs=1e-6)
        assert score > 0


def labelled(batch: Batch, both: bool) -> Batch:
    """Labels of the next tokens; padding is not counted."""
    name, mask = ("decoder_input_ids", "decoder_attention_mask") if both else ("input_ids", "attention_mask")
    ids = torch.where(batch.inputs[mask].bool(), batch.inputs[name], IGNORED)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    return Batch(batch.inputs, labels, batch.indices)


def loss_of(model: Any, batches: list[Batch]) -> float:
    """Mean over all counted tokens, one by one."""
    losses = []
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch.inputs).logits.double()
        for row, column in torch.nonzero(batch.labels != IGNORED).tolist():
            losses.append(-float(logits[row, column].log_softmax(0)[batch.labels[row, column]]))
    return sum(losses) / len(losses)


def test_states_that_are_not_finite_are_refused(models):
    source = models["gpt2"]
    model = load(source)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.fill_(float("nan"))
    with pytest.raises(PruneError, match="not finite"):
        layer_scores(open_model(source), InMemory(model), [batch_of((0,), False)], "cosine")
