from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from prunecli.errors import CheckpointError, UnsupportedModelError, UsageError
from prunecli.modules import fitting
from prunecli.modules.loading import load_model, sparse_ffns
from prunecli.modules.sparse_ffn import SparseFFN
from tests.contracts.method_contract import logits_of
from tests.families import tiny, tiny_family
from tests.forked import ended, start
from tests.tiny import change_config, tiny_nllb_moe


@pytest.fixture
def source():
    return tiny_nllb_moe("tiny")


def test_every_tensor_is_in_its_place(source):
    model = load_model(source, device="cpu")
    stored = load_file(source / "model.safetensors")
    for name, value in stored.items():
        if ".experts.expert_" in name:
            layer, _, rest = name.partition(".experts.expert_")
            number, _, suffix = rest.partition(".")
            held = getattr(model.get_submodule(layer), suffix.replace(".", "_"))[int(number)]
        else:
            held = model.get_parameter(name)
        assert np.array_equal(held.detach().numpy(), value), name
    assert not model.training
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])


def test_positions_that_a_checkpoint_holds_are_not_computed():
    """A DistilBERT holds those of its teacher, though its config.json says that they are sinusoids."""
    path = tiny_family("model", "distilbert")
    change_config(path, sinusoidal_pos_embds=True)
    held = load_model(path, device="cpu").distilbert.embeddings.position_embeddings.weight
    stored = load_file(path / "model.safetensors")["distilbert.embeddings.position_embeddings.weight"]
    assert np.array_equal(held.detach().numpy(), stored)


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        ("F32", "auto", torch.float32),
        ("F16", "auto", torch.float32),
        ("BF16", "auto", torch.bfloat16),
        ("F32", "float16", torch.float16),
    ],
)
def test_types_on_a_cpu(monkeypatch, stored, asked, got):
    # As on a processor with instructions for it, which the one at hand need not have.
    monkeypatch.setattr(fitting, "multiplies_natively", lambda dtype, _device: dtype == torch.bfloat16)
    model = load_model(tiny_nllb_moe("m", dtype=stored), device="cpu", dtype=asked)
    assert model.model.shared.weight.dtype == got
    assert all(
        module.router.classifier.weight.dtype == torch.float32 for module in sparse_ffns(model).values()
    )
    assert isinstance(model.model.encoder.layers[1].ffn, SparseFFN)
    assert torch.isfinite(logits_of(model)).all()


def test_loading_never_holds_a_second_copy():
    """150 MB of float32 weights: the peak rises by them and a little, not by twice as much."""
    path = tiny_nllb_moe("big", d_model=256, ffn=1024, experts=18, layers=4)
    size = (path / "model.safetensors").stat().st_size
    assert size > 140e6
    code = (
        "import resource, sys, transformers\n"
        "from prunecli.modules.loading import load_model\n"
        "transformers.NllbMoeForConditionalGeneration\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak(); model = load_model(sys.argv[1], device='cpu'); print(peak() - before)\n"
    )
    ((status, out, err),) = ended(start("big", code=code, processes=1))
    assert status == 0, err
    assert int(out) < 1.3 * size + 64e6


def moe(**changes: Any) -> Path:
    path = tiny_nllb_moe("tiny")
    change_config(path, **changes)
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("d_model", "x"),
        ("d_model", 15),
        ("d_model", None),
        ("encoder_layers", -1),
        ("encoder_layers", 2.5),
        ("encoder_layers", 2),
        ("encoder_layers", 5),
        ("encoder_layers", 0),
        ("encoder_sparse_step", 3),
        ("decoder_sparse_step", 0),
        ("decoder_attention_heads", 3),
        ("decoder_attention_heads", 0),
        ("vocab_size", -4),
        ("activation_function", "nonsense"),
        ("num_experts", "eight"),
        ("pad_token_id", 10_000),
        ("dropout", "much"),
        ("moe_token_dropout", "half"),
        ("moe_token_dropout", None),
        ("encoder_ffn_dim", "wide"),
    ],
)
def test_config_values_of_the_wrong_kind(key, value):
    with pytest.raises(CheckpointError) as caught:
        load_model(moe(**{key: value}), device="cpu")
    assert str(caught.value).count("\n") <= 1


@pytest.mark.parametrize("architectures", [["Nothing"], {}])
def test_an_unknown_family(architectures):
    path = moe(model_type="no-such-family", architectures=architectures)
    with pytest.raises(UnsupportedModelError, match="no-such-family"):
        load_model(path, device="cpu")


def test_an_undeclared_family_opens_as_transformers_does_it(capfd):
    stock = tiny.build("electra")
    stock.save_pretrained("other")
    capfd.readouterr()
    model = load_model("other", device="cpu")
    assert capfd.readouterr() == ("", "")  # no bar of transformers
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, stock(ids).logits)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 4}, "other"),
        ({"hidden_size": 52}, "other"),
        ({"hidden_size": "x"}, "other"),
        (
            {"num_hidden_layers": 1 << 31},
            r"num_hidden_layers is 2,147,483,648, and the checkpoint has \d+ tensors",
        ),
        ({"num_experts": 1 << 31}, r"num_experts is 2,147,483,648, and the checkpoint has \d+ tensors"),
    ],
)
def test_an_undeclared_family_is_never_filled_with_random_numbers(change, said):
    tiny.build("electra").save_pretrained("other")
    change_config("other", **change)
    with pytest.raises(CheckpointError, match=said):
        load_model("other", device="cpu")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config(text):
    path = moe()
    (path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_model(path, device="cpu")


@pytest.mark.parametrize(
    ("absent", "same"),
    [
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_what_transformers_4_stored_once(absent, same):
    """Transformers 5 would open it with values that it draws."""
    path = tiny_family("in", "bert-untied")
    tensors = load_file(path / "model.safetensors")
    del tensors[absent]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, device="cpu")
    assert caught.value.message.endswith(f"a tensor is missing ({absent})")
    assert f"store {same} as {absent} too" in (caught.value.remedy or "")


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99"])
def test_devices_that_cannot_be_used(device):
    with pytest.raises(UsageError):
        load_model(moe(), device=device)
