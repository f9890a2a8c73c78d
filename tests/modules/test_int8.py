"""Linear layers in int8 against their rounding restated."""

import numpy as np
import pytest
import torch

import prunecli
from prunecli.errors import UsageError
from prunecli.evaluation.latency import model_sizes
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import weight_bytes
from prunecli.modules import int8
from prunecli.modules.fitting import candidates
from prunecli.modules.int8 import Int8Linear, Int8SparseFFN, int8_product, quantise
from tests.reference import int8 as reference

CPU = torch.device("cpu")

if not int8.multiplies_bytes():
    pytest.skip("this processor has no products of bytes", allow_module_level=True)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 3), (5, 33, 70), (17, 64, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_the_rounding_restated(shape, biased):
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(rows, inputs, generator=generator) * 10 ** torch.randn(rows, 1, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    x[-1], weight[-1] = 0, 0  # nothing to divide by
    bias = torch.arange(len(weight)).float() if biased else None
    with torch.inference_mode():
        made = int8_product(x, quantise(weight), bias)
    want = np.array(reference.product(x.tolist(), weight.tolist(), bias.tolist() if biased else None))
    np.testing.assert_allclose(made.double().numpy(), want, rtol=1e-4, atol=1e-4 * float(x.abs().max()))


@pytest.mark.parametrize("case", ["m2m_100", "gpt2", "nllb-moe"])
def test_a_loaded_model_is_near(case, models):
    path = models[case]
    ids = torch.tensor([[5, 6, 7, 9, 2], [8, 5, 5, 6, 2]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exact, model = (prunecli.load_model(path, device="cpu", dtype=dtype) for dtype in ("float32", "int8"))
    if exact.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.inference_mode():
        want, made = (one(**inputs)[0] for one in (exact, model))
    assert float((made - want).norm() / want.norm()) < 0.05
    assert model_sizes(model)["parameters"] == model_sizes(exact)["parameters"]
    scales = sum(8 * module.out_features for module in model.modules() if isinstance(module, Int8Linear))
    scales += sum(
        8 * ffn.num_experts * (ffn.ffn_dim + ffn.d_model)
        for ffn in model.modules()
        if isinstance(ffn, Int8SparseFFN)
    )
    assert weight_bytes(open_model(path), "I8") == pytest.approx(
        model_sizes(model)["parameter_bytes"] + scales, rel=0.05
    )


def test_refused_where_it_cannot_run(models, monkeypatch):
    checkpoint = open_model(models["t5"])
    with pytest.raises(UsageError, match="`dtype=int8` is for CPUs, not for cuda:1"):
        candidates("int8", [checkpoint], torch.device("cuda:1"), only_runs=True)
    with pytest.raises(UsageError, match="`dtype=int8`: no such type"):
        candidates("int8", [checkpoint], CPU)  # of what is trained, or measured inside
    monkeypatch.setattr(int8, "multiplies_bytes", lambda: False)
    with pytest.raises(UsageError, match="no products of bytes"):
        candidates("int8", [checkpoint], CPU, only_runs=True)
