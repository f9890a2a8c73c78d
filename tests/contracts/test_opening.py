"""Results through transformers: each Auto class gives the class that the tensors allow, or refuses and says why."""

import builtins
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.rewrite import Rewrite
from prunecli.modules.loading import load_model, sparse_ffns
from prunecli.results.matching import match_scores
from prunecli.results.unit_scores import scores_of
from prunecli.selection.cut import cut
from tests.contracts.method_contract import logits_of, written
from tests.families import tiny_family
from tests.opening import load
from tests.selections import kept_heads
from tests.tiny import change_json, config_of, tiny_nllb_moe, write_json, write_weights

CLASSIFIED = {"num_labels": 3}


def _seq2seq(base: str, headed: str, **more: str) -> dict[str, str]:
    return {"AutoModel": base, "AutoModelForSeq2SeqLM": headed, **more}


def _masked(prefix: str, causal: str) -> dict[str, str]:
    masked = {"AutoModelForMaskedLM": f"{prefix}ForMaskedLM", "AutoModelForCausalLM": causal}
    return {"AutoModel": f"{prefix}Model", **masked}


def _task(prefix: str, task: str, **more: str) -> dict[str, str]:
    return {"AutoModel": f"{prefix}Model", **more, f"AutoModelFor{task}": f"{prefix}For{task}"}


SEQUENCE = "SequenceClassification"
NLLB = _seq2seq("NllbMoeModel", "NllbMoeForConditionalGeneration")
MARIAN = _seq2seq("MarianModel", "MarianMTModel")
_BART = "BartForConditionalGeneration"
BART = _seq2seq("BartModel", _BART, AutoModelForMaskedLM=_BART, AutoModelForPreTraining=_BART)
_GPT2 = "GPT2LMHeadModel"
GPT2 = {"AutoModel": "GPT2Model", "AutoModelForCausalLM": _GPT2, "AutoModelForPreTraining": _GPT2}
BERT = _masked("Bert", "BertLMHeadModel")
PRETRAINED = {
    **BERT,
    "AutoModelForPreTraining": "BertForPreTraining",
    "AutoModelForNextSentencePrediction": "BertForNextSentencePrediction",
}
LLAMA = {"AutoModel": "LlamaModel", "AutoModelForCausalLM": "LlamaForCausalLM"}

PUBLISHED = (
    ("nllb-moe", "NllbMoeModel", {}, NLLB),
    ("marian", "MarianMTModel", {}, MARIAN),
    ("bart", "BartForConditionalGeneration", {}, BART),
    ("bart", "BartForSequenceClassification", CLASSIFIED, _task("Bart", SEQUENCE, **BART)),
    ("mt5", "MT5Model", {}, _seq2seq("MT5Model", "MT5ForConditionalGeneration")),
    ("bert", "BertModel", {}, {"AutoModel": "BertModel"}),
    ("bert", "BertForPreTraining", {}, PRETRAINED),
    ("roberta", "RobertaForMultipleChoice", {}, _task("Roberta", "MultipleChoice")),
    ("gpt2", "GPT2LMHeadModel", {}, GPT2),
    ("gpt2", "GPT2ForSequenceClassification", CLASSIFIED, _task("GPT2", SEQUENCE, **GPT2)),
    ("llama", "LlamaModel", {"tie_word_embeddings": True}, LLAMA),
)
"""Family, class under `architectures` of published checkpoints, further changes, and what must open it."""


def tiny(path: Path, family: str, **changes: Any) -> Path:
    if family != "nllb-moe":
        return tiny_family(path, family, **changes)
    return tiny_nllb_moe(path, experts=4, layers=2, config=changes)


def uneven(source: Checkpoint) -> Rewrite:
    """One head of the first attention goes."""
    first = source.layout.attentions[0]
    return cut(source, kept_heads({first.name: first.heads[1:]}))


@pytest.fixture
def nobody_answers(monkeypatch):
    """transformers asks on the terminal whether to run code of the directory: an `AssertionError` it does not catch."""

    def asked(*_):
        raise KeyboardInterrupt("asked to run code of the directory")

    monkeypatch.setattr(builtins, "input", asked)


@pytest.mark.parametrize(
    ("family", "name", "changes", "opens"),
    PUBLISHED,
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("nobody_answers")
def test_every_class_of_a_result(family, name, changes, opens):
    source = tiny("in", family, architectures=[name], **changes)
    out = written(source, uneven, "out")
    auto_map = config_of(out)["auto_map"]
    assert auto_map == {auto: f"modeling_prunecli.Prunecli{stock}" for auto, stock in opens.items()}
    for auto, stock in opens.items():
        model = getattr(transformers, auto).from_pretrained(out, trust_remote_code=True)
        assert type(model).__name__ == stock
        assert not any(value.is_meta for value in (*model.parameters(), *model.buffers()))
        for refusing in (getattr(transformers, auto), getattr(transformers, stock)):
            with pytest.raises(ValueError, match=r"Not a stock model: .*load_model"):
                refusing.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    before = transformers.AutoTokenizer.from_pretrained(source)
    assert type(tokenizer) is type(before)
    assert tokenizer("ab c")["input_ids"] == before("ab c")["input_ids"]
    assert isinstance(transformers.AutoProcessor.from_pretrained(out), type(before))
    assert transformers.AutoConfig.from_pretrained(out).model_type == family
    if (source / "generation_config.json").is_file():
        transformers.GenerationConfig.from_pretrained(out)


@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("family", ["bert", "bart"])
@pytest.mark.usefixtures("nobody_answers")
def test_a_tokenizer_whose_files_name_no_class(family, tokenizer_class):
    source = tiny("in", family)
    named = {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    change_json(source / "tokenizer_config.json", "tokenizer_class", **named)
    out = written(source, uneven, "out")
    one, two = (transformers.AutoTokenizer.from_pretrained(path) for path in (source, out))
    assert type(one) is type(two)
    assert one("ab c")["input_ids"] == two("ab c")["input_ids"]


@pytest.mark.parametrize(("family", "base"), [("nllb-moe", "NllbMoeModel"), ("bart", "BartModel")])
def test_the_base_model_is_that_of_the_headed_one(family, base):
    out = written(tiny("in", family, architectures=[base]), uneven, "out")
    opened = transformers.AutoModel.from_pretrained(out, trust_remote_code=True)
    headed = transformers.AutoModelForSeq2SeqLM.from_pretrained(out, trust_remote_code=True)
    ids = torch.tensor([[5, 6, 7, 2]])
    one, two = (model(input_ids=ids, decoder_input_ids=ids) for model in (opened, headed.model))
    assert torch.equal(one.last_hidden_state, two.last_hidden_state)
    if family == "nllb-moe":
        assert sparse_ffns(opened)


@pytest.mark.parametrize("family", ["nllb-moe", "llama"])
def test_a_base_model_that_is_saved_opens_again(family):
    out = written(tiny("in", family), uneven, "out")
    model = transformers.AutoModel.from_pretrained(out, trust_remote_code=True)
    model.save_pretrained("saved")
    saved = open_model("saved")
    saved.check()
    assert saved.config["architectures"] == [f"Prunecli{type(model).__name__}"]
    assert ("AutoModelForCausalLM" in saved.config["auto_map"]) is False
    again = transformers.AutoModel.from_pretrained("saved", trust_remote_code=True)
    assert type(again) is type(model)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="Not a stock model"):
        transformers.AutoModel.from_pretrained("saved")


def test_a_base_model_of_0_2_0_is_read():
    """Tensors and parts of a base model were called as a headed model's, in statistics too."""
    out = written(tiny("in", "bert", architectures=["BertModel"]), uneven, "out")
    new = open_model(out)
    tensors, axes = {name: new.read(name) for name in new.tensors}, axes_of(new, "head")
    values = {f"bert.{axis.name}": [1.0] * axis.count for axis in axes}
    scores = {"values": values, "ids": {f"bert.{axis.name}": [*axis.ids] for axis in axes}}
    before = load_model(out).state_dict(), new.fingerprint
    config = config_of(out)
    kept = config["prunecli"]["axes"]
    config["prunecli"]["axes"] = {f"bert.{name}": units for name, units in kept.items()}
    write_json(out / "config.json", config)
    write_weights(out, {f"bert.{name}": value for name, value in tensors.items()})
    old = open_model(out)
    old.check()
    assert old.fingerprint == before[1]
    found = axes_of(old, "head")
    assert [axis.ids for axis in found] == [axis.ids for axis in axes]
    made = scores_of(old, kind="head", method="ablation", metric="loss", base=1.0, examples=1, **scores)
    assert match_scores(made, old, found).ids == {axis.name: [*axis.ids] for axis in axes}
    torch.testing.assert_close(load_model(out).state_dict(), before[0], rtol=0, atol=0)


def as_0_1_0_wrote(out: Path) -> Path:
    """config.json and shim of the first release: a model type of its own, one Auto class, a config class."""
    config = config_of(out)
    del config["transformers_weights"]
    names = [name.removeprefix("Prunecli") for name in config["architectures"]]
    auto_map = {
        "AutoModelForSeq2SeqLM": "modeling_prunecli.PrunecliModel",
        "AutoConfig": "modeling_prunecli.PrunecliConfig",
    }
    config |= {"architectures": names, "model_type": f"prunecli-{config['model_type']}", "auto_map": auto_map}
    write_json(out / "config.json", config)
    (out / "modeling_prunecli.py").write_text("raise SystemExit('old code')\n")
    return out


@pytest.mark.parametrize("family", ["nllb-moe", "bart"])
def test_results_of_0_1_0_open_and_are_pruned_further(family):
    new = written(tiny("in", family), uneven, "new")
    expected = logits_of(load(new))
    old = as_0_1_0_wrote(written("in", uneven, "old"))
    assert torch.equal(logits_of(load(old)), expected)
    load(old).save_pretrained("saved")
    assert config_of("saved")["model_type"] == family
    assert torch.equal(logits_of(load("saved")), expected)
    further = written(old, uneven, "further")
    assert config_of(further)["model_type"] == family
    assert "old code" not in (further / "modeling_prunecli.py").read_text()
    transformers.AutoModelForSeq2SeqLM.from_pretrained(further, trust_remote_code=True)


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("bart", "BertModel", "no BertModel can be made of it"),
        ("bert", "BertForQuestionAnswering", "2 tensors are missing (qa_outputs.bias, qa_outputs.weight)"),
    ],
)
def test_a_class_that_cannot_be_is_refused(family, asked, message):
    out = written(tiny("in", family), uneven, "out")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_model(out, device="cpu", model_class=asked)
