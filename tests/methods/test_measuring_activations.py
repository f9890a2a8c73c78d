"""Mean activations of hidden units against sentences that are run one by one, by hand."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import PruneError, UnsupportedModelError
from prunecli.methods.measuring import UnitObserver
from prunecli.methods.sharing.options import FfnOptions
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.devices import choose_devices
from prunecli.running.batches import observe_batches
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import make_runner
from prunecli.running.runner import InMemory
from tests.contracts.method_contract import written
from tests.families import cutting
from tests.ffn_layouts import LAYOUTS, tiny, weights, write_copy
from tests.opening import load

SENTENCES = ([5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 9])
TARGETS = ([2, 7, 8], [2, 9, 10, 11, 12], [2, 5])

CASES = ("m2m_100", "nllb-moe", "opt", "bart", "bert", "t5-gated", "gpt2", "llama", "phi3")


def padded(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[1] * (longest - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def batch_of(rows: tuple[int, ...], both: bool) -> Batch:
    ids, mask = padded([SENTENCES[row] for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if both:
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = padded([TARGETS[row] for row in rows])
    return Batch(inputs, ids, rows)


def run_singly(model: Any) -> None:
    """Run the model on one sentence at a time."""
    for row in range(len(SENTENCES)):
        with torch.no_grad():
            model(**batch_of((row,), model.config.is_encoder_decoder).inputs)


def measured(runner: Any, opened: Checkpoint, batches: list[Batch]) -> tuple[dict[str, Any], dict[str, int]]:
    """FFN's name -> root mean squares of its units, tokens."""
    observer = UnitObserver(opened.layout.ffns)
    observe_batches(runner, observer, batches, "activations")
    found = observer.take()
    counts = {module_of(name): count for name, count in found["counts"].items()}
    values = {module_of(name): np.array(own) for name, own in found["values"].items()}
    return {name: np.sqrt(own / counts[name]) for name, own in values.items()}, counts


def by_hand(model: Any, case: str) -> dict[str, np.ndarray]:
    """One sentence at a time: what goes into the output layer of each FFN."""
    found = defaultdict(list)
    for name in LAYOUTS[case].names:
        model.get_submodule(f"{name}.{LAYOUTS[case].output}").register_forward_pre_hook(
            lambda _, inputs, own=found[name]: own.append(inputs[0].reshape(-1, inputs[0].shape[-1]))
        )
    run_singly(model)
    return {name: torch.cat(own).double().square().mean(dim=0).sqrt().numpy() for name, own in found.items()}


@pytest.mark.parametrize("model_type", ["fsmt", "xlnet", "longformer"])
def test_padding_does_not_count_where_a_class_turns_or_extends_it(model_type):
    model = cutting.saved(model_type, "model")
    both = model.config.is_encoder_decoder
    opened = open_model("model")
    together, tokens = measured(InMemory(model), opened, [batch_of((0, 1, 2), both)])
    alone, same = measured(InMemory(model), opened, [batch_of((row,), both) for row in range(3)])
    assert tokens == same
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=0)


def test_ffns_beside_experts_run_once_layer_by_layer():
    cutting.saved("gemma4_text", "model")
    opened = open_model("model")
    given = (opened, choose_devices("cpu"), torch.float32)
    runners = [make_runner(*given, memory) for memory in (None, 8 << 30)]
    (_, tokens), (_, same) = (measured(runner, opened, [batch_of((0, 1), False)]) for runner in runners)
    assert tokens == same


def test_positions_that_are_no_tokens_are_refused():
    model = cutting.saved("cpmant", "model")
    said = r"runs \[2, 38\] positions for texts of \[2, 6\] tokens"
    with pytest.raises(UnsupportedModelError, match=said):
        measured(InMemory(model), open_model("model"), [batch_of((0, 1), False)])


@pytest.mark.parametrize("case", CASES)
def test_real_tokens_alone_count(case):
    directory = tiny("model", case)
    runner = InMemory(load(directory))
    both = runner.model.config.is_encoder_decoder
    batches = [batch_of((0, 1), both), batch_of((2,), both)]
    opened = open_model(directory)
    found, tokens = measured(runner, opened, batches)
    by_layer = make_runner(opened, choose_devices("cpu"), torch.float32, memory=8 << 30)
    streamed = measured(by_layer, opened, batches)
    expected = by_hand(load(directory), case)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(streamed, (found, tokens), rtol=0, atol=0)


def test_one_ffn_for_encoder_and_decoder_is_measured_in_both():
    """Over the tokens of all layers, which are each of one side."""
    source = tiny("source", "m2m_100")
    shared = written(source, FfnOptions(preset="SharedEncDec", init="first"), "shared")
    model = load(shared)
    sums = []
    model.get_submodule("model.encoder.layers.0.fc2").register_forward_pre_hook(
        lambda _module, inputs: sums.append(inputs[0].square().double().sum(dim=(0, 1)))
    )
    run_singly(model)
    tokens = 3 * sum(map(len, SENTENCES)) + 2 * sum(map(len, TARGETS))
    found, counts = measured(InMemory(load(shared)), open_model(shared), [batch_of((0, 1, 2), both=True)])
    assert counts == {"model.encoder.layers.0": tokens}
    np.testing.assert_allclose(found["model.encoder.layers.0"], np.sqrt(sum(sums) / tokens), rtol=1e-4)


def test_activations_that_are_no_numbers():
    source = tiny("source", "llama")
    held = weights(source)
    held["model.layers.1.mlp.up_proj.weight"][0] = np.nan
    broken = write_copy(source, "broken", held)
    said = r"model\.layers\.\d\.mlp: the activation of a hidden unit is not finite"
    with pytest.raises(PruneError, match=said):
        measured(InMemory(load(broken)), open_model(broken), [batch_of((0, 1), both=False)])
