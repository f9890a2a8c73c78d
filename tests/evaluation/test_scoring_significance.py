from __future__ import annotations

import os

import pytest

from prunecli.evaluation.scoring import make_metrics, paired_bootstrap
from tests.reference.bootstrap import paired_p_value

REFERENCES = tuple(f"the {noun} number {i} sat on a mat" for i, noun in enumerate(("cat", "dog", "hen") * 4))
GOOD = tuple(text.replace("mat", "hat") if i % 4 == 0 else text for i, text in enumerate(REFERENCES))
FAIR = tuple(text.replace("sat on", "is at") if i % 3 == 0 else text for i, text in enumerate(REFERENCES))
BAD = tuple(text[::-1] for text in REFERENCES)


@pytest.mark.parametrize("seed", [1, 12345])
def test_p_values_are_those_of_the_slow_statement(seed):
    metrics = make_metrics(None)
    found = paired_bootstrap([GOOD, FAIR, BAD], REFERENCES, metrics, samples=40, seed=seed)
    for system, result in zip((FAIR, BAD), found[1:], strict=True):
        for name, metric in metrics.items():
            expected = paired_p_value(metric, GOOD, system, REFERENCES, 40, seed)
            assert result[name].p_value == pytest.approx(expected)


def test_the_same_seed_gives_the_same_and_the_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "none")
    metrics = make_metrics(None)
    runs = [paired_bootstrap([GOOD, FAIR], REFERENCES, metrics, samples=30, seed=7) for _ in range(2)]
    assert runs[0] == runs[1]
    assert os.environ["SACREBLEU_SEED"] == "none"
    monkeypatch.delenv("SACREBLEU_SEED")
    assert paired_bootstrap([GOOD, FAIR], REFERENCES, metrics, samples=30, seed=7) == runs[0]
    assert "SACREBLEU_SEED" not in os.environ
