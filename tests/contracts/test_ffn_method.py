"""Sharing and dropping FFNs keeps the contract of methods, in every declared family."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.methods.experts.plan import ExpertPlan
from prunecli.methods.experts.rewrite import rewrite_experts
from prunecli.methods.ffn.plan import FfnOptions, plan_ffn
from prunecli.methods.ffn.rewrite import rewrite_ffn
from prunecli.methods.heads.plan import HeadPlan
from prunecli.methods.heads.rewrite import rewrite_heads
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from tests.contracts.method_contract import MethodContract, WrittenFiles, load, logits, logits_of, written
from tests.contracts.test_heads_method import generated, tensors
from tests.families import DECODERS, ENCODERS
from tests.ffn_layouts import LAYOUTS, tiny, weights
from tests.modules.test_ffn import without_ffn
from tests.reference import ffn as reference

ONE_SIDED = (*ENCODERS, *DECODERS)


def made_of(source: Checkpoint, options: FfnOptions) -> Rewrite:
    return rewrite_ffn(source, plan_ffn(source, options))


class FfnSharing(MethodContract):
    """An FFN of several side by side, narrowed; the decoder of a model with both has none."""

    case = "m2m_100"
    options = FfnOptions(config="SharedEncNoDec", init="concat", width=70)
    stored = 1

    @pytest.fixture(autouse=True)
    def _hooks(self) -> Any:
        with ExitStack() as self.hooks:
            yield

    def make_source(self, directory: Path) -> Path:
        self.path = tiny(directory, self.case)
        return self.path

    def keep_everything(self, source: Checkpoint) -> Rewrite:
        return made_of(source, FfnOptions(encoder="keep", dtype=self.cast))

    def reduce(self, source: Checkpoint) -> Rewrite:
        made = made_of(source, self.options)
        assert "auto_map" in made.config  # not a stock model
        return made

    def impossible(self, source: Checkpoint) -> Rewrite:
        return made_of(source, FfnOptions(config="OneWide", groups=(5,), dense_only=True))

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        """Weights of the merged FFN, by the reference, in each layer that shares it; dropped ones passed by."""
        layout, held = LAYOUTS[self.case], weights(self.path)
        gone, groups = [], {}
        for name, change in rewrite.structure.ffn.items():
            if change.removed:
                gone.append(name)
            else:
                groups.setdefault(change.shared_with or name, set()).update(
                    (change.shared_with or name, name)
                )
        for members in groups.values():
            own = [name for name in layout.names if name in members]
            ffns = [
                reference.read(
                    {suffix: held[f"{name}.{suffix}"] for suffix in layout.tensors}, layout.tensors
                )
                for name in own
            ]
            merged = self.merged(ffns)
            for name in own:
                put(model, name, reference.write(merged, layout.tensors))
        self.hooks.enter_context(without_ffn(model, layout, gone))

    def merged(self, ffns: list[reference.Ffn]) -> reference.Ffn:
        scaled = reference.scaled(reference.concat(ffns), 1 / len(ffns))
        return reference.narrowed(scaled, 70)

    def test_cached_generation_equals_that_of_the_masked_original(self, source: Path, tmp_path: Path) -> None:
        import torch

        written(source, self.reduce, tmp_path / "out")
        original, reduced = self.original(source), load(tmp_path / "out")
        if not original.can_generate():
            pytest.skip("an encoder alone generates nothing")
        with open_model(source) as opened:
            self.mask(original, self.reduce(opened))
        torch.testing.assert_close(generated(reduced), generated(original), rtol=1e-5, atol=1e-5)

    def test_a_shared_ffn_is_stored_once(self, source: Path, tmp_path: Path) -> None:
        out = written(source, self.reduce, tmp_path / "out")
        with open_model(out) as opened:
            owners = [
                name
                for name in LAYOUTS[self.case].names
                if any(key.startswith(f"{name}.{first(self.case)}") for key in opened.tensors)
            ]
            assert len(owners) == self.stored
            stored = {name: info.numel for name, info in opened.tensors.items()}
        held = {name: value.numel() for name, value in load(out).named_parameters()}  # each once
        aside = ("final_logits_bias", "embed_positions")  # a buffer; computed in Marian
        assert total(held, aside) == total(stored, aside)

    def test_widening_keeps_what_is_computed(self, source: Path, tmp_path: Path) -> None:
        """And gives the new units a gradient."""
        import torch

        side = "decoder" if self.case in DECODERS else "encoder"
        groups = 2 if self.case == "nllb-moe" else 3
        options = FfnOptions(**{side: "share"}, groups=(groups,), width=140, init="first", dense_only=True)
        out = written(source, lambda opened: made_of(opened, options), tmp_path / "out")
        torch.testing.assert_close(logits(out), logits_of(self.original(source)), rtol=1e-5, atol=1e-5)
        name = next(iter(LAYOUTS[self.case].names))
        model = load(out)
        model(**inputs_of(model)).logits.square().sum().backward()
        gradient = model.get_submodule(f"{name}.{LAYOUTS[self.case].output}").weight.grad
        axis = LAYOUTS[self.case].tensors[f"{LAYOUTS[self.case].output}.weight"]
        new = gradient.movedim(axis, 0)[130:]
        assert new.abs().amax(1).gt(0).float().mean() > 0.5

    def test_reducing_further_equals_reducing_at_once(self, source: Path, tmp_path: Path) -> None:
        """First one side, then the other; then a side that shares already is dropped."""
        if self.case in ONE_SIDED:
            pytest.skip("one side")
        steps = [FfnOptions(encoder="share", dense_only=True), FfnOptions(decoder="drop", dense_only=True)]
        one = written(source, lambda opened: made_of(opened, steps[0]), tmp_path / "one")
        two = written(one, lambda opened: made_of(opened, steps[1]), tmp_path / "two")
        both = FfnOptions(config="SharedEncNoDec", dense_only=True)
        direct = written(source, lambda opened: made_of(opened, both), tmp_path / "direct")
        assert tensors(two) == tensors(direct)
        none = FfnOptions(encoder="drop", decoder="drop", dense_only=True)
        last = written(two, lambda opened: made_of(opened, none), tmp_path / "none")
        assert tensors(last) == tensors(
            written(source, lambda opened: made_of(opened, none), tmp_path / "at-once")
        )


def total(sizes: dict[str, int], aside: tuple[str, ...]) -> int:
    return sum(size for name, size in sizes.items() if not any(part in name for part in aside))


def first(case: str) -> str:
    return next(iter(LAYOUTS[case].tensors))


def put(model: Any, name: str, made: dict[str, np.ndarray]) -> None:
    """These tensors in the place of an FFN's, of whatever width they are."""
    import torch

    for suffix, value in made.items():
        layer, _, kind = suffix.rpartition(".")
        module = model.get_submodule(f"{name}.{layer}")
        setattr(module, kind, torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)))
        if hasattr(module, "nf"):  # GPT-2's Conv1D reshapes by it
            module.nf = module.weight.shape[1]


def inputs_of(model: Any) -> dict[str, Any]:
    import torch

    tokens = torch.randint(4, model.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}


class TestNllbMoe(FfnSharing, WrittenFiles):
    """Its dense FFNs; the experts stay."""

    case = "nllb-moe"
    options = FfnOptions(config="SharedEncNoDec", init="concat", width=40, dense_only=True)

    def merged(self, ffns: list[reference.Ffn]) -> reference.Ffn:
        return reference.narrowed(reference.scaled(reference.concat(ffns), 1 / len(ffns)), 40)

    def keep_everything(self, source: Checkpoint) -> Rewrite:
        return made_of(source, FfnOptions(encoder="keep"))

    def test_experts_heads_and_ffns_go_in_any_order(self, source: Path, tmp_path: Path) -> None:
        steps = {"experts": experts, "heads": heads, "ffns": self.reduce}
        found = []
        for order in permutations(steps):
            at = source
            for number, step in enumerate(order):
                place = tmp_path / "-".join(order) / str(number)
                place.parent.mkdir(exist_ok=True)
                at = written(at, steps[step], place)
            with open_model(at) as opened:
                structure = opened.structure
                kept = structure.experts, structure.heads, structure.ffn, opened.config["model_type"]
            found.append((tensors(at), kept))
        assert all(one == found[0] for one in found)


def experts(source: Checkpoint) -> Rewrite:
    kept = {layer.name: layer.experts[1:4] for layer in source.require_mixtures()}
    return rewrite_experts(source, ExpertPlan(kept))


def heads(source: Checkpoint) -> Rewrite:
    kept = {layer.name: layer.heads[:1] for layer in source.layout.attentions[::2]}
    return rewrite_heads(source, HeadPlan(kept))


class TestM2M100(FfnSharing):
    pass


class TestMeanOfMarian(FfnSharing):
    case = "marian"
    stored = 2
    options = FfnOptions(config="SharedEncSharedDec", init="mean")

    def merged(self, ffns: list[reference.Ffn]) -> reference.Ffn:
        return reference.mean(ffns)


class TestBart(FfnSharing, WrittenFiles):
    case = "bart"


class TestSumInMBart(FfnSharing):
    case = "mbart"
    options = FfnOptions(config="SharedEncDec", init="concat", scale=1.0)

    def merged(self, ffns: list[reference.Ffn]) -> reference.Ffn:
        assert len(ffns) == 5
        return reference.concat(ffns)


class TestPegasus(FfnSharing):
    case = "pegasus"


class TestT5(FfnSharing, WrittenFiles):
    case = "t5"


class TestGatedT5(FfnSharing, WrittenFiles):
    case = "t5-gated"


class TestMT5(FfnSharing):
    case = "mt5"


class OneSided(FfnSharing):
    options = FfnOptions(config="Shared", init="concat", width=70)

    def test_dropping_all(self, source: Path, tmp_path: Path) -> None:
        import torch

        out = written(source, lambda opened: made_of(opened, FfnOptions(config="No")), tmp_path / "out")
        original = self.original(source)
        with without_ffn(original, LAYOUTS[self.case], list(LAYOUTS[self.case].names)):
            torch.testing.assert_close(logits(out), logits_of(original), rtol=1e-5, atol=1e-5)


class TestBert(OneSided, WrittenFiles):
    case = "bert"
    options = FfnOptions(config="SharedEnc", init="concat", width=70)


class TestRoberta(OneSided, WrittenFiles):
    case = "roberta"


class TestXLMRoberta(OneSided):
    case = "xlm-roberta"
    options = FfnOptions(config="SharedEnc", init="concat", width=70)


class TestDistilBert(OneSided, WrittenFiles):
    case = "distilbert"
    options = FfnOptions(config="SharedEnc", init="concat", width=70)


class TestOPT(OneSided, WrittenFiles):
    """Its FFNs take and give tokens without their sentences."""

    case = "opt"


class TestGPT2(OneSided, WrittenFiles):
    case = "gpt2"
    options = FfnOptions(config="SharedDec", init="concat", width=70)


class TestLlama(OneSided, WrittenFiles):
    case = "llama"


class TestMistral(OneSided):
    case = "mistral"


class TestQwen2(OneSided):
    case = "qwen2"


class TestQwen3(OneSided):
    case = "qwen3"


class TestGemma2(OneSided):
    case = "gemma2"


class TestGemma3(OneSided):
    case = "gemma3_text"


class TestPhi3(OneSided, WrittenFiles):
    """Gate and up in one matrix."""

    case = "phi3"


class TestLastOfLlamaToBFloat16(OneSided, WrittenFiles):
    """With a cast."""

    cast = "BF16"
    case = "llama"
    options = FfnOptions(config="Shared", init="last", dtype="bfloat16")

    def merged(self, ffns: list[reference.Ffn]) -> reference.Ffn:
        return ffns[-1]

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        layers = model.model.layers
        for layer in layers[:-1]:
            layer.mlp.load_state_dict(layers[-1].mlp.state_dict())

    def test_widening_keeps_what_is_computed(self, source: Path, tmp_path: Path) -> None:
        pytest.skip("not of rounded weights")

    def test_dropping_all(self, source: Path, tmp_path: Path) -> None:
        pytest.skip("not of rounded weights")


def test_every_layout_is_tested() -> None:
    from prunecli.architectures import FAMILIES

    kinds = [FfnSharing, *FfnSharing.__subclasses__(), *OneSided.__subclasses__()]
    assert {kind.case for kind in kinds} == set(LAYOUTS)
    assert {case.removesuffix("-gated") for case in LAYOUTS} == set(FAMILIES)


def test_an_even_width_is_a_stock_model(tmp_path: Path) -> None:
    """Each layer of a group of its own, all of another width."""
    import torch

    source = tiny(tmp_path / "source", "llama")
    out = tmp_path / "out"
    with open_model(source) as opened:
        apply(opened, made_of(opened, FfnOptions(decoder="share", groups=(3,), width=64)), out)
    with open_model(out) as made:
        assert (made.config["model_type"], made.config["intermediate_size"]) == ("llama", 64)
    torch.testing.assert_close(logits(out), logits(source), rtol=1e-5, atol=1e-5)
