"""One score for all axes, against masks that are tensors in the graph."""

import copy
from collections import defaultdict
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
from prunecli.model.axes import Kind, axis_name
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
from tests.families.records import CASES, FAMILIES, own_layouts
from tests.opening import load
from tests.reference.masks import expert_mask_squares, mask_gradients
from tests.tiny import change_config, tiny_nllb_moe, write_plain_tokenizer

LINES = ("the hen then", "ten tins on it", "a hen")
PAIR = ("eng_Latn", "fra_Latn")
CPU = choose_devices("cpu")


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
    sides = dict(zip(PAIR, (texts, texts[:1] * len(texts)), strict=True))
    return Dataset("translation", ParallelText("val", sides), (PAIR,))


def score_units(checkpoint: Any, runner: Any, data: Dataset, kinds: Any, *more: Any) -> dict[Kind, Scores]:
    axes = {kind: axes_of(checkpoint, kind) for kind in kinds}
    return gradient_scores(checkpoint, runner, data, axes, *more)


def batches_of(path: Path, model: Any, data: Dataset) -> list[Batch]:
    """A batch for each example."""
    return task_batches(load_tokenizer(path), model, data, 1)


def loss_of(batch: Batch, run: Callable[..., Any]) -> torch.Tensor:
    return functional.cross_entropy(run(**batch.inputs).logits[0], batch.labels[0])


@pytest.mark.parametrize("per", ["example", "token"])
@pytest.mark.parametrize("case", [*own_layouts(FAMILIES), "gemma2", "gpt_neox", "qwen3_moe"])
def test_scores_are_the_gradients_of_masks(case, per):
    """Absolute values of examples or of their positions; squares of the latter for a language model's hidden units."""
    path, checkpoint, model = opened(case)
    task = CASES[case].task if case in CASES else "lm"
    is_pair, is_lm, layout = task == "translation", task == "lm", checkpoint.layout
    data = pairs() if is_pair else lines(task=task)
    mixing = {axis_name(layer.name, "head"): layer.output for layer in layout.attentions}
    mixing |= {axis_name(layer.name, "unit"): layer.output for layer in layout.ffns if not layer.is_sparse}
    axes = {
        kind: [axis for axis in axes_of(checkpoint, kind) if axis.name in mixing] for kind in ("head", "unit")
    }
    mixed, stacks, experts = [*axes["head"], *axes["unit"]], {}, {}
    if per == "example":
        axes["layer"] = axes_of(checkpoint, "layer")
        for layer in layout.layers:
            stacks.setdefault(f"{layer.side}.layers", []).append(layer.name)
        axes["expert"] = axes_of(checkpoint, "expert") if "moe" in case else []
        # The reference leaves out the bias of NLLB-MoE's experts.
        experts = {axis.name: f"{axis.name}.down_proj" for axis in axes["expert"] if not is_pair}
    axes = {kind: own for kind, own in axes.items() if own}
    scores = gradient_scores(checkpoint, InMemory(model), data, axes, 1 if axes.get("expert") else 40, per)
    assert {*scores} == {*axes}
    total, count = defaultdict(float), defaultdict(int)
    for batch in batches_of(path, model, data):
        inputs = {}
        for axis in mixed:
            side = "attention_mask" if axis.side == "encoder" else "decoder_attention_mask"
            positions = batch.inputs.get(side, batch.inputs["attention_mask"]).shape[1]
            by_token = per == "token" or (is_lm and axis.kind == "unit")
            inputs[axis.name] = mixing[axis.name], (positions if by_token else 1, axis.count)
        for name, own in mask_gradients(model, partial(loss_of, batch), inputs, stacks, experts).items():
            values = own.square() if is_lm and name.endswith(".units") else own.abs()
            rows = values.reshape(-1, own.shape[-1])
            total[name] += rows.sum(dim=0).numpy()
            count[name] += len(rows)
    for found in scores.values():
        for name, own in found.means().items():
            assert np.any(own), name
            if is_pair and name.endswith(".experts"):
                continue
            np.testing.assert_allclose(own, total[name] / count[name], rtol=2e-3, atol=1e-7, err_msg=name)


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
        *((case, EVERY, "example") for case in ("llama", "gpt2", "gpt_neox", "qwen3_moe", "nllb-moe")),
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
