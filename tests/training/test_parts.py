import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prunecli.commands.share import share_ffn
from prunecli.errors import PruneError, UsageError
from prunecli.model.checkpoint import open_model
from prunecli.text.choice import TextChoice
from prunecli.training import finetune as finetuning
from prunecli.training.finetune import Destination, finetune, training_bytes
from prunecli.training.options import LossOptions
from prunecli.training.parts import frozen_weights, merged_state, prepare
from prunecli.training.state import Start
from tests.commands.calls import done, names
from tests.families import tiny_family
from tests.opening import load
from tests.stock_mixtures import save_mixture, tiny_mixture
from tests.tiny import tiny_nllb_moe
from tests.training.runs import (
    calm_case,
    changed,
    language_model,
    options,
    staged,
    text_file,
    train,
    update_ranks,
)


def test_experts_alone():
    model = tiny_nllb_moe("model", experts=4)
    chosen = options(steps=2, train="experts")
    trained = train(model, "state", chosen)
    source = open_model(model)
    experts = {name for name in source.tensors if source.layout.part(name) == "experts"}
    assert training_bytes(source, chosen, 1)["gradients"] == 4 * trained.log["parameters"]
    moved = changed(model, trained)
    assert moved <= experts  # one that no token is sent to stays
    assert len(moved) > len(experts) / 2
    with pytest.raises(UsageError, match="no stacks of experts in its class"):
        train(model, "low", options(steps=2, train="experts", lora=2))


@pytest.mark.parametrize("family", ["t5", "gpt2", "nllb-moe"])
def test_dropouts_of_the_training_alone(models, family):
    path = models[family]
    model = load(path).train()
    tokens = {"input_ids": torch.arange(4, 12).view(1, -1)}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = tokens["input_ids"]
    prepare(model, open_model(path), options(dropout=0.3))
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} <= {0.3}
    first, second = (model(**tokens)[0] for _ in range(2))
    assert not torch.equal(first, second)
    prepare(model, open_model(path), options(dropout=0.0))
    if family != "nllb-moe":  # a whole expert's output is still left out
        first, second = (model(**tokens)[0] for _ in range(2))
        assert torch.equal(first, second) or model.config.to_dict().get("encoder_layerdrop")


def test_what_is_kept_in_its_course():
    model = tiny_family("model", "gpt2", dtype="F16")
    text = TextChoice(files=(text_file("text"),))
    destination = Destination(Path("out"), save_every=2, keep_at=(3,))
    said = []
    chosen = options(steps=4).updated(loss=LossOptions())
    finetune(Start(model), text, destination, chosen, say=said.append)
    assert names("out.steps") == ["step-2", "step-3", "step-4"]
    finetune(Start(model), text, Destination(Path("two")), chosen.updated(steps=2))
    for step, whole in (("out.steps/step-2", "two"), ("out.steps/step-4", "out")):
        kept, made = (Path(f"{name}/model.safetensors").read_bytes() for name in (step, whole))
        assert kept == made
    kept = open_model("out.steps/step-3")
    kept.check()
    assert kept.structure.history[-1]["arguments"]["steps"] == 3
    assert any("16.0 bytes a parameter" in line for line in said)
    Path("new.steps").mkdir()
    with pytest.raises(PruneError, match=r"new\.steps: exists already"):
        finetune(Start(model), text, Destination(Path("new"), save_every=2), chosen)
    forced = Destination(Path("out"), force=True, keep_at=(1,))
    finetune(Start(model), text, forced, chosen.updated(steps=1))
    assert [path.name for path in Path("out.steps").iterdir()] == ["step-1"]


def test_weights_that_the_stored_type_cannot_hold_are_refused():
    model = load(tiny_family("model", "gpt2"))
    model.get_input_embeddings().weight.data[0] = 1e6
    model.save_pretrained("large")
    shutil.copytree("model", "large", dirs_exist_ok=True, ignore=lambda *_: ["model.safetensors"])
    text = TextChoice(files=(text_file("text"),))
    chosen = options(steps=1, train="embeddings").updated(loss=LossOptions())
    with pytest.raises(PruneError, match="float16"):
        finetune(Start(Path("large")), text, Destination(Path("out"), dtype="float16"), chosen)
    assert not Path("out").exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_lora_needs_peft_that_is_new_enough(monkeypatch, is_there):
    if is_there:
        Path("peft.py").write_text("from transformers import HybridCache")  # as peft 0.17 does
        monkeypatch.delitem(sys.modules, "peft", raising=False)
        monkeypatch.syspath_prepend(".")
    else:
        monkeypatch.setitem(sys.modules, "peft", None)
    message = "lora` needs peft, which cannot be imported .*HybridCache" if is_there else "lora` needs peft"
    with pytest.raises(PruneError, match=message):
        finetune(Start(Path()), TextChoice(), Destination(Path("out")), options(lora=2))


@pytest.mark.parametrize("family", ["m2m_100", "gpt2"])
def test_updates_of_low_rank_are_merged(family):
    original, data = calm_case("original", family)
    side = "--decoder" if family == "gpt2" else "--encoder"
    done(share_ffn, original, side, "share -o model")
    model, rank = "model", 2
    chosen = options(steps=4, lora=rank, learning_rate=1e-2)
    trained = train(model, "state", chosen, data)
    ranks = update_ranks(model, trained)
    before = open_model(model)
    assert dict(before.tensors) == dict(open_model(trained.staged).tensors)
    within = [name for name in before.tensors if before.layout.part(name) in ("attention", "ffn")]
    shapes = {name: before.info(name).shape for name in within if "relative" not in name}
    adapted = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    assert ranks.keys() == adapted.keys()
    assert max(ranks.values()) <= rank
    assert trained.log["parameters"] == rank * sum(map(sum, adapted.values()))
    assert training_bytes(open_model(model), chosen, 1)["low-rank updates"] == 4 * trained.log["parameters"]
    losses = [row["loss"] for row in trained.log["validation"]]
    assert losses[-1] < losses[0]
    assert staged(train(model, "cut", chosen.updated(steps=2), data)) != staged(trained)
    assert staged(train(model, "cut", chosen, data)) == staged(trained)  # gone on from its state


@pytest.mark.parametrize("family", ["m2m_100", "gpt2"])
def test_frozen_weights_take_half_and_train_the_same(monkeypatch, family):
    model, data = calm_case("model", family, dtype="BF16")
    chosen = options(steps=2, lora=2, dtype="bfloat16", learning_rate=1e-2)
    short = train(model, "short", chosen, data)
    source = open_model(model)
    parts, whole = (
        training_bytes(source, chosen.updated(dtype=name), 1) for name in (chosen.dtype, "float32")
    )
    saved = 2 * (whole["weights"] - parts["weights"])  # bytes of the frozen linear layers in float32
    assert parts["bfloat16 copies"] == (whole["weights"] - saved) // 2
    kept = load_file(next(Path("short").glob("checkpoint-*")) / "model.safetensors")
    assert sum(weight.numel() for weight in kept.values()) == short.log["parameters"]
    shortened = []
    monkeypatch.setattr(finetuning, "shorten_frozen", lambda *given: shortened.extend(frozen_weights(*given)))
    assert staged(train(model, "long", chosen, data)) == staged(short)
    assert sum(weight.nbytes for weight in shortened) == saved


def test_frozen_experts_are_multiplied_in_the_type_of_the_training(monkeypatch):
    model = save_mixture("model", "mixtral")
    tiny_mixture("mixtral").bfloat16().save_pretrained(model)
    chosen, products = options(steps=1, train="routers", dtype="bfloat16"), set()
    product = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda rows, weight, **more: products.add(weight.dtype) or product(rows, weight, **more),
    )
    trained = train(model, "state", chosen, language_model())
    assert products == {torch.bfloat16}
    routers = {name for layer in open_model(model).mixtures for name in layer.router_tensors}
    assert changed(model, trained) == routers


def test_adapted_and_merged_compute_the_same():
    tiny_mixture("gpt_oss").save_pretrained("model")
    model, plain = (load("model") for _ in range(2))
    prepare(model, open_model("model"), options(lora=3, train="experts"))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    tokens = torch.arange(4, 24).view(2, -1)
    with torch.no_grad():
        before = plain(tokens).logits
        plain.load_state_dict(merged_state(model))
        found = model(tokens).logits
        torch.testing.assert_close(found, plain(tokens).logits)
    assert (found - before).abs().max() > 0.01


@pytest.mark.parametrize("family", ["m2m_100", "gpt2"])
def test_gradient_checkpointing_changes_nothing(family):
    model, data = calm_case("model", family)
    made = []
    for again in (False, True):
        made.append(train(model, f"{again}", options(steps=2, gradient_checkpointing=again), data))
    assert staged(made[0]) == staged(made[1])
