import pytest

from prunecli.evaluation.options import EvaluationOptions
from prunecli.results.evaluation import Evaluation


def evaluation(task, *scores):
    field = "mean" if task == "translation" else "scores"
    results = [{"checkpoint": name, field: own} for name, own in zip("ab", scores, strict=False)]
    return Evaluation(format=Evaluation.FORMAT, task=task, results=results)


@pytest.mark.parametrize(
    ("gate", "task", "first", "other", "missed"),
    [
        ({"min_ratio": 0.9}, "translation", {"chrf++": 50.0}, {"chrf++": 45.0}, []),
        (
            {"min_ratio": 0.91},
            "translation",
            {"chrf++": 50.0},
            {"chrf++": 45.0},
            ["b: chrf++ is 45, that of a 50"],
        ),
        ({"min_ratio": 0.5}, "lm", {"perplexity": 10.0}, {"perplexity": 20.0}, []),
        ({"min_ratio": 0.51}, "lm", {"perplexity": 10.0}, {"perplexity": 20.0}, ["b: perplexity is 20"]),
        ({"min_ratio": 0.9}, "embedding", {}, {"cosine": 0.5}, ["spearman or retrieval was not measured"]),
        ({"min_ratio": 0.9}, "embedding", {"spearman": 0.8}, {"spearman": 0.7}, ["b: spearman is 0.7"]),
        (
            {"least": ["bleu=20"]},
            "translation",
            {"bleu": 19.0},
            {"bleu": 20.0},
            ["a: bleu is 19; at least 20"],
        ),
        ({"least": ["spbleu=20"]}, "translation", {"bleu": 19.0}, {}, ["spbleu was not measured"]),
        (
            {"most": ["kl_divergence=0.1"]},
            "lm",
            {},
            {"kl_divergence": 0.2},
            ["b: kl_divergence is 0.2; at most 0.1"],
        ),
        (
            {"most": ["over_generated=0.1"]},
            "translation",
            {"over_generated": 0.1},
            {"over_generated": 0.0},
            [],
        ),
    ],
)
def test_limits(gate, task, first, other, missed):
    options = EvaluationOptions(**gate)
    options.check_limits(task, 2)
    found = list(options.missed(evaluation(task, first, other)))
    assert len(found) == len(missed)
    assert all(line.startswith(start) for line, start in zip(found, missed, strict=True))


@pytest.mark.parametrize(
    ("task", "other", "line"),
    [
        ("translation", {"over_generated": 0.3, "length_ratio": 4.0}, "b: 30% of the outputs run on"),
        ("translation", {"over_generated": 0.0, "length_ratio": 0.4}, "b: the outputs are 0.40 times"),
        ("translation", {"over_generated": 0.05, "length_ratio": 1.1}, None),
        ("lm", {"perplexity": 30.0, "kl_divergence": 1.0}, "b: the perplexity is 3.0 times that of a"),
        ("lm", {"perplexity": 30.0}, None),  # of other tokens
        ("lm", {"perplexity": 19.0, "kl_divergence": 1.0}, None),
        ("translation", {"over_generated": "damaged", "length_ratio": None}, None),
    ],
)
def test_ruined_models_are_named(task, other, line):
    first = {"perplexity": 10.0} if task == "lm" else {"over_generated": 0.0, "length_ratio": 1.0}
    found = [*evaluation(task, first, other).ruined]
    assert found == [] if line is None else (found[0].startswith(line) and found[0].endswith("or finetune."))
