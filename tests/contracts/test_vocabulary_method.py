"""Vocabulary trimming: a stock checkpoint of the same logits, of fewer tokens."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.methods.vocabulary.plan import VocabularyOptions, plan_vocabulary
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from prunecli.selection.cut import Selection, cut
from prunecli.text.choice import Lines
from prunecli.text.tokens import load_tokenizer
from tests.commands.vocabulary import run, trimmed
from tests.contracts.method_contract import (
    InSteps,
    Method,
    MethodContract,
    WrittenFiles,
    assert_near,
    batch_for,
    logits_of,
    stock_model,
)
from tests.families import tiny_family
from tests.families.records import BRANCHES
from tests.methods.vocabulary.makers import CHAT, DOCUMENT, KINDS, SEEN
from tests.opening import load
from tests.tiny import config_of, tiny_nllb_moe

ROLES = ("system", "user", "assistant", "user")
LINES = ("the tin hat", "a hen on the tin", "then on")


def tiny(directory: Path, case: str) -> Path:
    """The tiny checkpoint of a case; that of NLLB-MoE has more rows than its tokenizer has tokens."""
    if case == "nllb-moe":
        return tiny_nllb_moe(directory, shards=2, pickled=True, vocab=90)
    return tiny_family(directory, case)


@pytest.fixture
def source(case):
    return tiny("source", case)


def kept_ids(source: Path, output: Path) -> list[int]:
    """Old ids in the order of the new ones, from the two tokenizers alone."""
    old, new = load_tokenizer(source).get_vocab(), load_tokenizer(output).get_vocab()
    return [old[token] for token, _ in sorted(new.items(), key=lambda item: item[1])]


def logits(model: Any, tokenizer: Any, line: str) -> Any:
    """Logits of a sentence, and of its beginning as the decoder's input if there is a decoder."""
    ids = torch.tensor([tokenizer(line)["input_ids"]])
    targets = {"decoder_input_ids": ids[:, :-1]} if model.config.is_encoder_decoder else {}
    return logits_of(model, {"input_ids": ids, **targets})


def same_logits(source: Path, output: Path, lines: tuple[str, ...]) -> None:
    """Compare the logits of the kept tokens with the original's."""
    before, after = load(source), load(output)
    tokenizers = load_tokenizer(source), load_tokenizer(output)
    kept = kept_ids(source, output)
    for line in lines:
        expected = logits(before, tokenizers[0], line)[..., kept]
        assert_near(logits(after, tokenizers[1], line), expected)


def to_lines(source: Checkpoint, lines: tuple[str, ...] = LINES, **options: Any) -> Rewrite:
    """To the tokens of these lines."""
    text = Lines(lines, (), (), (), None)
    return cut(source, plan_vocabulary(source, text, VocabularyOptions(**options)))


class Trimming(Method):
    """To the tokens of `LINES`."""

    def make_source(self) -> Path:
        return tiny(self.path, self.case)

    def keep_everything(self, source: Checkpoint) -> Rewrite:
        return cut(source, Selection({"tokens": range(source.config["vocab_size"])}))

    def reduce(self, source: Checkpoint) -> Rewrite:
        return to_lines(source)

    def impossible(self, source: Checkpoint) -> Rewrite:
        return to_lines(source, keep=("☃",))

    def masked_logits(self, model: Any, rewrite: Rewrite) -> Any:
        """Logits of the kept tokens, for the same tokens; all logits of a classifier."""
        apply(open_model(self.path), rewrite, self.folder)
        kept = torch.tensor(kept_ids(self.path, self.folder))
        assert len(kept) < model.config.vocab_size
        inputs = batch_for(load(self.folder).config)
        old = {name: kept[value] if name.endswith("input_ids") else value for name, value in inputs.items()}
        logits = logits_of(model, old)
        return logits if logits.shape[-1] == model.config.num_labels else logits[..., kept]


class TestEveryFamily(Trimming, MethodContract):
    cases = (
        *(case for case in BRANCHES if case != "opt-narrow"),
        *("gemma3_text", "llama-tied", "bert-classifier"),
    )


class TestFiles(Trimming, WrittenFiles):
    pass


class TestEveryLayout(Trimming, InSteps):
    def steps(self) -> tuple[Any, Any, Any]:
        fewer = partial(to_lines, lines=LINES[:1])
        return to_lines, fewer, fewer


@pytest.mark.parametrize("case", ["t5", "bert", "gpt2", "llama"])
def test_plain_transformers_opens_the_result(source):
    out = trimmed(source, Path("out"), LINES)
    config = config_of(out)
    assert config["model_type"] == config_of(source)["model_type"]
    model = stock_model(out, source)
    assert model.get_input_embeddings().weight.shape[0] == config["vocab_size"] == len(load_tokenizer(out))
    tokenizer = load_tokenizer(out)
    torch.testing.assert_close(logits(model, tokenizer, LINES[0]), logits(load(out), tokenizer, LINES[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer(kind):
    source = KINDS[kind](Path("source"))
    (source / "chat_template.jinja").write_text(CHAT)
    out = trimmed(source, Path("out"), DOCUMENT.split("\n"))
    old, new = load_tokenizer(source), load_tokenizer(out)
    chat = [{"role": role, "content": text} for role, text in zip(ROLES, (*SEEN, DOCUMENT), strict=True)]
    for line in (*SEEN, DOCUMENT, f"{DOCUMENT}\n", old.apply_chat_template(chat, tokenize=False)):
        assert old.tokenize(line) == new.tokenize(line)
        ids = new(line)["input_ids"]
        assert old.convert_ids_to_tokens(old(line)["input_ids"]) == new.convert_ids_to_tokens(ids)
        assert old.decode(old(line)["input_ids"]) == new.decode(ids)
    assert old.all_special_tokens == new.all_special_tokens
    assert len(new) < len(old)
    same_logits(source, out, SEEN)


def test_labels_as_many_as_tokens_are_refused():
    """Only the shape says what an axis of a task head counts."""
    changes = {"architectures": ["BertForSequenceClassification"]}
    size = config_of(tiny_family("plain", "bert"))["vocab_size"]
    source = tiny_family("source", "bert", **changes, num_labels=size)
    Path("text").write_text("the hat\n")
    result = run(source, "--text text -o out")
    assert result.status == 1
    assert "no key of its config.json is known to hold the number of tokens and nothing else" in result.err
    assert not Path("out").exists()
