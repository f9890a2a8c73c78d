"""What statistics of texts say of experts: whose count, what each is worth, and which saw too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import measure_texts, metric_values
from prunecli.results.gates import TEXT_SUMS, GateStatistics, GateSums
from tests.gates import gate_statistics
from tests.reference import routed_outputs

NAMES = ("model.layers.0.mlp", "model.layers.1.mlp")
EXPERTS = 6


def tokens_of(seed: int, tokens: int, among: Sequence[int]) -> list[routed_outputs.Token]:
    draw = np.random.default_rng(seed)
    return [
        (draw.permutation(among)[:2].tolist(), draw.random(2).tolist(), draw.random(2).tolist())
        for _ in range(tokens)
    ]


TEXTS = {
    "code": (tokens_of(0, 40, (0, 1, 2)), tokens_of(1, 40, (0, 1, 2, 3))),
    "web": (tokens_of(2, 30, (2, 3, 4)), tokens_of(3, 30, (3, 4, 5))),
    "note": (tokens_of(4, 5, (5, 0)), tokens_of(5, 5, (4, 5))),
}


def statistics() -> GateStatistics:
    entries = {}
    for text, layers in TEXTS.items():
        counted = [routed_outputs.sums(tokens, EXPERTS) for tokens in layers]
        arrays = {name: np.array([c[name] for c in counted]) for name in TEXT_SUMS[1:]}
        entries[text] = GateSums(tokens=np.array([len(tokens) for tokens in layers]), **arrays)
    return gate_statistics("sha256:0", "qwen3_moe", "text", NAMES, EXPERTS, 2, entries)


AXES = statistics().axes


@pytest.mark.parametrize("texts", [(), ("web", "code")])
@pytest.mark.parametrize("metric", ["reap", "frequency", "importance"])
def test_values_are_those_of_the_tokens_of_the_texts(texts: tuple[str, ...], metric: str) -> None:
    measured = measure_texts(statistics(), texts)
    assert measured.granularity is None
    values = metric_values(metric, measured.sums, measured.statistics)
    for row, name in enumerate(NAMES):
        tokens = [token for text in set(texts or TEXTS) for token in TEXTS[text][row]]
        wanted = routed_outputs.metric(metric, tokens, EXPERTS)
        np.testing.assert_allclose(values[f"{name}.experts"], wanted, rtol=1e-12)


def test_experts_that_saw_little_are_found_among_those_that_are_held() -> None:
    axes = [replace(axis, ids=ids) for axis, ids in zip(AXES, ((0, 1, 2, 4), (0, 1, 2, 3)), strict=True)]
    measured = measure_texts(statistics(), ("code",))
    assert measured.few(axes, 10) == {NAMES[0]: (4,)}  # 3 and 5 saw nothing either, but are gone
    assert measured.few(axes, 0) == {}
    for least in (1, 5, 20, 1000):
        few = measure_texts(statistics(), ("note",)).few(AXES, least)
        for row, name in enumerate(NAMES):
            seen = [len(routed_outputs.visits(TEXTS["note"][row], expert)) for expert in range(EXPERTS)]
            assert few.get(name, ()) == tuple(e for e in range(EXPERTS) if seen[e] < least)


def test_an_unknown_text_is_refused_with_near_names() -> None:
    with pytest.raises(StatisticsError, match="no text 'cod'") as refused:
        measure_texts(statistics(), ("cod",))
    assert refused.value.remedy == "Did you mean code?"
