from typing import Any

import torch

from prunecli.methods.options import LayerOptions
from prunecli.methods.sharing.options import AttentionOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.selection.cut import cut
from tests.contracts.method_contract import (
    CachedGeneration,
    InSteps,
    Method,
    MethodContract,
    WrittenFiles,
    assert_near,
    assert_same,
    generated,
    logits,
    logits_of,
    made_of,
    written,
)
from tests.families.records import BRANCHES, CASES
from tests.ffn_layouts import weights, write_copy
from tests.opening import load
from tests.reference import attention as reference
from tests.reference.masks import passed_by
from tests.selections import kept_heads


def options_of(case: str) -> AttentionOptions:
    if CASES[case].task == "translation":
        return AttentionOptions(encoder="share", decoder="drop", cross="share")
    return AttentionOptions(preset="Shared")


def sides(layers: list[str]) -> list[list[str]]:
    """The layers of each stack, the encoder's first."""
    stacks = dict.fromkeys(layer.rpartition(".")[0] for layer in layers)
    ordered = sorted(stacks, key=lambda stack: "encoder" not in stack)
    return [[layer for layer in layers if layer.rpartition(".")[0] == stack] for stack in ordered]


def windows(model: Any, layers: list[str]) -> list[list[str]]:
    """Layers that see alike."""
    types = getattr(model.config, "layer_types", None) or [""] * len(layers)
    return [
        [layer for layer, own in zip(layers, types, strict=True) if own == kind]
        for kind in dict.fromkeys(types)
    ]


class AttentionSharing(Method):
    """Encoder and cross-attention shared and none in the decoder; or all shared, where there is one stack."""

    keep_everything = AttentionOptions(decoder="keep")
    impossible = AttentionOptions(groups=(7,))

    @property
    def names(self) -> tuple[reference.AttentionNames, ...]:
        return reference.names_of(CASES[self.case].layout_of or self.case)

    def reduce(self, source: Checkpoint) -> Rewrite:
        made = made_of(source, options_of(self.case))
        assert "auto_map" in made.config  # not a stock model
        return made

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        held = weights(self.path)
        stacks = sides(reference.layers_of(held))
        if len(stacks) == 2:
            own, cross = self.names
            groups = [(stacks[0], own), (stacks[1], cross)]
            self.drop(model, stacks[1], own)
        else:
            groups = [(members, self.names[0]) for members in windows(model, stacks[0])]
        for members, attention in groups:
            for name, value in reference.shared(held, members, attention).items():
                model.get_parameter(name).data.copy_(torch.tensor(value))

    def drop(self, model: Any, layers: list[str], attention: reference.AttentionNames) -> None:
        case, outputs = CASES[self.case], [f"{layer}.{attention.output}" for layer in layers]
        post_norm = case.ffns.post_norm or not case.config.get("do_layer_norm_before", True)
        norms = [f"{layer}.{norm}" for layer in layers for norm in attention.norms if post_norm]
        self.hooks.enter_context(passed_by(model, norms, outputs))


class TestEveryFamily(AttentionSharing, MethodContract):
    cases = (*(name for name in BRANCHES if name != "bert-untied"), "qwen3", "smollm3")


class TestEveryDecoder(AttentionSharing, CachedGeneration):
    def test_beams_do_not_depend_on_the_cache(self, source):
        model = load(written(source, self.reduce, "out"))
        steps = {"min_new_tokens": 5, "max_new_tokens": 5, "num_beams": 3, "do_sample": False}
        ids = torch.tensor([[5, 6, 7, 9, 2], [8, 9, 11, 12, 2]])
        cached, anew = (model.generate(ids, use_cache=use_cache, **steps) for use_cache in (True, False))
        assert torch.equal(cached, anew)


class TestFiles(AttentionSharing, WrittenFiles):
    pass


class TestEveryLayout(AttentionSharing):
    def test_a_shared_attention_is_stored_and_held_once(self, source):
        out = written(source, self.reduce, "out")
        stored, model = weights(out), load(out)
        before, layers = weights(source), reference.layers_of(weights(source))
        stack = sides(layers)[0]
        for members in windows(model, stack) if len(self.names) == 1 else [stack]:
            for name in reference.own_tensors(before, members[0], self.names[0]):
                assert [layer for layer in members if f"{layer}.{name}" in stored] == members[:1]
                assert len({id(model.get_parameter(f"{layer}.{name}")) for layer in members}) == 1
        model.save_pretrained("saved")
        assert weights("saved").keys() >= stored.keys()
        assert torch.equal(logits("saved"), logits_of(model))

    def test_dropping_all(self, source):
        kinds = {"encoder": "drop", "decoder": "drop", "cross": "drop"}
        task = CASES[self.case].task
        if task != "translation":
            kinds = {"decoder" if task == "lm" else "encoder": "drop"}
        out = written(source, AttentionOptions(**kinds), "out")
        original, stacks = self.original(source), sides(reference.layers_of(weights(source)))
        for stack in stacks:
            self.drop(original, stack, self.names[0])
        if len(stacks) == 2:
            self.drop(original, stacks[1], self.names[1])
        reduced = load(out)
        assert_near(logits_of(reduced), logits_of(original))
        if reduced.can_generate():
            assert_near(generated(reduced), generated(original))


class TestComposition(AttentionSharing, InSteps):
    cases = ("m2m_100", "t5", "gpt2", "phi3", "qwen3", "bert")

    def one_kind(self) -> dict[str, Any]:
        return {"decoder" if CASES[self.case].task == "lm" else "encoder": "share"}

    def heads(self, source: Checkpoint) -> Rewrite:
        """Heads, equal for all attentions that share."""
        return cut(source, kept_heads({layer.name: (1, 3) for layer in source.layout.own_attentions}))

    def test_heads_before_and_after_are_the_same(self, source):
        share = AttentionOptions(**self.one_kind())
        one = written(written(source, share, "a"), self.heads, "ab")
        two = written(written(source, self.heads, "b"), share, "ba")
        assert_same(one, two)

    def steps(self) -> tuple[Any, Any, Any]:
        """Shared in groups, then dropped."""
        grouped = AttentionOptions(**self.one_kind(), groups=(3,), init="last")
        dropped = AttentionOptions(**dict.fromkeys(self.one_kind(), "drop"))
        return grouped, dropped, dropped

    def test_the_owners_layer_may_go(self, source):
        """The result equals the merged weights in every layer, of which one goes."""
        side = next(iter(self.one_kind()))

        shorter = LayerOptions(remove=f"{side}:0")
        shared = written(source, AttentionOptions(**self.one_kind()), "shared")
        short = written(shared, shorter, "short")
        attentions = [layer for layer in open_model(short).layout.attentions if layer.kind == side]
        assert [layer.is_shared for layer in attentions] == [False, True]
        held = weights(source)
        held |= reference.shared(held, sides(reference.layers_of(held))[0], self.names[0])
        copies = written(write_copy(source, "copies", held), shorter, "short-copies")
        assert_near(logits(short), logits(copies))
