"""Mixture-of-experts language models are trained in their stock classes; results are what those classes open."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional

from prunecli.commands.prune import prune_experts
from prunecli.commands.share import factorize_embeddings, share_ffn
from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import open_model
from prunecli.running.encoding import packed_examples
from prunecli.text.choice import TextChoice
from prunecli.text.tokens import load_tokenizer
from prunecli.training.finetune import Destination, finetune
from prunecli.training.options import LossOptions
from prunecli.training.state import Start
from tests.commands.calls import done
from tests.families import tiny, tiny_family
from tests.families.mixtures import values_of
from tests.opening import load
from tests.stock_mixtures import save_mixture
from tests.tiny import change_config, config_of, write_plain_tokenizer
from tests.training.runs import (
    changed,
    language_model,
    options,
    text_file,
    train,
    translation,
    unchanged,
    written,
)

WEIGHTS = "model.safetensors"
SPECIALS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
"""Of `write_plain_tokenizer`."""


def saved(folder, model_type):
    return save_mixture(folder, model_type, **SPECIALS)


def stock(model_type, folder):
    """The model that plain transformers opens, nothing missing and nothing left over."""

    made = tiny.auto_class(model_type)
    model, info = made.from_pretrained(folder, dtype="float32", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_updates_are_those_of_a_plain_loop(model_type):
    """Three of them on one window, by transformers' eager experts and torch's Adam."""
    source = saved("model", model_type)
    data = language_model(8, 0)
    data = replace(data, train=replace(data.train, whole_files=True))
    model, tokenizer = stock(model_type, source), load_tokenizer(source)
    stream = [0] + [token for text in data.train.texts for token in (*tokenizer(text)["input_ids"], 2)]
    window = torch.tensor([stream[:-1]])
    examples = packed_examples(tokenizer, model, data.train.texts, len(stream) - 1)
    assert examples.batch([0]).inputs["input_ids"].tolist() == window.tolist()
    made = options(steps=3, eval_every=1, learning_rate=1e-3, warmup=1, batch_tokens=window.numel())
    trained = train(source, "state", made.updated(context=window.numel()), data)
    model.set_experts_implementation("eager")
    adam = torch.optim.Adam(model.parameters(), betas=made.betas)
    for row in trained.log["training"]:
        logits, following = model.train()(window).logits[0], torch.tensor(stream[1:])
        loss = functional.cross_entropy(logits, following, label_smoothing=0.1)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = row["learning_rate"]
        adam.step()
    rates = sum(row["learning_rate"] for row in trained.log["training"])
    assert rates > 1e-3
    found = dict(stock(model_type, written(source, trained, "out")).named_parameters())
    for name, expected in model.named_parameters():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0.02 * rates, msg=name)


def test_parts_alone():
    source = saved("model", "gpt_oss")
    checkpoint = open_model(source)
    layers, experts = checkpoint.mixtures, set[str]()
    for layer in layers:
        experts |= {*layer.stacked_tensors}
        for number in range(layer.num_experts):
            experts |= {layer.expert_tensor(number, suffix) for suffix in layer.expert_tensors}
    routers = {name for layer in layers for name in layer.router_tensors}
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    counts = {name: info.numel for name, info in checkpoint.tensors.items()}
    for part, names in (("experts", experts), ("routers", routers), ("embeddings", tables)):
        trained = train(source, part, options(steps=2, learning_rate=1e-2, train=part), language_model())
        moved = changed(source, trained)
        # An expert to which no token was sent stays.
        assert moved <= names if part == "experts" else moved == names
        assert len(moved) > len(names) / 2
        assert trained.log["parameters"] == sum(counts[name] for name in names)


def test_a_pruned_model_recovers_with_the_original_as_teacher():
    """A Qwen3-MoE as it is published has its count under another key than transformers writes now."""
    source = saved("model", "qwen3_moe")
    experts = config_of(source)["num_local_experts"]
    change_config(source, "num_local_experts", num_experts=experts, dtype="bfloat16")
    done(prune_experts, source, "--metric random --ratio 0.5 -o pruned")
    file = text_file("text", 60)
    text, held_out = (TextChoice(files=(file,), max_sentences=count) for count in (60, 9))
    loss = LossOptions(0.0, distill=0.9)
    chosen = options(steps=30, eval_every=10, learning_rate=1e-2, teacher=source, loss=loss)
    destination, said = Destination(Path("out"), save_every=20), []
    given = (Start(Path("pruned")), text, destination, chosen)
    training, support = finetune(*given, valid=held_out, say=said.append)
    assert support.is_stock
    losses = [row["loss"] for row in training.to_json()["validation"]]
    assert losses[-1] < losses[0] - 0.2
    before, after = (config_of(name) for name in ("pruned", "out"))
    history = after["prunecli"].pop("history")
    assert [step["command"] for step in history] == ["prune-experts", "finetune"]
    assert history[-1]["arguments"]["teacher"]["path"].endswith("model")
    assert before["prunecli"].pop("history") == history[:1]
    assert after == before
    assert after["num_experts"] == 4
    assert "finetune" in Path("out/README.md").read_text()
    assert stock("qwen3_moe", "out").config.num_local_experts == 4
    stock("qwen3_moe", "out.steps/step-20")
    assert dict(open_model("pruned").tensors) == dict(open_model("out").tensors)


def test_a_model_of_text_and_images_learns_from_text():
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    tokens = dict(zip(("image", "video", "vision_start", "vision_end"), range(60, 64), strict=True))
    config = transformers.CONFIG_MAPPING["qwen3_5_moe"](
        text_config={**values_of("qwen3_5_moe_text"), **SPECIALS},
        vision_config={**vision, "num_position_embeddings": 16},
        **{f"{name}_token_id": number for name, number in tokens.items()},
    )
    source = Path("model")
    transformers.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(source)
    write_plain_tokenizer(source)
    trained = train(source, "state", options(steps=2, learning_rate=1e-2), language_model())
    moved = changed(source, trained)
    assert any(".language_model." in name and ".experts." in name for name in moved)
    assert not any(".visual." in name for name in moved)
    stock("qwen3_5_moe", written(source, trained, "out"))


def test_tensors_that_are_not_run_are_kept_and_named():
    source = saved("model", "qwen3_next")
    beyond = {"mtp.norm.weight": torch.randn(32), "mtp.fc.weight": torch.randn(32, 64)}
    save_file({**load_file(source / WEIGHTS), **beyond}, source / WEIGHTS, metadata={"format": "pt"})
    said = []
    trained = train(source, "state", options(steps=2), language_model(), report=said.append)
    assert "Not run by Qwen3NextForCausalLM, written as they are: mtp.fc.weight, mtp.norm.weight" in said
    after = load_file(trained.staged / WEIGHTS)
    assert all(torch.equal(after[name], tensor) for name, tensor in beyond.items())


def test_quantised_weights_are_refused():
    source = saved("model", "qwen3_moe")
    change_config(source, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(UnsupportedModelError, match=r"quantised \(fp8\), which are not trained"):
        finetune(Start(source), TextChoice(files=(Path("text"),)), "out", options())


# Reduced checkpoints are trained as they are: what was removed stays removed, what is shared stays one
# parameter.


def trained_and_written(source):
    """Train `source`, write the result as the command does, and give its path."""
    trained = train(source, "state", options(steps=2, learning_rate=1e-2), translation())
    output = written(source, trained, "out")
    assert dict(open_model(source).tensors) == dict(open_model(output).tensors)
    return output


@pytest.mark.parametrize(
    ("family", "configuration"),
    [("m2m_100", "OneWide"), ("bart", "SharedEncSharedDec"), ("t5", "OneWide"), ("t5", "SharedEncSharedDec")],
)
def test_with_shared_and_removed_ffns(family, configuration):
    sizes = {} if family == "t5" else {"decoder_ffn_dim": 48}
    model = tiny_family("model", family, **sizes)
    source = Path("reduced")
    done(share_ffn, model, "--preset", configuration, "-o", source)
    made = trained_and_written(source)
    assert unchanged(source, made) <= {"final_logits_bias"}
    before, after = load(source), load(made)
    # A shared FFN is held once.
    assert [name for name, _ in before.named_parameters()] == [name for name, _ in after.named_parameters()]
    other = open_model(made)
    assert replace(other.structure, history=()) == replace(open_model(source).structure, history=())


def test_with_factorised_embeddings():
    tiny_family("model", "m2m_100")
    done(factorize_embeddings, "model --map-dim 8 --expand-dim 16 --depth 1 -o reduced")
    source = Path("reduced")
    assert not unchanged(source, trained_and_written(source))
    low = train(source, "low", options(steps=2, learning_rate=1e-2, lora=2), translation())
    layout = open_model(source).layout
    embeddings = {name for name in layout.tensors if layout.part(name) == "embeddings"}
    assert embeddings <= unchanged(source, written(source, low, "updated")) < layout.tensors.keys()
