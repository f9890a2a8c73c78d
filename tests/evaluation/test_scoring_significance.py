import os
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.evaluation.scoring import make_metrics, mcnemar_test, paired_bootstrap, paired_t_test
from tests.reference.bootstrap import paired_p_value

REFERENCES = tuple(f"the {noun} number {i} sat on a mat" for i, noun in enumerate(("cat", "dog", "hen") * 4))
GOOD = tuple(text.replace("mat", "hat") if i % 4 == 0 else text for i, text in enumerate(REFERENCES))
FAIR = tuple(text.replace("sat on", "is at") if i % 3 == 0 else text for i, text in enumerate(REFERENCES))
BAD = tuple(text[::-1] for text in REFERENCES)


def test_p_values_are_those_of_the_slow_statement():
    seed = 12345
    metrics = make_metrics(None)
    found = paired_bootstrap([GOOD, FAIR, BAD], REFERENCES, metrics, samples=40, seed=seed)
    for system, result in zip((FAIR, BAD), found[1:], strict=True):
        for name, metric in metrics.items():
            expected = paired_p_value(metric, GOOD, system, REFERENCES, 40, seed)
            assert result[name]["p_value"] == pytest.approx(expected)


def test_the_same_seed_gives_the_same_and_the_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "none")
    metrics = make_metrics(None)
    runs = [paired_bootstrap([GOOD, FAIR], REFERENCES, metrics, samples=30, seed=7) for _ in range(2)]
    assert runs[0] == runs[1]
    assert os.environ["SACREBLEU_SEED"] == "none"
    monkeypatch.delenv("SACREBLEU_SEED")
    assert paired_bootstrap([GOOD, FAIR], REFERENCES, metrics, samples=30, seed=7) == runs[0]
    assert "SACREBLEU_SEED" not in os.environ


def test_t_test_of_a_textbook_sample():
    # Student's own sleep data (Biometrika, 1908): t = 4.0621, p = 0.002833.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert paired_t_test(first, second) == pytest.approx(0.002833, abs=1e-6)
    assert paired_t_test(second, first) == pytest.approx(0.002833, abs=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=10))
def test_mcnemar_counts_all_outcomes(pairs):
    """Count the 2^n ways in which n examples could have fallen to the models: those at least as uneven."""
    differing = [a for a, b in pairs if a != b]
    distance = abs(sum(differing) - len(differing) / 2)
    outcomes = list(product((0, 1), repeat=len(differing)))
    uneven = sum(abs(sum(outcome) - len(differing) / 2) >= distance for outcome in outcomes)
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    assert mcnemar_test(first, second) == pytest.approx(uneven / len(outcomes))
