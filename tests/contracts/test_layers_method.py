"""Removing layers keeps the contract of methods, in every declared family, and gives stock models."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from prunecli.errors import UnsupportedModelError, UsageError
from prunecli.methods.ffn.plan import FfnOptions, plan_ffn
from prunecli.methods.ffn.rewrite import rewrite_ffn
from prunecli.methods.heads.plan import HeadOptions, plan_heads
from prunecli.methods.heads.rewrite import rewrite_heads
from prunecli.methods.layers.plan import LayerOptions, plan_layers
from prunecli.methods.layers.rewrite import rewrite_layers
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from tests.contracts.method_contract import MethodContract, WrittenFiles, load, logits, logits_of, written
from tests.contracts.test_heads_method import generated, tensors
from tests.families import GATED_T5, LAYOUT_OF, MODEL_TYPES, NARROW_OPT, TRANSLATORS, tiny_family
from tests.tiny import tiny_nllb_moe

STACKS = {
    **dict.fromkeys(("nllb-moe", *TRANSLATORS), ("model.encoder.layers", "model.decoder.layers")),
    **dict.fromkeys(("t5", "mt5"), ("encoder.block", "decoder.block")),
    "bert": ("bert.encoder.layer",),
    **dict.fromkeys(("roberta", "xlm-roberta"), ("roberta.encoder.layer",)),
    "distilbert": ("distilbert.transformer.layer",),
    "gpt2": ("transformer.h",),
    "opt": ("model.decoder.layers",),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"), ("model.layers",)
    ),
}
"""Where the layers of each family lie, restated by hand."""


def made_of(source: Checkpoint, options: LayerOptions) -> Rewrite:
    return rewrite_layers(source, plan_layers(source, options))


@contextmanager
def without(model: Any, names: list[str]) -> Any:
    """These layers give the states that they are given; T5's first still makes the position bias for all."""

    def hook(_: Any, arguments: Any, options: Any, output: Any) -> Any:
        given = arguments[0] if arguments else options["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


class LayerPruning(MethodContract):
    """The first layer of each stack goes, which no regular pattern would remove."""

    case = "m2m_100"
    changes: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _hooks(self) -> Any:
        with ExitStack() as self.hooks:
            yield

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, self.case, **self.changes)

    @property
    def both(self) -> bool:
        return len(STACKS[self.case]) > 1

    def keep_everything(self, source: Checkpoint) -> Rewrite:
        return made_of(source, LayerOptions(count=0, metric="last", dtype=self.cast))

    def reduce(self, source: Checkpoint) -> Rewrite:
        layers = "encoder:0,decoder:0" if self.both else "0"
        return made_of(source, LayerOptions(layers=layers, dtype=self.cast))

    def impossible(self, source: Checkpoint) -> Rewrite:
        return made_of(source, LayerOptions(count=99, metric="random"))

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        self.hooks.enter_context(without(model, [f"{stack}.0" for stack in STACKS[self.case]]))

    def test_it_is_a_stock_model(self, source: Path, tmp_path: Path) -> None:
        import torch
        import transformers

        out = written(source, self.reduce, tmp_path / "out")
        with open_model(out) as opened:
            assert "auto_map" not in opened.config
            name = opened.config["architectures"][0]
        opens = partial(
            getattr(transformers, name).from_pretrained, output_loading_info=True, dtype=torch.float32
        )
        model, report = opens(out)
        assert report == opens(source)[1]  # Pegasus' computed positions are missing from every checkpoint
        assert not (report["unexpected_keys"])
        assert not (report["mismatched_keys"])
        torch.testing.assert_close(logits_of(model.eval()), logits(out), rtol=1e-5, atol=1e-5)

    def test_cached_generation_equals_that_of_the_masked_original(self, source: Path, tmp_path: Path) -> None:
        import torch

        out = written(source, self.reduce, tmp_path / "out")
        original, reduced = self.original(source), load(out)
        if not original.can_generate():
            pytest.skip("an encoder alone generates nothing")
        with open_model(source) as opened:
            self.mask(original, self.reduce(opened))
        torch.testing.assert_close(generated(reduced), generated(original), rtol=1e-5, atol=1e-5)

    def test_removing_twice_equals_removing_at_once(self, source: Path, tmp_path: Path) -> None:
        """Layers 0 and 2 of three; the second time the last one is number 1."""
        side = "encoder:" if self.both else ""

        def removing(layers: str) -> Any:
            return lambda opened: made_of(opened, LayerOptions(layers=f"{side}{layers}", dtype=self.cast))

        written(source, removing("0"), tmp_path / "first")
        written(tmp_path / "first", removing("1"), tmp_path / "second")
        written(source, removing("0,2"), tmp_path / "direct")
        assert tensors(tmp_path / "second") == tensors(tmp_path / "direct")
        with open_model(tmp_path / "second") as second, open_model(tmp_path / "direct") as direct:
            assert second.structure.layers == direct.structure.layers
            assert list(second.structure.layers.values()) == [(1, 3) if self.case == "nllb-moe" else (1,)]
            own = [{k: v for k, v in one.config.items() if k != "prunecli"} for one in (second, direct)]
            assert own[0] == own[1]

    @pytest.mark.parametrize("method", ["heads", "ffns"])
    def test_layers_and_other_parts_go_in_either_order(
        self, method: str, source: Path, tmp_path: Path
    ) -> None:
        """Heads of the layers that stay; FFNs shared by all, whose holder goes."""

        def other(opened: Checkpoint) -> Rewrite:
            if method == "ffns":
                treatment = {layer.side: "share" for layer in opened.layout.ffns}
                options = FfnOptions(**treatment, init="last", dense_only=True)
                return rewrite_ffn(opened, plan_ffn(opened, options))
            return rewrite_heads(opened, plan_heads(opened, HeadOptions(metric="random", ratio=0.3)))

        written(source, self.reduce, tmp_path / "layers")
        written(source, other, tmp_path / "other")
        written(tmp_path / "other", self.reduce, tmp_path / "both")
        original = load(tmp_path / "other")
        with without(original, [f"{stack}.0" for stack in STACKS[self.case]]):
            masked = logits_of(original)
        import torch

        torch.testing.assert_close(logits(tmp_path / "both"), masked, rtol=1e-5, atol=1e-5)
        if method == "ffns":
            written(tmp_path / "layers", other, tmp_path / "swapped")
            assert tensors(tmp_path / "both") == tensors(tmp_path / "swapped")
            with open_model(tmp_path / "both") as both, open_model(tmp_path / "swapped") as swapped:
                assert both.structure.ffn == swapped.structure.ffn
                assert both.structure.layers == swapped.structure.layers


class TestNllbMoe(LayerPruning, WrittenFiles):
    """Every second layer is sparse; without the first these are 0 and 2, which no config of its own can say."""

    case = "nllb-moe"

    def make_source(self, directory: Path) -> Path:
        heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        return tiny_nllb_moe(directory, config=heads, shards=2)

    def test_it_is_a_stock_model(self, source: Path, tmp_path: Path) -> None:
        """It never is; the layers that are sparse are those that were."""
        out = written(source, self.reduce, tmp_path / "out")
        with open_model(out) as opened:
            assert [mixture.layer for mixture in opened.mixtures] == [0, 2, 0, 2]
            assert opened.structure.to_json()["version"] == 2


class TestM2M100(LayerPruning):
    case = "m2m_100"


class TestMarian(LayerPruning):
    case = "marian"


class TestPegasus(LayerPruning):
    case = "pegasus"


class TestBart(LayerPruning, WrittenFiles):
    """Its config.json counts the encoder's layers twice, as transformers 4 wrote it."""

    case = "bart"
    changes: ClassVar[dict[str, Any]] = {"num_hidden_layers": 3}


class TestMBart(LayerPruning):
    case = "mbart"


class TestT5(LayerPruning, WrittenFiles):
    """The table of positions goes to the layer that is now the first; `num_decoder_layers` follows from another key."""

    case = "t5"

    def make_source(self, directory: Path) -> Path:
        return tiny_family(directory, "t5", num_decoder_layers=None)


class TestGatedT5(LayerPruning):
    case = "t5"
    changes: ClassVar[dict[str, Any]] = GATED_T5


class TestMT5(LayerPruning):
    case = "mt5"


class TestBert(LayerPruning, WrittenFiles):
    case = "bert"


class TestRoberta(LayerPruning, WrittenFiles):
    case = "roberta"


class TestXLMRoberta(LayerPruning):
    case = "xlm-roberta"


class TestDistilBert(LayerPruning, WrittenFiles):
    case = "distilbert"


class TestNarrowOPT(LayerPruning, WrittenFiles):
    case = "opt"
    changes: ClassVar[dict[str, Any]] = NARROW_OPT


class TestGPT2(LayerPruning, WrittenFiles):
    case = "gpt2"


class TestLlamaToBFloat16(LayerPruning, WrittenFiles):
    case = "llama"
    cast = "BF16"

    def test_layers_and_other_parts_go_in_either_order(self) -> None:
        pytest.skip("not of rounded weights")


class TestMistral(LayerPruning):
    case = "mistral"


class TestQwen2(LayerPruning):
    """Layers from a number on see a window."""

    case = "qwen2"
    changes: ClassVar[dict[str, Any]] = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }

    def test_windows_stay_with_their_layers(self, source: Path) -> None:
        with open_model(source) as opened:
            assert self.reduce(opened).config["max_window_layers"] == 0
            assert made_of(opened, LayerOptions(layers="1")).config["max_window_layers"] == 1


class TestQwen3(LayerPruning):
    """And where they are listed."""

    case = "qwen3"
    changes: ClassVar[dict[str, Any]] = {
        **TestQwen2.changes,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }


class TestGemma2(LayerPruning):
    """A window in every other layer, by a list or by a rule."""

    case = "gemma2"

    @pytest.mark.parametrize("changes", [{}, {"layer_types": None}])
    def test_windows_stay_with_their_layers(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with open_model(tiny_family(tmp_path / "source", "gemma2", **changes)) as opened:
            assert self.reduce(opened).config["layer_types"] == ["full_attention", "sliding_attention"]
            assert (
                made_of(opened, LayerOptions(layers="1")).config["layer_types"] == ["sliding_attention"] * 2
            )


class TestGemma2ByRule(TestGemma2):
    changes: ClassVar[dict[str, Any]] = {"layer_types": None}


class TestGemma3(LayerPruning):
    case = "gemma3_text"
    changes: ClassVar[dict[str, Any]] = {"layer_types": None, "sliding_window_pattern": 2}


class TestPhi3(LayerPruning, WrittenFiles):
    case = "phi3"


def test_every_family_is_tested() -> None:
    assert {kind.case for kind in LayerPruning.__subclasses__()} == {"nllb-moe", *MODEL_TYPES} == set(STACKS)
    files = {kind.case for kind in WrittenFiles.__subclasses__() if issubclass(kind, LayerPruning)}
    assert {"nllb-moe", *MODEL_TYPES} - set(LAYOUT_OF) <= files


def test_a_layer_that_knows_its_number_keeps_it(tmp_path: Path) -> None:
    source = tiny_family(tmp_path / "source", "gpt2", scale_attn_by_inverse_layer_idx=True)
    with open_model(source) as opened:
        with pytest.raises(UnsupportedModelError, match="depends on its number"):
            made_of(opened, LayerOptions(layers="0"))
        apply(opened, made_of(opened, LayerOptions(count=1, metric="last")), tmp_path / "out")
    model = load(source)
    with without(model, ["transformer.h.2"]):
        import torch

        torch.testing.assert_close(logits(tmp_path / "out"), logits_of(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", ["encoder:0-2", "decoder:0,1,encoder:0"])
def test_one_layer_of_each_stack_stays(tmp_path: Path, layers: str) -> None:
    source = tiny_family(tmp_path / "source", "bart")
    with open_model(source) as opened, pytest.raises(UsageError, match="would stay"):
        made_of(opened, LayerOptions(layers=layers))
