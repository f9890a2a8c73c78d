"""The class that a checkpoint runs in: `evaluate` of families that no record declares, and without `architectures`."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from prunecli.commands.evaluate import evaluate
from prunecli.running.encoding import lm_windows
from tests.commands.calls import done
from tests.families import tiny
from tests.opening import load
from tests.tiny import config_of, write_json, write_plain_tokenizer

LINES = tuple("the hen that is on the hat in the inn is a hen"[:length] for length in range(1, 46, 4))


def saved(directory: Path, model_type: str, head: str, name: str | None = None) -> Path:
    """A tiny model of the type, of the class that the head has or of this name, with a tokenizer."""
    made = tiny.auto_class(model_type, head) if name is None else getattr(transformers, name)
    tiny.drawn(made, tiny.tiny_config(model_type, head)).save_pretrained(directory)
    write_plain_tokenizer(directory)
    return directory


def without_class(model: Path) -> None:
    config = config_of(model)
    write_json(model / "config.json", {**config, "architectures": None})


def loss_of(model: Path, task: str) -> float:
    text = model.parent / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    options = f"--task {task} --text {text} -o {text.with_name('out.json')} --json --force --device cpu"
    result = done(evaluate, model, options)
    return float(result.json["results"][0]["scores"]["loss"])


@pytest.mark.parametrize("model_type", ["internlm3", "phi", "hy_v4"])
def test_the_loss_is_that_of_each_text_alone(model_type, tmp_path):
    """InternLM3's class is borrowed, HY-V4's attention sparse."""
    if model_type == "internlm3":
        pytest.importorskip("transformers", minversion="5.23")  # has the type
    source = saved(tmp_path / "model", model_type, "causal")
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


@pytest.mark.parametrize("model_type", ["xlm", "modernvbert", "ultravbert"])  # vocabularies in inner configs
def test_masked_language_models(model_type, tmp_path):
    source = saved(tmp_path / "model", model_type, "masked")
    named = loss_of(source, "mlm")
    without_class(source)
    assert loss_of(source, "mlm") == named


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification", "Model"])
@pytest.mark.parametrize("family", ["Phi", "Llama"])  # not declared, and declared
def test_without_architectures_the_weights_say_the_class(family, head, tmp_path):
    source = saved(tmp_path / "model", family.lower(), "causal", f"{family}{head}")
    without_class(source)
    assert type(load(source)).__name__ == f"{family}{head}"
