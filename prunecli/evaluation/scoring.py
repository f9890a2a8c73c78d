"""Translation scores: chrF++, chrF, BLEU and spBLEU by sacrebleu, COMET, length ratio, over-generation; their means.

COMET runs as the program `comet-score` of its own installation: unbabel-comet (2.2.7) needs transformers 4,
huggingface_hub 0 and numpy 1, and cannot be installed with prunecli.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from prunecli.errors import DataError, PruneError
from prunecli.evaluation.decoding import Translation
from prunecli.model.decision import Floats
from prunecli.results.document import Json
from prunecli.tensors.json_files import read_json, refuse_pointer

SPM_NAME = "flores200sacrebleuspm"
"""sacrebleu's file name for FLORES-200's SentencePiece model."""
COMET = "comet-score"

OVER_FACTOR = 2.0
OVER_MARGIN = 20

Scores = dict[str, float]
"""Scores of one checkpoint on one pair: metric -> corpus score, 0 to 100; `length_ratio` (characters of the outputs
divided by those of the references); `over_generated` (fraction of the outputs that `is_over_generated`)."""


def spm_file(given: Path | None) -> Path | None:
    """FLORES-200's SentencePiece model: `given`, or the file in sacrebleu's cache, or None. Nothing is downloaded.

    Raises:
        DataError: `given` does not exist, or is a Git LFS pointer.
    """
    if given is not None:
        if not given.is_file():
            raise DataError(f"{given}: no such file", "Name FLORES-200's SentencePiece model with `spm`.")
        refuse_pointer(given, DataError)
        return given
    folder = os.environ.get("SACREBLEU") or str(Path.home() / ".sacrebleu")
    path = Path(folder) / "models" / SPM_NAME
    return path if path.is_file() else None


SPM_MISSING = (
    f"No spBLEU: FLORES-200's SentencePiece model is not on this machine. Give it with `spm=FILE`, or "
    f"put it at ~/.sacrebleu/models/{SPM_NAME} (`sacrebleu --tokenize flores200` downloads it there)."
)


def make_metrics(spm: Path | None) -> dict[str, Any]:
    """sacrebleu's metrics by name: chrF++ (word order 2), chrF, BLEU (13a), and spBLEU if `spm` is given.

    Raises:
        DataError: `spm` is not a SentencePiece model.
    """
    from sacrebleu.metrics import BLEU, CHRF

    metrics = {"chrf++": CHRF(word_order=2), "chrf": CHRF(), "bleu": BLEU(tokenize="13a")}
    if spm is not None:
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.Load(str(spm))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{spm}: not a SentencePiece model") from error
        spbleu = metrics["spbleu"] = BLEU(tokenize="none")
        # Not sacrebleu's own class, which would download a missing file.
        spbleu.tokenizer = cache(lambda line: " ".join(processor.EncodeAsPieces(line)))
        spbleu.tokenizer_signature = "flores200"
    return metrics


def is_over_generated(translation: Translation, reference: str) -> bool:
    """Whether an output runs on into repetition or hallucination (2212.09811, section 6.4).

    The paper gives no rule. Ours: decoding was ended by the length limit, or `len(output) > 2 * len(reference) + 20`.
    """
    return not translation.finished or len(translation.text) > OVER_FACTOR * len(reference) + OVER_MARGIN


def score(
    translations: Sequence[Translation], references: Sequence[str], metrics: Mapping[str, Any]
) -> Scores:
    """Score the outputs of one pair against one reference each."""
    texts = [translation.text for translation in translations]
    over = [is_over_generated(made, right) for made, right in zip(translations, references, strict=True)]
    return {
        **{name: metric.corpus_score(texts, [list(references)]).score for name, metric in metrics.items()},
        "length_ratio": sum(map(len, texts)) / max(1, sum(map(len, references))),
        "over_generated": sum(over) / len(over),
    }


def rounded(scores: Json, digits: int = 6) -> Json:
    """Scores, or a test of one, with the digits of evaluation.json."""
    fine = ("over_generated", "p_value")
    return {
        name: round(value, 6 if name in fine else digits) if isinstance(value, float) else value
        for name, value in scores.items()
    }


def means(scores: pd.DataFrame, baseline: pd.DataFrame | None) -> Json:
    """Means over pairs, each pair counting the same; and how the scores differ from the baseline's over the pairs.

    Args:
        scores: a row for each pair.
        baseline: scores of the first checkpoint; None if `scores` are the first checkpoint's.
    """
    mean = {"pairs": len(scores), **rounded(scores.mean().to_dict(), 4)}
    if baseline is None:
        return mean
    spreads = (scores - baseline.loc[scores.index]).drop(columns=["length_ratio", "over_generated"])
    figures = {
        "mean": spreads.mean(),
        "std": spreads.std(ddof=0),
        "lowest": spreads.min(),
        "highest": spreads.max(),
    }
    return {**mean, "difference": pd.DataFrame(figures).round(4).to_dict("index")}


def grouped_means(
    scores: pd.DataFrame, groups: Mapping[str, str], baseline: pd.DataFrame | None = None
) -> Json:
    """The fields `by_source`, `by_target` and, with `groups`, `by_group` of a checkpoint in evaluation.json.

    Without groups the result is empty if all pairs have one source or one target: the means would repeat those of all
    pairs, or the pairs.

    Args:
        scores: a row for each pair, indexed by source and target.
        groups: language -> group, for every language of the pairs; empty: no groups.
        baseline: scores of the first checkpoint; None if `scores` are the first checkpoint's.
    """
    sources, targets = (scores.index.get_level_values(side) for side in (0, 1))
    if not groups and min(sources.nunique(), targets.nunique()) < 2:
        return {}
    found: Json = {
        f"by_{side}": {name: means(rows, baseline) for name, rows in scores.groupby(level=level, sort=False)}
        for level, side in enumerate(("source", "target"))
    }
    if groups:
        order = list(dict.fromkeys(groups.values()))
        by = [pd.Categorical(side.map(groups), order) for side in (sources, targets)]
        found["by_group"] = [
            {"source": source, "target": target, **means(rows, baseline)}
            for (source, target), rows in scores.groupby(by, observed=True)
        ]
    return found


def require_comet() -> str:
    """Return the path of `comet-score`.

    Raises:
        PruneError: the program is not on the path.
    """
    program = shutil.which(COMET)
    if program is None:
        raise PruneError(
            f"`comet`: {COMET} is not installed",
            "Install it beside prunecli, in an environment of its own: pipx install unbabel-comet.",
        )
    return program


def comet_scores(
    model: str,
    sources: Sequence[str],
    references: Sequence[str],
    systems: Mapping[str, Sequence[str]],
    *,
    gpu: bool = False,
) -> dict[str, Floats]:
    """Score each sentence of each system with COMET, 0 to 100 (the program's score times 100).

    Args:
        model: name on the hub, or a `.ckpt` file. References are passed to models without references too.
        systems: label -> outputs, in the order of `sources` and `references`.
        gpu: whether the program uses a GPU.

    Returns:
        Label -> `[sentences]`.

    Raises:
        PruneError: the program is not installed, or failed; with its last line.
    """
    program = require_comet()
    model = str(Path(model).resolve()) if Path(model).is_file() else model
    names = {label: f"system-{number}.txt" for number, label in enumerate(systems)}
    texts = {"sources.txt": sources, "references.txt": references}
    texts |= {names[label]: outputs for label, outputs in systems.items()}
    with tempfile.TemporaryDirectory(prefix="prunecli-") as folder:
        for name, lines in texts.items():
            text = "".join(f"{' '.join(line.split())}\n" for line in lines)
            Path(folder, name).write_text(text, encoding="utf-8")
        command = [program, "-s", "sources.txt", "-r", "references.txt", "--model", model, "--quiet"]
        command += ["--gpus", "1" if gpu else "0", "--to_json", "scores.json", "-t", *names.values()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        result = Path(folder, "scores.json")
        if done.returncode != 0 or not result.is_file():
            why = done.stderr.strip().split("\n")[-1].strip() or f"status {done.returncode}"
            raise PruneError(f"{COMET} --model {model}: {why}", "Leave `comet` out, or correct its model.")
        payload = read_json(result, error=PruneError)
    scores = {
        label: np.array([100 * float(row["COMET"]) for row in payload[name]]) for label, name in names.items()
    }
    if any(len(values) != len(sources) or not np.isfinite(values).all() for values in scores.values()):
        raise PruneError(f"{COMET} --model {model}: not a finite score for each sentence")
    return scores


Test = dict[str, float]
"""One score of one system compared with the baseline's.

- p_value: two-sided probability of a difference this large by chance; none for the baseline. Equal scores have the
  p-value 1 (sacrebleu counts larger differences, and would report a significant one).
- mean: mean of the score over the resamples.
- ci95: half the width of the 95 % confidence interval.
"""


def paired_bootstrap(
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    metrics: Mapping[str, Any],
    samples: int,
    seed: int,
) -> list[dict[str, Test]]:
    """Test every system against the first on the same resamples, by sacrebleu's paired bootstrap (Koehn 2004).

    Args:
        systems: outputs of each system, in the order of `references`.
        metrics: name -> sacrebleu metric.
        samples: number of resamples of the sentences, with replacement.
        seed: of the resamples; at least 1 (sacrebleu takes 0 for "none").

    Returns:
        For each system: metric -> test.
    """
    from sacrebleu.significance import PairedTest

    tests: list[dict[str, Test]] = [{} for _ in systems]
    named = [(str(index), list(outputs)) for index, outputs in enumerate(systems)]
    # sacrebleu reads its seed from the environment only.
    with patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        for name, metric in metrics.items():
            # One test for each metric: sacrebleu keys them by the score's name, which BLEU and spBLEU share.
            test = PairedTest(named, {name: metric}, [list(references)], "bs", n_samples=samples, n_jobs=1)
            _, results = test()[1].values()
            for found, result in zip(tests, results, strict=True):
                own = found[name] = Test()
                if result.p_value is not None:
                    own["p_value"] = 1.0 if result.score == results[0].score else float(result.p_value)
                own |= {"mean": float(result.mean), "ci95": float(result.ci)}
    return tests


def bootstrap_of_means(systems: Sequence[Floats], samples: int, seed: int) -> list[Test]:
    """`paired_bootstrap` for a score that is the mean of the sentences' scores.

    Args:
        systems: `[sentences]` for each system.
    """
    count = len(systems[0])
    drawn = np.random.default_rng(seed).integers(count, size=(samples, count))
    found: list[Test] = []
    baseline = systems[0][drawn].mean(axis=1)
    for values in systems:
        own, means = Test(), values[drawn].mean(axis=1)
        if found:
            difference, differences = values.mean() - systems[0].mean(), means - baseline
            larger = np.abs(differences - differences.mean()) > abs(difference)
            own["p_value"] = 1.0 if difference == 0 else float((larger.sum() + 1) / (samples + 1))
        low, high = np.quantile(means, [0.025, 0.975])
        found.append(own | {"mean": float(means.mean()), "ci95": float(high - low) / 2})
    return found


def paired_t_test(first: ArrayLike, second: ArrayLike) -> float | None:
    """Two-sided p-value of Student's t-test for paired samples; None for fewer than two examples."""
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    if len(differences) < 2:
        return None
    if np.all(differences == differences[0]):
        return 1.0 if differences[0] == 0 else 0.0
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def mcnemar_test(first: ArrayLike, second: ArrayLike) -> float:
    """Two-sided p-value of McNemar's exact test.

    Of the examples that only one of two models gets right, each falls to either model with probability 1/2 under the
    null hypothesis.

    Args:
        first, second: `[examples]` bool: whether each model is right.
    """
    from scipy.stats import binomtest

    a, b = np.asarray(first, bool), np.asarray(second, bool)
    differing = int(np.sum(a != b))
    return float(binomtest(int(np.sum(a & ~b)), differing).pvalue) if differing else 1.0
