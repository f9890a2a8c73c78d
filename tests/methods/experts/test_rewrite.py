"""Which tensors a pruned checkpoint is made of: names, rows, shapes, types; nothing is written here."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prunecli.errors import UsageError
from prunecli.methods.experts.plan import ExpertPlan
from prunecli.methods.experts.rewrite import rewrite_experts
from prunecli.model.checkpoint import open_model
from prunecli.model.layout import resolve
from prunecli.tensors.stream import Copy, Rows
from tests.tiny import tiny_nllb_moe

LAYERS = tuple(f"model.{side}.layers.{n}.ffn" for side in ("encoder", "decoder") for n in (1, 3))
EVERY = tuple(range(8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "full", router_bias=True, shards=2)


kept_ids = st.sets(st.integers(0, 7), min_size=2).map(lambda ids: tuple(sorted(ids)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.dictionaries(st.sampled_from(LAYERS), kept_ids))
def test_outputs_are_what_a_model_of_that_structure_stores(
    kept: dict[str, tuple[int, ...]], model: Path
) -> None:
    with open_model(model) as checkpoint:
        reduced = rewrite_experts(checkpoint, ExpertPlan(kept))
        structure, outputs = reduced.structure, reduced.outputs
        wanted = resolve(checkpoint.require_architecture(), checkpoint.config, structure).shapes
    assert {output.name: output.shape for output in outputs} == wanted
    assert len({output.name for output in outputs}) == len(outputs)
    changed = {name: ids for name, ids in kept.items() if ids != EVERY}
    assert dict(structure.experts) == changed
    assert dict(structure.original_experts) == dict.fromkeys(changed, 8)


def test_kept_experts_are_renumbered_and_rows_follow(model: Path) -> None:
    with open_model(model) as checkpoint:
        reduced = rewrite_experts(checkpoint, ExpertPlan({LAYERS[0]: (1, 4, 6)}))
        structure, outputs = reduced.structure, reduced.outputs
        sources = {info: output for output in outputs for info in [output.name]}
        for new, old in enumerate((1, 4, 6)):
            for suffix in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
                output = sources[f"{LAYERS[0]}.experts.expert_{new}.{suffix}"]
                assert output.expression == Copy(f"{LAYERS[0]}.experts.expert_{old}.{suffix}")
        for router in ("weight", "bias"):
            name = f"{LAYERS[0]}.router.classifier.{router}"
            assert sources[name].expression == Rows(name, (1, 4, 6))
            assert sources[name].shape[0] == 3
        untouched = [output for output in outputs if not output.name.startswith(f"{LAYERS[0]}.")]
        assert all(output.expression == Copy(output.name) for output in untouched)
    assert structure.experts == {LAYERS[0]: (1, 4, 6)}


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"model.encoder.layers.0.ffn": (0, 1)}, "not a sparse layer"),
        ({LAYERS[0]: (0, 8)}, "has no expert 8"),
        ({LAYERS[0]: (0, 1, 1)}, "twice"),
        ({LAYERS[0]: (3,)}, "would keep 1 experts; the router picks 2"),
    ],
)
def test_what_cannot_be_kept_is_refused(kept: dict[str, tuple[int, ...]], message: str, model: Path) -> None:
    with open_model(model) as checkpoint, pytest.raises(UsageError, match=message):
        rewrite_experts(checkpoint, ExpertPlan(kept))
