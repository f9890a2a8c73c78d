"""The class that a checkpoint runs in: `evaluate` of families that no record declares, and without `architectures`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from prunecli.commands.evaluate import evaluate
from prunecli.modules.loading import load_model
from prunecli.running.encoding import lm_windows
from tests.commands.calls import done
from tests.tiny import config_of, write_json, write_plain_tokenizer

LINES = ("the hen and a hat", "a", "the hen that is on the hat in the inn is a hen")
_TOKENS = {"vocab_size": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_TOKENS, **_SIZES, "num_key_value_heads": 4, "max_position_embeddings": 64}
_XLM = {**_TOKENS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1}
_SPARSE = {
    "index_topk": 3,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_ANT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "dim_head": 8,
    "dim_ff": 48,
    "num_hidden_layers": 2,
    "prompt_types": 4,
    "prompt_length": 4,
    "segment_types": 4,
}
_SEEING = {
    "text_config": {**_LLAMA, "layer_types": ["full_attention"] * 2, "cls_token_id": 0, "sep_token_id": 2},
    "vision_config": {**_SIZES, "image_size": 32, "patch_size": 8},
}
CAUSAL = {
    "internlm3": ("LlamaForCausalLM", _LLAMA),  # a class that is borrowed
    "phi": ("PhiForCausalLM", _LLAMA),
    "hy_v4": ("HYV4ForCausalLM", {**_LLAMA, **_SPARSE}),  # padding breaks ties of its sparse attention
    "cpmant": ("CpmAntForCausalLM", _ANT),  # takes padding to be on the left
}
MASKED = {
    "xlm": ("XLMWithLMHeadModel", _XLM),
    "modernvbert": ("ModernVBertForMaskedLM", _SEEING),  # its vocabulary is in an inner config
    "ultravbert": ("UltraVBertForMaskedLM", _SEEING),
}


def saved(directory: Path, model_type: str, name: str, config: dict[str, Any]) -> Path:
    torch.manual_seed(3)
    model = getattr(transformers, name)(transformers.CONFIG_MAPPING[model_type](**config))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(directory)
    write_plain_tokenizer(directory)
    return directory


def without_class(model: Path) -> None:
    config = config_of(model)
    write_json(model / "config.json", {**config, "architectures": None})


def loss_of(model: Path, task: str) -> float:
    text = model.parent / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    output = ("--json", "--force", "-o", model.parent / "out.json", "--device", "cpu")
    result = done(evaluate, model, "--task", task, "--text", text, *output)
    return float(result.json["results"][0]["scores"]["loss"])


@pytest.mark.parametrize("model_type", CAUSAL)
def test_the_loss_is_that_of_each_text_alone(model_type, tmp_path):
    if model_type == "internlm3":
        pytest.importorskip("transformers", minversion="5.23")  # has the type
    source = saved(tmp_path / "model", model_type, *CAUSAL[model_type])
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    nats, tokens = 0.0, 0
    for window in lm_windows(tokenizer, model, LINES):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window.ids])).logits[0, :-1]
        nats += float(
            torch.nn.functional.cross_entropy(logits, torch.tensor(window.ids[1:]), reduction="sum")
        )
        tokens += window.counted
    assert loss_of(source, "lm") == pytest.approx(nats / tokens, abs=1e-5)


@pytest.mark.parametrize("model_type", MASKED)
def test_masked_language_models(model_type, tmp_path):
    source = saved(tmp_path / "model", model_type, *MASKED[model_type])
    named = loss_of(source, "mlm")
    without_class(source)
    assert loss_of(source, "mlm") == named


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification", "Model"])
@pytest.mark.parametrize("family", ["Phi", "Llama"])  # not declared, and declared
def test_without_architectures_the_weights_say_the_class(family, head, tmp_path):
    source = saved(tmp_path / "model", family.lower(), f"{family}{head}", _LLAMA)
    without_class(source)
    assert type(load_model(source, device="cpu")).__name__ == f"{family}{head}"
