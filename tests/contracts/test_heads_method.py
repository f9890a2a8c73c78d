"""Head pruning keeps the contract of methods, in every declared family."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from prunecli.methods.experts.plan import Amount, ExpertOptions, ExpertPlan, plan_experts
from prunecli.methods.experts.rewrite import rewrite_experts
from prunecli.methods.heads.plan import HeadOptions, HeadPlan, plan_heads
from prunecli.methods.heads.rewrite import rewrite_heads
from prunecli.model.attention import AttentionLayer
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from tests.contracts.method_contract import MethodContract, WrittenFiles, load, logits, logits_of, written
from tests.families import GATED_T5, MODEL_TYPES, NARROW_OPT, TIED_LLAMA, tiny_family
from tests.tiny import tiny_nllb_moe

KEPT = ((1, 3), (), (0, 2, 3), (3,), (0, 1, 2, 3))
"""Of four heads, in layer after layer."""


def made_of(source: Checkpoint, kept: dict[str, tuple[int, ...]], dtype: str | None = None) -> Rewrite:
    return rewrite_heads(
        source,
        HeadPlan(kept, dtype, {"command": "prune-heads", "source": {"fingerprint": source.fingerprint}}),
    )


def decided(source: Checkpoint, options: HeadOptions) -> Rewrite:
    return made_of(source, dict(plan_heads(source, options).kept), options.dtype)


def generated(model: Any) -> Any:
    """Logits `[batch, 6, vocabulary]` of six greedy steps with a cache, after padded sources of two lengths."""
    import torch

    generator = torch.Generator().manual_seed(1)
    source = torch.randint(4, model.config.vocab_size, (2, 7), generator=generator)
    mask = torch.ones_like(source)
    gap = slice(5, None) if model.config.is_encoder_decoder else slice(None, 2)  # the last token goes on
    mask[1, gap] = 0
    source[1, gap] = model.config.pad_token_id
    steps = {"min_new_tokens": 6, "max_new_tokens": 6, "use_cache": True, "do_sample": False, "num_beams": 1}
    found = model.generate(
        input_ids=source, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **steps
    )
    return torch.stack(found.logits, dim=1).float()


class HeadPruning(MethodContract):
    """Uneven layers, one of them without heads; a derived class says of which model."""

    layers: tuple[AttentionLayer, ...] = ()

    @pytest.fixture(autouse=True)
    def _hooks(self) -> Any:
        with ExitStack() as self.hooks:
            yield

    def keep_everything(self, source: Checkpoint) -> Rewrite:
        return decided(source, HeadOptions(metric="random", ratio=0.0, dtype=self.cast))

    def reduce(self, source: Checkpoint) -> Rewrite:
        self.layers = source.layout.attentions
        kept = {layer.name: ids for layer, ids in zip(self.layers, cycle(KEPT), strict=False)}
        made = made_of(source, kept, self.cast)
        assert any(ids == () for ids in made.structure.heads.values())
        assert "auto_map" in made.config  # not a stock model
        return made

    def impossible(self, source: Checkpoint) -> Rewrite:
        return decided(source, HeadOptions(metric="random", count=10_000))

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        from prunecli.modules.attention import masked_heads

        self.hooks.enter_context(masked_heads(model, self.layers, masks(self.layers, rewrite)))

    def test_cached_generation_equals_that_of_the_masked_original(self, source: Path, tmp_path: Path) -> None:
        import torch

        written(source, self.reduce, tmp_path / "out")
        original, reduced = self.original(source), load(tmp_path / "out")
        if not original.can_generate():
            pytest.skip("an encoder alone generates nothing")
        whole = generated(original)
        with open_model(source) as opened:
            self.mask(original, self.reduce(opened))
        masked = generated(original)
        assert not torch.allclose(whole, masked)
        torch.testing.assert_close(generated(reduced), masked, rtol=1e-5, atol=1e-5)

    def test_a_kind_without_any_head(self, source: Path, tmp_path: Path) -> None:
        import torch

        from prunecli.modules.attention import masked_heads

        with open_model(source) as opened:
            layers = opened.layout.attentions
        original = self.original(source)
        for kind in {layer.kind for layer in layers}:
            gone = {layer.name: () for layer in layers if layer.kind == kind}
            written(source, lambda opened: made_of(opened, gone, self.cast), tmp_path / kind)  # noqa: B023
            zeros = {layer.name: torch.zeros(layer.num_heads) for layer in layers if layer.name in gone}
            with masked_heads(original, layers, zeros):
                masked = logits_of(original)
            torch.testing.assert_close(logits(tmp_path / kind), masked, rtol=1e-5, atol=1e-5)

    def test_pruning_twice_equals_pruning_once(self, source: Path, tmp_path: Path) -> None:
        """Places in the file are not ids of the original: only those of the first step are."""

        def only(ids: set[int]) -> Any:
            return lambda opened: made_of(
                opened,
                {
                    layer.name: tuple(head for head in layer.heads if head in ids)
                    for layer in opened.layout.attentions
                },
                self.cast,
            )

        written(source, only({1, 2, 3}), tmp_path / "first")
        written(tmp_path / "first", only({1, 3}), tmp_path / "second")
        written(source, only({1, 3}), tmp_path / "direct")
        assert tensors(tmp_path / "second") == tensors(tmp_path / "direct")
        with open_model(tmp_path / "second") as second, open_model(tmp_path / "direct") as direct:
            assert second.structure.heads == direct.structure.heads
            assert second.structure.original_heads == direct.structure.original_heads
            assert second.config["model_type"] == direct.config["model_type"]


def masks(layers: tuple[AttentionLayer, ...], rewrite: Rewrite) -> dict[str, Any]:
    """xi_h of 2.3 for every attention that `rewrite` changes."""
    import torch

    kept = rewrite.structure.heads
    return {
        layer.name: torch.tensor([float(head in kept[layer.name]) for head in layer.heads])
        for layer in layers
        if layer.name in kept
    }


def tensors(directory: Path) -> dict[str, bytes]:
    with open_model(directory) as opened:
        return {name: opened.read(name).tobytes() for name in opened.tensors}


def nllb_moe(directory: Path, **options: Any) -> Path:
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    return tiny_nllb_moe(directory, layers=2, config=heads, **options)


class TestNllbMoe(HeadPruning, WrittenFiles):
    """From two shards."""

    def make_source(self, directory: Path) -> Path:
        return nllb_moe(directory, shards=2)

    def test_heads_and_experts_go_in_either_order(self, source: Path, tmp_path: Path) -> None:
        def experts(opened: Checkpoint) -> Rewrite:
            plan = plan_experts(opened, ExpertOptions(metric="random", amount=Amount(ratio=0.5)))
            return rewrite_experts(opened, ExpertPlan(plan.kept))

        written(source, experts, tmp_path / "experts")
        written(tmp_path / "experts", self.reduce, tmp_path / "one")
        written(source, self.reduce, tmp_path / "heads")
        written(tmp_path / "heads", experts, tmp_path / "other")
        assert tensors(tmp_path / "one") == tensors(tmp_path / "other")
        with open_model(tmp_path / "one") as one, open_model(tmp_path / "other") as other:
            assert (one.structure.heads, one.structure.experts) == (
                other.structure.heads,
                other.structure.experts,
            )
            assert one.config["model_type"] == other.config["model_type"]


class TestNllbMoeToFloat16(HeadPruning, WrittenFiles):
    """With a cast, of pickled shards."""

    cast = "F16"

    def make_source(self, directory: Path) -> Path:
        return nllb_moe(directory, shards=2, pickled=True)


class TestM2M100(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "m2m_100")


class TestMarian(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "marian")


class TestPegasus(HeadPruning):
    """Its positions are frozen parameters, computed and not stored."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "pegasus")


class TestBart(HeadPruning, WrittenFiles):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "bart")


class TestMBart(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "mbart")


class TestT5(HeadPruning, WrittenFiles):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "t5")


class TestGatedT5(HeadPruning, WrittenFiles):
    """Version 1.1."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "t5", **GATED_T5)


class TestMT5(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "mt5")


class TestBert(HeadPruning, WrittenFiles):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "bert")


class TestBertClassifier(HeadPruning, WrittenFiles):
    """Its head is carried along."""

    def make_source(self, directory: Path) -> Path:
        names = ["BertForSequenceClassification"]
        return tiny_family(directory, "bert", architectures=names, num_labels=3)


class TestRoberta(HeadPruning, WrittenFiles):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "roberta")


class TestXLMRoberta(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "xlm-roberta")


class TestDistilBert(HeadPruning, WrittenFiles):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "distilbert")


class TestNarrowOPT(HeadPruning, WrittenFiles):
    """Embeddings narrower than the layers, norms after them."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "opt", **NARROW_OPT)


class TestGPT2(HeadPruning, WrittenFiles):
    """Query, key and value in one tensor, stored `[in, out]`."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "gpt2")


class TestLlama(HeadPruning, WrittenFiles):
    """Groups of two query heads on one key/value head."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "llama")


class TestMistral(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "mistral")


class TestQwen2(HeadPruning):
    """Biases to queries, keys and values, none after them."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "qwen2")


class TestQwen3(HeadPruning):
    """Norms of the width of one head, which all heads share."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "qwen3")


class TestGemma2(HeadPruning):
    """Layers that see a window beside such that see all."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "gemma2")


class TestGemma3(HeadPruning):
    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "gemma3_text")


class TestPhi3(HeadPruning, WrittenFiles):
    """Two query heads, a key and a value to each head of one fused matrix."""

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "phi3")


class TestEvenLlama(HeadPruning, WrittenFiles):
    """To the stock layout, with a cast."""

    cast = "BF16"

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "llama", **TIED_LLAMA)

    def reduce(self, source: Checkpoint) -> Rewrite:
        self.layers = source.layout.attentions
        kept = {layer.name: ids for layer, ids in zip(self.layers, cycle(((1, 3), (0, 1))), strict=False)}
        made = made_of(source, kept, self.cast)
        assert made.config["model_type"] == "llama"
        counts = {key: made.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        assert counts == {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
        return made


def test_every_family_is_tested(tmp_path: Path) -> None:
    from prunecli.architectures import FAMILIES

    assert set(FAMILIES) == {"nllb-moe", *MODEL_TYPES}
    tested = set()
    for kind in HeadPruning.__subclasses__():
        with open_model(kind().make_source(tmp_path / kind.__name__)) as source:
            tested.add(source.model_type)
    assert tested == set(FAMILIES)
