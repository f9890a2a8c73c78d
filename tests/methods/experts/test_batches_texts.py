"""Gate statistics of language models by text, against single windows, in any batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.methods.experts.batches import CollectOptions, Texts, text_windows
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules.building import make_model
from prunecli.modules.stock_experts import expert_modules
from prunecli.results.gates import GateStatistics, GateSums
from prunecli.running.runner import InMemory
from prunecli.text.batching import marks_of, masked
from prunecli.text.plain import Corpus
from prunecli.text.tokens import load_tokenizer
from tests.methods.experts.test_layerwise import assert_same, by_layer, in_memory
from tests.reference.routed_outputs import sums
from tests.reference.stock_experts import block_inputs, routed_tokens, switch_tokens
from tests.running.layerwise.running import CPU
from tests.stock_mixtures import save_mixture, tiny_mixture, write_sentinels
from tests.tiny import change_config, write_plain_tokenizer

TEXTS = (
    Corpus("prose", (Path("a"),), ("the hen", "a", "the hat is in the inn", "no hen on the hat")),
    Corpus("code", (Path("b"),), ("if x: return y, else no", "x - 1")),
)
OPTIONS = CollectOptions(batch_tokens=24, context=8)
MATERIAL = Texts(TEXTS, OPTIONS)


class Subject:
    """A tiny mixture with a tokenizer, and its checkpoint."""

    def __init__(self, folder: Path, model_type: str, **config: Any) -> None:
        self.tokenizer, self.model = load_tokenizer(folder), tiny_mixture(model_type, **config)
        self.model.save_pretrained(folder)
        self.checkpoint = open_model(folder)

    def collect(self, material: Texts = MATERIAL) -> GateStatistics:
        return score(InMemory(self.model), self.checkpoint, self.tokenizer, material)


def assert_sums(entry: GateSums, routed: list[list[Any]]) -> None:
    """The sums are those of the tokens of each layer."""
    assert entry.tokens.tolist() == [len(tokens) for tokens in routed]
    for index, tokens in enumerate(routed):
        for name, expected in sums(tokens, 8).items():
            np.testing.assert_allclose(
                getattr(entry, name)[index], expected, rtol=1e-4, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
def test_sums_are_those_of_single_windows(model_type):
    write_plain_tokenizer(".")
    subject = Subject(Path(), model_type)
    found = subject.collect()
    assert (found.mode, found.top_k, found.num_experts) == ("text", 2, 8)
    assert list(found.entries) == ["prose", "code"]
    model = subject.model
    model.set_experts_implementation("eager")
    modules = expert_modules(model)
    for corpus in TEXTS:
        routed = [[] for _ in modules]
        for document in corpus.documents:
            ids = subject.tokenizer(document)["input_ids"]
            for start in range(0, len(ids), 8):
                with torch.inference_mode():
                    window = torch.tensor([ids[start : start + 8]])
                    for own, tokens in zip(
                        routed, routed_tokens(model, modules, input_ids=window), strict=True
                    ):
                        own += tokens
        assert_sums(found.entries[corpus.name], routed)


def test_an_encoder_reads_masked_text_and_its_decoder_what_was_masked():
    """Experts overflow."""
    write_sentinels(".")
    restoring = Subject(Path(), "switch_transformers", vocab_size=80, expert_capacity=2)
    found = restoring.collect(Texts(TEXTS, CollectOptions(batch_tokens=40, context=16)))
    assert (found.mode, found.top_k) == ("text", 1)
    assert [name.split(".")[0] for name in found.layers] == ["encoder", "encoder", "decoder", "decoder"]
    model, marks = restoring.model, marks_of(restoring.tokenizer)
    for corpus in TEXTS:
        routed = [[] for _ in found.layers]
        for window in text_windows(restoring.tokenizer, corpus, 16):
            inputs, targets = masked(window, marks)
            sides = {
                "input_ids": torch.tensor([inputs]),
                "decoder_input_ids": torch.tensor([[0, *targets[:-1]]]),
            }
            with torch.inference_mode():
                blocks = block_inputs(model, "SwitchTransformersSparseMLP", **sides)
                for index, (block, hidden) in enumerate(blocks.values()):
                    routed[index] += switch_tokens(block, hidden, 2)
        entry = found.entries[corpus.name]
        assert_sums(entry, routed)
        assert (entry.routed.sum(axis=1) <= entry.tokens).all()


def test_a_model_that_is_no_language_model_is_refused():
    write_plain_tokenizer(".")
    subject = Subject(Path(), "qwen3_moe")
    held = InMemory(subject.model.base_model)
    with pytest.raises(UnsupportedModelError, match="no head"):
        score(held, subject.checkpoint, subject.tokenizer, MATERIAL)


def test_the_key_is_that_of_the_texts_and_how_they_are_cut():
    renamed = (Corpus("other", (), TEXTS[0].documents), TEXTS[1])
    made = [Texts(TEXTS), Texts(TEXTS[:1]), Texts(renamed), MATERIAL]
    made.append(Texts(TEXTS, CollectOptions(max_tokens=9)))
    assert len({str(one.key) for one in made}) == len(made)


# Gate statistics of language models whose layers and experts stay on disk: those of a run in memory.


@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss", "granitemoehybrid", "lfm2_moe"]
)
def test_every_family(model_type):
    path = save_mixture("model", model_type)
    # Where a class keeps some of its weights in float32, another type than that of the files tells; but of weights
    # that lie the other way around, products in bfloat16 depend on where in memory they are.
    dtype = "float32" if model_type == "gpt_oss" else "bfloat16"
    assert_same(by_layer(path, MATERIAL, dtype), in_memory(path, MATERIAL, dtype))


def test_layers_that_predict_further_tokens_are_not_run():
    source = save_mixture("model", "deepseek_v3")
    expected = in_memory(source, MATERIAL)
    tensors = load_file(source / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    more = {name.replace("layers.2", "layers.3"): tensor + 1 for name, tensor in last.items()}
    save_file({**tensors, **more}, source / "model.safetensors", {"format": "pt"})
    assert by_layer(source, MATERIAL).to_json()["entries"] == expected.to_json()["entries"]


def test_a_checkpoint_that_lacks_a_layer_of_config_json_is_refused():
    deeper = save_mixture("model", "qwen3_moe")
    change_config(deeper, num_hidden_layers=4, mlp_only_layers=[1, 3])
    with pytest.raises(CheckpointError, match=r"missing \(model"):
        make_model(open_model(deeper), CPU, torch.float32)
