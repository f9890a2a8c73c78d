import random
import stat
import sys
from itertools import permutations, product

import numpy as np
import pandas as pd
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

from prunecli.errors import DataError, PruneError
from prunecli.evaluation.decoding import Translation
from prunecli.evaluation.scoring import (
    SPM_NAME,
    bootstrap_of_means,
    comet_scores,
    grouped_means,
    is_over_generated,
    make_metrics,
    mcnemar_test,
    paired_bootstrap,
    paired_t_test,
    score,
    spm_file,
)
from tests.reference.scoring import mean_of, paired_p_value

REFERENCES = ("the cat sat on the mat", "a dog ran over the hill")
OUTPUTS = (Translation("the cat sat on a mat", True), Translation("a dog ran over the hill", True))


@pytest.mark.parametrize(
    ("length", "finished", "over"),
    [(0, True, False), (2 * 10 + 20, True, False), (41, True, True), (5, False, True)],
)
def test_over_generation(length, finished, over):
    assert is_over_generated(Translation("x" * length, finished), "y" * 10) is over


@pytest.fixture(scope="module")
def spm(shared_path):
    (shared_path / "text").write_text("\n".join(REFERENCES) + "\n")
    files = {"input": str(shared_path / "text"), "model_prefix": str(shared_path / "m")}
    sentencepiece.SentencePieceTrainer.train(**files, vocab_size=30, hard_vocab_limit=False, minloglevel=2)
    return shared_path / "m.model"


def test_spbleu_is_bleu_over_pieces(spm):
    metrics = make_metrics(spm)
    values = score(OUTPUTS, REFERENCES, metrics)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))

    def pieces(text):
        return " ".join(processor.encode(text, out_type=str))

    expected = BLEU(tokenize="none").corpus_score(
        [pieces(output.text) for output in OUTPUTS], [[pieces(text) for text in REFERENCES]]
    )
    assert values["spbleu"] == pytest.approx(expected.score)
    assert "tok:flores200" in str(metrics["spbleu"].get_signature())


def test_spm_is_found_where_sacrebleu_keeps_it(spm, tmp_path, monkeypatch):
    monkeypatch.setenv("SACREBLEU", str(tmp_path))
    assert spm_file(None) is None
    (tmp_path / "models").mkdir()
    kept = tmp_path / "models" / SPM_NAME
    kept.write_bytes(spm.read_bytes())
    assert spm_file(None) == kept


def test_a_given_spm_file_must_be_one(tmp_path):
    (tmp_path / "x").write_text("no model")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        make_metrics(tmp_path / "x")


SCRIPT = f"""#!{sys.executable}
import argparse, json
parser = argparse.ArgumentParser()
for name in ("-s", "-r", "--model", "--gpus", "--to_json"):
    parser.add_argument(name)
parser.add_argument("--quiet", action="store_true")
parser.add_argument("-t", nargs="+")
given = parser.parse_args()
if given.model == "nobody/nothing":
    raise SystemExit("KeyError: no such model")
read = lambda path: open(path, encoding="utf-8").read().split("\\n")[:-1]
sources, references = read(given.s), read(given.r)
rows = {{}}
for path in given.t:
    lines = read(path)
    assert len(lines) == len(sources) == len(references)
    rows[path] = [
        {{"mt": line, "COMET": len(set(line.split()) & set(right.split())) / len(set(right.split()))}}
        for line, right in zip(lines, references)
    ]
json.dump(rows, open(given.to_json, "w"))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "comet-score").write_text(SCRIPT)
    (folder / "comet-score").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.usefixtures("program")
def test_each_sentence_of_each_system():
    systems = {"full": ["a b", "c\nd"], "pruned": ["a x", ""]}
    scores = comet_scores("some/model", ["s", "t"], ["a b", "c d"], systems)
    found = {label: values.tolist() for label, values in scores.items()}
    assert found == {"full": [100, 100], "pruned": [50, 0]}


def test_without_the_program_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PruneError, match="comet-score is not installed") as error:
        comet_scores("some/model", ["s"], ["a"], {"full": ["a"]})
    assert "pipx install unbabel-comet" in error.value.remedy


def test_bootstrap_of_means():
    random = np.random.default_rng(0)
    base = random.normal(50, 10, 200)
    _, same, near, worse = bootstrap_of_means([base, base, base + random.normal(0, 5, 200), base - 5], 500, 1)
    assert same["p_value"] == 1.0
    assert near["p_value"] > 0.01
    assert worse["p_value"] == 1 / 501  # it is five less in every sentence, so in every resample
    assert worse["mean"] == pytest.approx(base.mean() - 5, abs=0.3)
    assert worse["ci95"] == pytest.approx(1.96 * base.std() / 200**0.5, rel=0.15)


LANGUAGES = ("eng", "fra", "wol", "zul")
GROUPS = {"wol": "low", "eng": "high", "zul": "low", "fra": "high"}
NAMES = ("chrf++", "bleu", "length_ratio", "over_generated")


def drawn(pairs):
    draw = random.Random(3)
    rows = [[100 * draw.random(), 100 * draw.random(), 2 * draw.random(), draw.random()] for _ in pairs]
    return pd.DataFrame(rows, columns=NAMES, index=pd.MultiIndex.from_tuples(pairs))


@pytest.mark.parametrize("left_out", [0, 3])
def test_means_against_their_definition(left_out):
    scores = drawn(list(permutations(LANGUAGES, 2))[left_out:])
    pairs = {f"{source}-{target}": dict(row) for (source, target), row in scores.iterrows()}
    found, everything = grouped_means(scores, GROUPS), set(LANGUAGES)
    for name in NAMES:
        for language, mean in found["by_source"].items():
            assert mean[name] == pytest.approx(mean_of(pairs, name, {language}, everything), abs=1e-4)
        for language, mean in found["by_target"].items():
            assert mean[name] == pytest.approx(mean_of(pairs, name, everything, {language}), abs=1e-4)
        for mean in found["by_group"]:
            of = [{one for one in LANGUAGES if GROUPS[one] == mean[side]} for side in ("source", "target")]
            assert mean[name] == pytest.approx(mean_of(pairs, name, *of), abs=1e-4)
    assert "difference" not in found["by_group"][0]
    for means in (found["by_source"].values(), found["by_target"].values(), found["by_group"]):
        assert sum(mean["pairs"] for mean in means) == len(pairs)


@pytest.mark.parametrize("pairs", [[("a", "b"), ("a", "c")], [("b", "a"), ("c", "a")]])
def test_one_source_or_target_says_nothing_without_groups(pairs):
    assert grouped_means(drawn(pairs), {}) == {}


@pytest.mark.usefixtures("program")
def test_a_program_that_fails_says_why():
    with pytest.raises(PruneError, match="comet-score --model nobody/nothing: KeyError: no such model"):
        comet_scores("nobody/nothing", ["s"], ["a"], {"full": ["a"]})


# Significance.


SEVERAL = tuple(f"the {noun} number {i} sat on a mat" for i, noun in enumerate(("cat", "dog", "hen") * 4))
GOOD = tuple(text.replace("mat", "hat") if i % 4 == 0 else text for i, text in enumerate(SEVERAL))
FAIR = tuple(text.replace("sat on", "is at") if i % 3 == 0 else text for i, text in enumerate(SEVERAL))
BAD = tuple(text[::-1] for text in SEVERAL)


def test_p_values_are_those_of_the_slow_statement():
    seed = 12345
    metrics = make_metrics(None)
    found = paired_bootstrap([GOOD, FAIR, BAD], SEVERAL, metrics, samples=40, seed=seed)
    for system, result in zip((FAIR, BAD), found[1:], strict=True):
        for name, metric in metrics.items():
            expected = paired_p_value(metric, GOOD, system, SEVERAL, 40, seed)
            assert result[name]["p_value"] == pytest.approx(expected)


def test_t_test_of_a_textbook_sample():
    # Student's own sleep data (Biometrika, 1908): t = 4.0621, p = 0.002833.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert paired_t_test(first, second) == pytest.approx(0.002833, abs=1e-6)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=10))
def test_mcnemar_counts_all_outcomes(pairs):
    """Count the 2^n ways in which n examples could have fallen to the models: those at least as uneven."""
    differing = [a for a, b in pairs if a != b]
    distance = abs(sum(differing) - len(differing) / 2)
    outcomes = list(product((0, 1), repeat=len(differing)))
    uneven = sum(abs(sum(outcome) - len(differing) / 2) >= distance for outcome in outcomes)
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    assert mcnemar_test(first, second) == pytest.approx(uneven / len(outcomes))
