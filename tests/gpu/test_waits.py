"""How often the host waits for a GPU, at most: after each wait the device idles until its next kernel is started."""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from prunecli.methods.experts.batches import CollectOptions, GateObserver, Translation
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules.grouped import has_grouped_kernel
from prunecli.modules.loading import load_model
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.running.layerwise.forward import LayerwiseRun
from prunecli.running.layerwise.runner import Layerwise
from prunecli.text.tokens import load_tokenizer
from tests.gpu.conftest import REAL, TOKENS
from tests.gpu.pretend import Pretend
from tests.methods.experts.test_collect import PAIRS, TEXT
from tests.opening import load
from tests.reference.routing import sparse_ffn as reference
from tests.tiny import tiny_nllb_moe

SPARSE_CALL = 1
"""Of one sparse FFN with many tokens; none where one kernel multiplies all experts, and none while decoding. Real rows
are found once for all of them."""

STEP = 2
"""Of a decoding step: transformers' own, in its beam search. Our sparse FFNs have none."""


def ours(waits: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{what} {where}: {times}" for (what, where), times in waits.items())


@pytest.mark.parametrize("padded", [False, True])
def test_of_a_sparse_ffn(gpu, padded):
    torch.manual_seed(0)
    module = SparseFFN(32, 64, 8).to(torch.bfloat16).eval()
    states = torch.randn(2, 20, 32).to(torch.bfloat16)
    real = torch.tensor([[1] * 20, [1] * 14 + [0] * 6]).bool()
    mask = real[:, None, None, :].expand(2, 1, 20, 20) if padded else None
    with torch.no_grad():
        want = module(states, mask)
        with gpu:
            module, states = module.to(gpu.device), states.to(gpu.device)
            mask = None if mask is None else mask.to(gpu.device)
            module(states, mask)  # what is only done once
            gpu.reset()
            made = module(states, mask)
            waits = Counter(gpu.waits)
            assert not gpu.uploads, ours(gpu.uploads)
            made, like = made.cpu(), (states.view(-1, 32), module.fc1_weight)
    assert sum(waits.values()) == SPARSE_CALL * (not has_grouped_kernel(*like)), ours(waits)
    torch.testing.assert_close(made, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("sequences", "experts"), [(5, 40), (17, 8)])
def test_of_few_tokens(gpu, sequences, experts):
    """There are no waits: nothing is sent, and a CUDA graph can hold the step."""
    torch.manual_seed(0)
    module = SparseFFN(64, 48, experts, token_dropout=0.2).to(torch.bfloat16).eval()
    states = torch.randn(sequences, 1, 64).to(torch.bfloat16)
    parts = (module.fc1_weight, module.fc1_bias, module.fc2_weight, module.fc2_bias)
    want = reference(states.view(-1, 64), module.router.classifier.weight, parts, 0.2)
    with torch.no_grad(), gpu:
        module, states = module.to(gpu.device), states.to(gpu.device)
        module(states)
        gpu.reset()
        made = module(states)
        assert not gpu.waits, ours(gpu.waits)
        assert not gpu.uploads, ours(gpu.uploads)
        made = made.cpu()
    torch.testing.assert_close(made.view(-1, 64), want, rtol=2e-2, atol=2e-2, check_dtype=False)


@pytest.mark.parametrize("is_inference", [False, True])
def test_of_finding_the_real_rows(gpu, is_inference):
    """Once for all layers that are given one mask; anew for another, and where it has changed."""
    module, states = SparseFFN(32, 64, 8).eval(), torch.randn(2, 6, 32)
    seen = []
    module.observer = lambda _gates, experts: seen.append(len(experts))
    with gpu, torch.inference_mode(is_inference), torch.no_grad():
        module, states = module.to(gpu.device), states.to(gpu.device)
        mask = torch.zeros(2, 1, 6, 6, device=gpu.device)
        mask[1, ..., 4:] = torch.finfo(torch.float32).min
        module(states, mask)
        gpu.reset()
        module(states, mask)
        assert sum(gpu.waits.values()) <= SPARSE_CALL, ours(gpu.waits)
        other = mask.clone()
        other[0, ..., 5:] = torch.finfo(torch.float32).min
        module(states, other)
        assert seen == [10, 10, 9]
        if not is_inference:
            mask.zero_()
            module(states, mask)
            assert seen[-1] == 12


def test_of_a_decoding_step(gpu):
    path = tiny_nllb_moe("moe")
    search = {"num_beams": 2, "max_new_tokens": 6, "min_new_tokens": 6, "forced_bos_token_id": 7}
    want = load(path).generate(input_ids=TOKENS, attention_mask=REAL, **search)
    steps = []
    with gpu:
        model = load_model(path, device=gpu.device, dtype="float32")
        there = {"input_ids": TOKENS.to(gpu.device), "attention_mask": REAL.to(gpu.device)}

        def note(*_):
            steps.append(Counter(gpu.waits))
            gpu.reset()

        model.model.decoder.register_forward_pre_hook(note)
        found = model.generate(**there, **search).cpu()
    assert torch.equal(found, want) or not isinstance(gpu, Pretend)
    assert len(steps) == 6
    for waits in steps[2:]:  # the first have the encoder's and the prompt's
        assert 0 < sum(waits.values()) <= STEP, ours(waits)


def test_of_taking_gate_statistics(gpu):
    """All layers' sums come to the host at once, and are those of a run on a CPU."""
    path, taken = tiny_nllb_moe("moe"), []
    observer = GateObserver(open_model(path).mixtures)
    for where in (gpu, None):
        with nullcontext() if where is None else where, torch.inference_mode():
            device = torch.device("cpu") if where is None else gpu.device
            model = load_model(path, device=device, dtype="float32")
            there, mask = TOKENS.to(device), REAL.to(device)
            with observer.watching(model):
                model(
                    input_ids=there, attention_mask=mask, decoder_input_ids=there, decoder_attention_mask=mask
                )
                gpu.reset()
                taken.append(observer.take())
                assert sum(gpu.waits.values()) <= 1, ours(gpu.waits)
    on_gpu, on_cpu = taken
    assert len(on_gpu) == 4
    for index, sums in on_gpu.items():
        assert sums.tokens[0] == 8
        for name in ("top1", "top2", "gate_sum", "conf1_sum", "conf2_sum"):
            np.testing.assert_allclose(getattr(sums, name), getattr(on_cpu[index], name), rtol=1e-4)


@pytest.mark.parametrize("gpu", ["real", "V100"], indirect=True)  # in float32 all do the same
def test_of_experts_layer_by_layer(gpu, monkeypatch):
    """Rows go to the device and outputs come from it, once for each expert and batch; nothing else."""

    def counted(counter):
        reading = ("reading.py", "filling.py")  # by a thread of its own, meanwhile
        return sum(times for (_, where), times in [*counter.items()] if not where.startswith(reading))

    path = tiny_nllb_moe("moe")
    pairs, stock = Counter[str](), LayerwiseRun.run_experts

    def run(self, mixture, wanted, routed):
        waits, uploads = counted(gpu.waits), counted(gpu.uploads)
        stock(self, mixture, wanted, routed)
        pairs["all"] += sum(expert in one.spans for expert in wanted for one in routed)
        pairs["waits"] += counted(gpu.waits) - waits
        pairs["uploads"] += counted(gpu.uploads) - uploads

    monkeypatch.setattr(LayerwiseRun, "run_experts", run)
    options, found = CollectOptions(mode="forced", batch_tokens=40), []
    for device in (gpu.device, torch.device("cpu")):
        with gpu if device == gpu.device else nullcontext(), open_model(path) as checkpoint:
            layers = Layerwise(checkpoint, device, torch.float32, 4 << 30)
            found.append(score(layers, checkpoint, load_tokenizer(path), Translation(TEXT, PAIRS, options)))
        if device == gpu.device:
            on_gpu = Counter(pairs)
    if isinstance(gpu, Pretend):
        assert not gpu.timeline.races, gpu.timeline.races
        assert not gpu.timeline.overwritten
    assert on_gpu["all"] > 50
    assert on_gpu["uploads"] <= on_gpu["all"]
    # A real card's copies from memory that is not pinned are waits too.
    assert on_gpu["waits"] <= on_gpu["all"] * (1 if isinstance(gpu, Pretend) else 2)
    for pair, sums in found[1].entries.items():
        np.testing.assert_allclose(found[0].entries[pair].gate_sum, sums.gate_sum, rtol=1e-4)
