"""What `load_model` refuses, and that it says so in one or two plain lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from prunecli.errors import CheckpointError, UnsupportedModelError, UsageError
from prunecli.modules.loading import load_model
from tests.families import tiny_family
from tests.tiny import tiny_nllb_moe


def tiny(directory: Path, **changes: Any) -> Path:
    path = tiny_nllb_moe(directory / "tiny")
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
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
def test_config_values_of_the_wrong_kind(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(tiny(tmp_path, **{key: value}), device="cpu")
    assert str(caught.value).count("\n") <= 1


@pytest.mark.parametrize("architectures", [["Nothing"], {}])
def test_an_unknown_family(tmp_path: Path, architectures: Any) -> None:
    path = tiny(tmp_path, model_type="no-such-family", architectures=architectures)
    with pytest.raises(UnsupportedModelError, match="no-such-family"):
        load_model(path, device="cpu")


SIZES: dict[str, int] = {
    "hidden_size": 16,
    "embedding_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "vocab_size": 30,
}


def test_an_undeclared_family_opens_as_transformers_does_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import ElectraConfig, ElectraModel

    config = ElectraConfig(**SIZES)
    stock = ElectraModel(config).eval()
    stock.save_pretrained(tmp_path / "other")
    capfd.readouterr()
    model = load_model(tmp_path / "other", device="cpu")
    assert capfd.readouterr() == ("", "")  # no bar of transformers
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(model(ids).last_hidden_state, stock(ids).last_hidden_state)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 2}, {"hidden_size": 18}, {"hidden_size": "x"}])
def test_an_undeclared_family_is_never_filled_with_random_numbers(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    from transformers import ElectraConfig, ElectraModel

    config = ElectraConfig(**SIZES)
    ElectraModel(config).save_pretrained(tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match="other"):
        load_model(tmp_path / "other", device="cpu")


@pytest.mark.parametrize("depth", [1 << 31])
def test_more_layers_than_there_can_be_are_not_made(tmp_path: Path, depth: int) -> None:
    from transformers import ElectraConfig, ElectraModel

    ElectraModel(ElectraConfig(**SIZES)).save_pretrained(tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": depth}))
    with pytest.raises(
        CheckpointError, match=rf"num_hidden_layers is {depth:,}, and the checkpoint has \d+ tensors"
    ):
        load_model(tmp_path / "other", device="cpu")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_generation_config(tmp_path: Path, text: str) -> None:
    path = tiny(tmp_path)
    (path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load_model(path, device="cpu")


@pytest.mark.parametrize(
    ("case", "absent", "same"),
    [
        ("bert-untied", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("bert-untied", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_what_transformers_4_stored_once(tmp_path: Path, case: str, absent: str, same: str) -> None:
    """Transformers 5 would open it with values that it draws."""
    path = tiny_family(tmp_path / "in", case)
    tensors = load_file(path / "model.safetensors")
    del tensors[absent]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_model(path, device="cpu")
    assert caught.value.message.endswith(f"a tensor is missing ({absent})")
    assert f"store {same} as {absent} too" in (caught.value.remedy or "")


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99"])
def test_devices_that_cannot_be_used(tmp_path: Path, device: str) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UsageError):
        load_model(tiny(tmp_path), device=device)
