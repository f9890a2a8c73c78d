from fractions import Fraction
from pathlib import Path
from typing import Any

from prunecli.methods.options import ExpertOptions
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.opening import shim_classes
from prunecli.model.rewrite import Rewrite
from prunecli.modules.loading import sparse_ffns
from tests.contracts.method_contract import MethodContract, WrittenFiles, made_of
from tests.gates import choose_among
from tests.structures import kept_ids
from tests.tiny import tiny_nllb_moe


class TestExpertPruning(MethodContract, WrittenFiles):
    """From two shards to a layout that no stock model has."""

    cases = ("nllb-moe",)
    keep_everything = ExpertOptions(metric="random", ratio=0.0)
    impossible = ExpertOptions(metric="random", ratio=0.95)

    def make_source(self) -> Path:
        return tiny_nllb_moe(self.path, experts=8, layers=4, router_bias=True, shards=2)

    def reduce(self, source: Checkpoint) -> Rewrite:
        made = made_of(
            source, ExpertOptions(metric="random", ratio=0.6, balance=Fraction(3), seed=3, dtype=self.cast)
        )
        assert len({len(ids) for ids in kept_ids(made.structure, "expert").values()}) > 1
        assert shim_classes(made.config)
        return made

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        for layer, module in sparse_ffns(model).items():
            choose_among(module, rewrite.structure.units(layer, "expert", module.num_experts).kept)


class TestEvenExpertPruning(TestExpertPruning):
    """From one file to as many experts in every layer."""

    def make_source(self) -> Path:
        return tiny_nllb_moe(self.path, experts=8, layers=4)

    def reduce(self, source: Checkpoint) -> Rewrite:
        made = made_of(source, ExpertOptions(metric="random", experts_per_layer=3, dtype=self.cast))
        assert {len(ids) for ids in kept_ids(made.structure, "expert").values()} == {3}
        assert made.config["model_type"] == "nllb-moe"
        return made


class TestEvenExpertPruningToBfloat16(TestEvenExpertPruning):
    """With a cast, of one pickled file."""

    cast = "BF16"

    def make_source(self) -> Path:
        return tiny_nllb_moe(self.path, experts=8, layers=4, pickled=True)
