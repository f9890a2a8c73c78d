"""One score for all axes, against masks that are tensors in the graph."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from prunecli.errors import UnsupportedModelError
from prunecli.methods.measuring import gradient_scores, gradient_sums
from prunecli.model.axes import Kind
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.probe import outputs
from prunecli.modules import stock_experts
from prunecli.modules.devices import choose_devices
from prunecli.modules.stock_names import StockNames
from prunecli.results.unit_scores import Scores
from prunecli.running.batches import example_losses, task_batches
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import make_runner
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from tests.families import cutting, tiny_family
from tests.families.records import CASES
from tests.opening import load
from tests.reference.masks import expert_mask_squares, mask_gradients
from tests.tiny import change_config, tiny_nllb_moe, write_plain_tokenizer

LINES = ("the hen then", "ten tins on it", "a hen")
PAIR = ("eng_Latn", "fra_Latn")
CPU = choose_devices("cpu")
OUTPUTS = {
    "llama": {"head": ".o_proj", "unit": ".down_proj"},
    "gpt2": {"head": ".c_proj", "unit": ".c_proj"},
    "gpt_neox": {"head": ".dense", "unit": ".dense_4h_to_h"},
    "qwen3_moe": {"head": ".o_proj"},
    "nllb-moe": {"head": ".out_proj", "unit": ".fc2"},
}
"""Model type -> kind -> name of the module that mixes the units, below that of their owner."""


def made(case: str) -> Path:
    folder = Path("model")
    if case == "nllb-moe":
        return tiny_nllb_moe(folder)
    if case in CASES:
        return tiny_family(folder, case)
    cutting.saved(case, folder)
    write_plain_tokenizer(folder)
    if case == "switch_transformers":
        change_config(folder, decoder_start_token_id=0)
    return folder


def opened(case: str) -> tuple[Path, Checkpoint, Any]:
    path = made(case)
    return path, open_model(path), load(path)


def lines(texts: tuple[str, ...] = LINES, task: Any = "lm") -> Dataset:
    return Dataset(task, PlainText((Path("text"),), texts))


def pairs(texts: tuple[str, ...] = LINES) -> Dataset:
    return Dataset("translation", ParallelText("val", dict.fromkeys(PAIR, texts)), (PAIR,))


def score_units(checkpoint: Any, runner: Any, data: Dataset, kinds: Any, *more: Any) -> dict[Kind, Scores]:
    axes = {kind: axes_of(checkpoint, kind) for kind in kinds}
    return gradient_scores(checkpoint, runner, data, axes, *more)


def batches_of(path: Path, model: Any, data: Dataset) -> list[Batch]:
    """A batch for each example."""
    return task_batches(load_tokenizer(path), model, data, 1)


def loss_of(batch: Batch, run: Callable[..., Any]) -> torch.Tensor:
    return functional.cross_entropy(run(**batch.inputs).logits[0], batch.labels[0])


@pytest.mark.parametrize("case", OUTPUTS)
def test_scores_are_the_gradients_of_masks(case):
    path, checkpoint, model = opened(case)
    is_pair = case == "nllb-moe"
    kinds = ["head", "layer", *(["unit"] if "unit" in OUTPUTS[case] else [])]
    kinds += ["expert"] if "moe" in case else []
    data = pairs() if is_pair else lines()
    scores = score_units(checkpoint, InMemory(model), data, kinds)
    assert {*scores} == {*kinds}
    axes = {axis.name: axis for kind in kinds for axis in axes_of(checkpoint, kind)}
    mixed = {name: axis for name, axis in axes.items() if axis.kind in OUTPUTS[case]}
    by_token = {name for name, axis in mixed.items() if axis.kind == "unit" and not is_pair}
    stacks = {}
    for layer in checkpoint.layout.layers:
        stacks.setdefault(f"{layer.side}.layers", []).append(layer.name)
    down = ".fc2_weight" if is_pair else ".down_proj"
    mixtures = [(name, axis.module) for name, axis in axes.items() if axis.kind == "expert"]
    experts = {name: f"{module if is_pair else name}{down}" for name, module in mixtures}
    total, tokens = {}, 0
    for batch in batches_of(path, model, data):
        length = batch.inputs["input_ids"].shape[1]
        tokens += length
        inputs = {
            name: (
                f"{axis.module}{OUTPUTS[case][axis.kind]}",
                (length, len(axis.ids)) if name in by_token else (len(axis.ids),),
            )
            for name, axis in mixed.items()
        }
        for name, own in mask_gradients(model, partial(loss_of, batch), inputs, stacks, experts).items():
            values = own.square().sum(dim=0) if name in by_token else own.abs()
            total[name] = total.get(name, 0) + values.numpy()
    for kind in kinds:
        for name, own in scores[kind].means().items():
            if is_pair and kind == "expert":  # the reference leaves out the output's bias
                continue
            count = tokens if name in by_token else len(LINES)
            np.testing.assert_allclose(own, total[name] / count, rtol=2e-3, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("shared_out", [False, True])
def test_units_of_experts_are_scored_by_the_gradients_of_each_token(shared_out, monkeypatch):
    monkeypatch.setattr(stock_experts, "shares_out", lambda *_: shared_out)  # to threads, as large ones are
    path, checkpoint, model = opened("qwen3_moe")
    scores = score_units(checkpoint, InMemory(model), lines(), ["unit"])["unit"].means()
    plain, total, tokens = load(path), 0.0, 0
    plain.set_experts_implementation("eager")
    modules = [f"{layer.name}.experts" for layer in checkpoint.mixtures]
    for batch in batches_of(path, model, lines()):
        tokens += batch.inputs["input_ids"].shape[1]
        total = total + torch.stack(expert_mask_squares(plain, partial(loss_of, batch), modules)).numpy()
    for layer, own in zip(checkpoint.mixtures, total / tokens, strict=True):
        for expert, expected in enumerate(own):
            name = f"{layer.expert_prefix.format(expert=expert)}.units"
            np.testing.assert_allclose(scores[name], expected, rtol=2e-3, atol=1e-12, err_msg=name)


EVERY = ("head", "unit", "layer")


@pytest.mark.parametrize(
    ("case", "kinds", "per"),
    [
        *((case, EVERY, "example") for case in OUTPUTS),
        *((case, EVERY, "token") for case in ("nllb-moe", "t5", "bert", "gemma2")),
        ("qwen3_moe", ("unit",), "example"),
    ],
)
def test_layer_by_layer_scores_are_the_same(case, kinds, per):
    path = made(case)
    checkpoint, data = open_model(path), lines(task="mlm" if case == "bert" else "lm")
    if case in ("nllb-moe", "t5"):
        data = pairs()
    whole, by_layer = (make_runner(checkpoint, CPU, torch.float32, memory) for memory in (None, 2 << 30))
    batch_tokens = 1 if case == "qwen3_moe" else 40  # with units of experts, batches hold an example each
    wanted, found = (
        score_units(checkpoint, runner, data, kinds, batch_tokens, per) for runner in (whole, by_layer)
    )
    for kind in kinds:
        for name, own in wanted[kind].values.items():
            assert np.asarray(own).any() or ".experts." in name, name  # some experts get no token
            np.testing.assert_allclose(found[kind].values[name], own, rtol=1e-4, atol=1e-9, err_msg=name)
    assert by_layer.report.readings == 1
    assert by_layer.report.bytes_read < 2 * checkpoint.total_bytes
    assert all(parameter.grad is None for parameter in by_layer.model.parameters())


def slope(model: Any, batch: Batch, scale: Callable[[Any, float], None]) -> Any:
    """About |dL/dxi|: a difference of the loss, `scale` multiplying weights of a copy. Larger steps would move tokens
    to other experts."""
    losses = []
    for factor in (1.001, 0.999):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            scale(changed, factor)
            losses.append(float(example_losses(changed, batch)))
    return pytest.approx(abs(losses[0] - losses[1]) / 0.002, rel=0.05, abs=5e-4)


@pytest.mark.parametrize("case", ["deepseek_v2", "aria_text", "gpt_oss", "granitemoe", "falcon_mamba"])
def test_units_that_lie_otherwise_than_side_by_side_in_one_linear_layer(case):
    """Two shared experts side by side, a stack of experts, two readers: by differences of an example's loss."""
    path, checkpoint, model = opened(case)
    names, (batch,) = StockNames(checkpoint, model), batches_of(path, model, lines(LINES[:1]))
    every = axes_of(checkpoint, "unit")
    scores = gradient_sums(InMemory(model), checkpoint, every, [batch])
    axes = [axis for axis in every if names.stacked(outputs(axis.carriers)[0]) is None]
    for axis in axes[:2]:
        for unit in np.argsort(scores[axis.name])[-2:]:

            def scale(changed, factor, axis=axis, unit=unit):
                for tensor in outputs(axis.carriers):
                    weight, carrier = changed.get_parameter(names.place(tensor)), axis.carriers[tensor]
                    for start, stop in carrier.ranges([unit], weight.shape[carrier.dim], len(axis.ids)):
                        weight.narrow(carrier.dim, start, stop - start).mul_(factor)

            assert scores[axis.name][unit] == slope(model, batch, scale)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_channels_are_scored_by_what_norms_hand_on(case):
    path, checkpoint, model = opened(case)
    alone = score_units(checkpoint, InMemory(model), lines(), ["channel"])["channel"]
    beside = score_units(checkpoint, InMemory(model), lines(), ["channel", "layer"])["channel"]
    outputs = []
    for name, module in model.named_modules():
        if name.endswith(("layernorm", "model.norm")):
            module.register_forward_hook(lambda _, __, found: outputs.append(found[0]))
    for batch in batches_of(path, model, lines()):
        with torch.no_grad():
            model(**batch.inputs)
    expected = sum(row.abs() for rows in outputs for row in rows) / len(LINES)
    for scores in (alone, beside):
        assert scores.method == "norm-output"
        np.testing.assert_allclose(scores.means()["channels"], expected, rtol=1e-4)


@pytest.mark.parametrize("case", ["dbrx", "jetmoe", "llama4_text", "switch_transformers"])
def test_experts_of_classes_with_modules_of_their_own(case):
    """By differences of the loss: an expert's part is linear in its output weights."""
    path, checkpoint, model = opened(case)
    data = (pairs if case == "switch_transformers" else lines)(LINES[:1])
    scores = score_units(checkpoint, InMemory(model), data, ("expert",))["expert"].values
    names, (batch,) = StockNames(checkpoint, model), batches_of(path, model, data)
    for layer in checkpoint.mixtures:
        own = scores[f"{layer.name}.experts"]
        expert = int(np.argmax(own))
        assert own[expert], layer.name  # the decoder may have more layers than the encoder

        def scale(changed, factor, layer=layer, expert=expert):
            if not layer.stacked_tensors:
                weight = changed.get_parameter(f"{layer.name}.experts.expert_{expert}.wo.weight")
                weight.mul_(factor)
            for tensor in layer.stacked_tensors:
                if tensor.rpartition("experts")[2] in (".mlp.w2", ".down_proj") or "output_linear" in tensor:
                    weight = changed.get_parameter(names.place(tensor))
                    weight.view(layer.num_experts, -1)[expert].mul_(factor)

        assert own[expert] == slope(model, batch, scale)


def test_units_that_no_gradient_reaches_are_refused():
    """Reformer's layers compute their gradients themselves."""
    _, checkpoint, model = opened("reformer")
    with pytest.raises(UnsupportedModelError, match="heads cannot be scored: no gradient reaches them"):
        score_units(checkpoint, InMemory(model), lines(LINES[:1]), ["head"])
