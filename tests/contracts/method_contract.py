"""What every method of reduction must do; a test file per method derives from `MethodContract` and fills it in."""

import hashlib
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from prunecli.errors import PruneError
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.embeddings.plan import fit_embeddings, plan_embeddings, rewrite_embeddings
from prunecli.methods.experts.plan import plan_experts
from prunecli.methods.options import ExpertOptions, HeadOptions, LayerOptions, NarrowOptions
from prunecli.methods.plans import plan_heads, plan_layers, plan_widths
from prunecli.methods.sharing.options import AttentionOptions, FfnOptions
from prunecli.methods.sharing.plan import plan_attention, plan_ffn, rewrite_shared
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.rewrite import Rewrite
from prunecli.options import Options
from prunecli.pipeline import apply
from prunecli.results.decisions import FILE
from prunecli.selection.cut import Selection, cut
from prunecli.tensors.dtypes import numpy_dtype
from prunecli.tensors.reader import TensorInfo
from tests.families import tiny_family
from tests.families.records import CASES, DISTINCT
from tests.opening import load
from tests.tiny import config_of

Decide = Callable[[Checkpoint], Rewrite] | Options | Selection
"""A decision, what is kept, or the options of a command, which decides by them."""
COMMANDS: Mapping[type, tuple[Callable[..., Any], Callable[..., Rewrite]]] = {
    ExpertOptions: (plan_experts, cut),
    HeadOptions: (plan_heads, cut),
    NarrowOptions: (plan_widths, cut),
    LayerOptions: (plan_layers, cut),
    FfnOptions: (plan_ffn, rewrite_shared),
    AttentionOptions: (plan_attention, rewrite_shared),
    EmbeddingOptions: (
        plan_embeddings,
        lambda source, plan: rewrite_embeddings(source, plan, fit_embeddings(source, plan)),
    ),
    Selection: (lambda _, chosen: chosen, cut),
}
"""Kind of options -> what chooses by them, and what makes a rewrite of the choice."""


class Method:
    """Answers of a method for the contracts below.

    Attributes:
        cases: the tiny checkpoints that the contract is tested with; by default one of each layout of tensors.
        cast: safetensors type that both decisions write, None: as stored. The original is then the rounded one.
        keeps_order: whether the tensors lie in the order of the source.
        keep_everything: the decision that removes nothing.
        reduce: a decision that removes a part, chosen without order or evenness.
        impossible: a decision with a budget that cannot be met.
    """

    keep_everything: Decide
    reduce: Decide
    impossible: Decide
    cases: Collection[str] = DISTINCT
    cast: str | None = None
    keeps_order: bool = True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test with each of `cases`, those of one case together: its class is asked once."""
        metafunc.parametrize("case", self.cases, scope="module")

    @pytest.fixture(autouse=True)
    def _prepare(self, case: str) -> Any:
        """The case, paths of the source and of a folder; contexts in `hooks` end with the test."""
        self.case, self.path, self.folder = case, Path("source"), Path("folder")
        with ExitStack() as self.hooks:
            yield

    def make_source(self) -> Path:
        """Write a tiny checkpoint that the method can reduce to `path`."""
        return tiny_family(self.path, self.case)

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        """Switch off in the original model what `rewrite` removes, or put there what it stands for."""
        raise AssertionError("a contract answers this")

    def masked_logits(self, model: Any, rewrite: Rewrite) -> Any:
        """Logits of the masked original: `logits_of` it, where the vocabulary is the same."""
        self.mask(model, rewrite)
        return logits_of(model)

    def original(self, source: Path) -> Any:
        """The model to compare with, in float32; where the method casts, of the rounded parameters."""
        model = load(source)
        if self.cast is not None:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[self.cast]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.to(dtype))
        return model

    @pytest.fixture
    def source(self) -> Path:
        return self.make_source()


class MethodContract(Method):
    """A reduced model is the masked original; it opens from its own files alone."""

    def test_reduced_logits_equal_those_of_the_masked_original(self, source: Path) -> None:
        original = self.original(source)
        whole = logits_of(original)
        opened = open_model(source)
        rewrite = made_of(opened, self.reduce)
        apply(opened, rewrite, "out")
        masked = self.masked_logits(original, rewrite)
        matters = whole.shape != masked.shape or not torch.allclose(whole, masked)
        assert matters, "the reduction must matter for this test to mean something"
        shutil.rmtree(source)
        Path("elsewhere").mkdir()
        moved = Path("out").rename("elsewhere/moved")
        assert_near(logits(moved), masked)


class CachedGeneration(Method):
    """Step by step too, with a cache, it is the masked original."""

    cases = tuple(case for case in DISTINCT if CASES[case].task != "mlm")

    def test_cached_generation_equals_that_of_the_masked_original(self, source: Path) -> None:
        written(source, self.reduce, "out")
        original, reduced = self.original(source), load("out")
        whole = generated(original)
        self.mask(original, made_of(open_model(source), self.reduce))
        masked = generated(original)
        assert not torch.allclose(whole, masked)
        assert_near(generated(reduced), masked)


class InSteps(Method):
    """A reduction in two steps is the reduction at once."""

    def steps(self) -> tuple[Decide, Decide, Decide]:
        """Decisions of the first step, of the second, and of both at once."""
        raise AssertionError("a contract answers this")

    def test_two_steps_equal_one(self, source: Path) -> None:
        first, second, direct = self.steps()
        written(source, first, "first")
        two = written("first", second, "second")
        one = written(source, direct, "direct")
        assert_same(two, one)


class WrittenFiles(Method):
    """Contracts that do not depend on a family's names.

    Cases: experts and two tied tables, another order of layers, fused tensors.
    """

    cases = ("nllb-moe", "t5", "phi3")

    @property
    def whole(self) -> Decide:
        """`keep_everything`, cast."""
        every = self.keep_everything
        return every if self.cast is None else every.updated(dtype=self.cast)

    def test_keeping_everything_is_bit_identical(self, source: Path) -> None:
        written(source, self.whole, "out")
        before = open_model(source)
        after = open_model("out")
        order = list if self.keeps_order else set
        assert order(before.tensors) == order(after.tensors)
        for name, info in before.tensors.items():
            dtype = self.cast or info.dtype
            assert after.info(name) == TensorInfo(name, dtype, info.shape)
            assert before.read(name).astype(numpy_dtype(dtype)).tobytes() == after.read(name).tobytes(), name
        if self.cast is None:
            assert before.fingerprint == after.fingerprint

    def test_a_result_can_be_rewritten_whole(self, source: Path) -> None:
        """Removed units stay removed, and are still recorded."""
        written(source, self.reduce, "once")
        written("once", self.whole, "twice")
        assert_same("once", "twice")

    def test_two_runs_write_exactly_these_files_and_leave_the_input(self, case: str, source: Path) -> None:
        shard_bytes = 10_000 if case == "nllb-moe" else 1_000_000
        before = stamped(source)
        out = written(source, self.reduce, "out", shard_bytes=shard_bytes)
        other = written(source, self.reduce, "other", shard_bytes=shard_bytes)
        assert digests(out) == digests(other)
        assert stamped(source) == before
        weights = {path.name for path in out.glob("*.safetensors")}
        count = len(weights)
        if shard_bytes == 1_000_000:
            assert weights == {"model.safetensors"}
        else:
            assert count > 1
            assert weights == {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
            weights.add("model.safetensors.index.json")
        own = {
            "config.json",
            "README.md",
            *([FILE] if made_of(open_model(source), self.reduce).decision is not None else []),
        }
        if "auto_map" in config_of(out):  # no stock model
            own.add("modeling_prunecli.py")
        carried = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
        carried &= {path.name for path in source.iterdir()}  # an encoder alone generates nothing
        assert {path.name for path in out.iterdir()} == weights | own | carried

    def test_an_impossible_budget_is_refused_before_any_file_exists(self, source: Path) -> None:
        with pytest.raises(PruneError) as caught:
            written(source, self.impossible, "out")
        assert 1 <= len(str(caught.value).splitlines()) <= 2
        assert [str(path) for path in Path().iterdir()] == ["source"]


def made_of(source: Checkpoint, decide: Decide) -> Rewrite:
    if callable(decide):
        return decide(source)
    plan, rewrite = COMMANDS[type(decide)]
    return rewrite(source, plan(source, decide))


def written(source: Checkpoint | Path | str, decide: Decide, output: Path | str, **options: Any) -> Path:
    opened = source if isinstance(source, Checkpoint) else open_model(source)
    apply(opened, made_of(opened, decide), output, **options)
    return Path(output)


def stamped(directory: Path) -> dict[str, tuple[int, str]]:
    """Relative path -> time of the last change and SHA-256 of every file below a directory."""
    return {
        name: ((directory / name).stat().st_mtime_ns, digest) for name, digest in digests(directory).items()
    }


def digests(directory: Path | str) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file()
    }


assert_near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
"""Two tensors differ by rounding."""


def assert_same(one: Path | str, other: Path | str) -> None:
    """Two results differ in their histories alone, and in what is told of these."""
    first, second = (digests(path).items() for path in (one, other))
    assert {name for name, _ in first ^ second} <= {"config.json", "README.md", FILE}
    first = open_model(one)
    second = open_model(other)
    assert replace(first.structure, history=()) == replace(second.structure, history=())
    assert {**first.config, "prunecli": None} == {**second.config, "prunecli": None}


def stock_model(out: Path, source: Path) -> Any:
    """The model of a result that plain transformers opens, saying what it says of the source."""
    config = config_of(out)
    assert "auto_map" not in config
    opens = partial(
        getattr(transformers, config["architectures"][0]).from_pretrained,
        output_loading_info=True,
        dtype=torch.float32,
    )
    model, report = opens(out)
    assert report == opens(source)[1]  # Pegasus' computed positions are missing from every checkpoint
    assert not any(report[key] for key in ("unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(directory: Path | str) -> Any:
    """Logits of the checkpoint in a directory on a fixed batch; see `logits_of`."""
    return logits_of(load(directory))


def logits_of(model: Any, inputs: Mapping[str, Any] | None = None) -> Any:
    """`[batch, length, vocabulary]` of `inputs` (`batch_for` its config), in float32 on the CPU.

    The length is the target's where the model has a decoder beside its encoder.
    """
    with torch.no_grad():
        return model(**(batch_for(model.config) if inputs is None else inputs)).logits.float()


def batch_for(config: Any) -> dict[str, Any]:
    """A fixed random batch with padding."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(4, config.vocab_size, (3, 9), generator=generator)
    target = torch.randint(4, config.vocab_size, (3, 6), generator=generator)
    mask = torch.ones_like(source)
    mask[1, 6:] = 0
    source[1, 6:] = config.pad_token_id
    targets = {"decoder_input_ids": target} if config.is_encoder_decoder else {}
    return {"input_ids": source, "attention_mask": mask, **targets}


def generated(model: Any) -> Any:
    """Logits `[batch, 6, vocabulary]` of six greedy steps with a cache, after padded sources of two lengths."""
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
