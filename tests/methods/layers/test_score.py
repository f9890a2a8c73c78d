"""What layers do to hidden states and to the loss, against sentences that are run one by one."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from prunecli.errors import PruneError
from prunecli.methods.layers.score import layer_scores
from prunecli.methods.plans import LayerOptions
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import open_model
from prunecli.modules.pooling import read_pooling
from prunecli.running.examples import IGNORED, Batch
from prunecli.running.runner import InMemory
from tests.contracts.method_contract import written
from tests.contracts.test_layers_method import stacks_of
from tests.families import cutting
from tests.methods.test_measuring_activations import SENTENCES, batch_of, run_singly
from tests.opening import load
from tests.reference import similarity as reference
from tests.sentence_model import sentence_model

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


@pytest.mark.parametrize("case", ["t5", "gpt2"])
def test_the_loss_without_a_layer_is_that_of_the_model_without_it(models, case):
    source = models[case]
    model = load(source)
    both = model.config.is_encoder_decoder
    batches = [labelled(batch, both) for batch in (batch_of((0, 1), both), batch_of((2,), both))]
    opened = open_model(source)
    found = layer_scores(opened, InMemory(model), batches, "perplexity").importance()
    found = {module_of(name): own for name, own in found.items()}
    depths = {side: len(own) for side, own in found.items()}
    assert depths == {stack.side: opened.layout.sizes.depth(stack) for stack in opened.layout.family.stacks}
    whole = loss_of(model, batches)
    for side, own in found.items():
        for number in (0, depths[side] - 1):
            out = written(source, LayerOptions(remove=f"{side}:{number}"), f"{side}-{number}")
            assert own[number] == pytest.approx(loss_of(load(out), batches) - whole, abs=1e-5)


def test_layers_that_return_lists_are_passed_by():
    model = cutting.saved("openai-gpt", "model")
    batches = [labelled(batch_of((0, 1), False), False)]
    (own,) = layer_scores(open_model("model"), InMemory(model), batches, "perplexity").importance().values()
    whole = loss_of(model, batches)
    del model.transformer.h[0]
    assert own[0] == pytest.approx(loss_of(model, batches) - whole, abs=1e-5)


def test_the_vector_without_a_layer_is_that_of_the_model_without_it():
    source = sentence_model("source")
    pooling, batches = read_pooling(source), [batch_of((0, 1), False), batch_of((2,), False)]

    def vectors_of(model):
        """Mean pooling, the dense layer and its tanh, one text at a time."""
        weights = load_file(source / "2_Dense" / "model.safetensors")
        found = []
        for number in range(len(SENTENCES)):
            with torch.no_grad():
                states = model(**batch_of((number,), False).inputs).last_hidden_state[0]
            mean = states.mean(dim=0) @ weights["linear.weight"].T + weights["linear.bias"]
            found.append(torch.tanh(mean).double().tolist())
        return found

    model = load(source)
    (own,) = (
        layer_scores(open_model(source), InMemory(model), batches, "embedding", pooling).importance().values()
    )
    whole = vectors_of(model)
    for number, score in enumerate(own):
        out = written(source, LayerOptions(remove=str(number)), f"without-{number}")
        expected = reference.block_influence(vectors_of(load(out)), whole)
        assert score == pytest.approx(expected, abs=1e-6)
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
