"""Translation scores: chrF++, chrF, BLEU and spBLEU through sacrebleu, length ratio, over-generation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.errors import DataError
from prunecli.evaluation.decoding import Translation
from prunecli.tensors.json_files import refuse_pointer

SPM_NAME = "flores200sacrebleuspm"
"""What sacrebleu calls FLORES-200's SentencePiece model on disk."""

OVER_FACTOR = 2.0
OVER_MARGIN = 20


@dataclass(frozen=True)
class Scores:
    """The scores of one checkpoint on one pair.

    Attributes:
        values: metric -> corpus score, 0 to 100.
        length_ratio: characters of all outputs / characters of all references.
        over_generated: share of the outputs that are over-generated (`is_over_generated`), 0 to 1.
    """

    values: Mapping[str, float]
    length_ratio: float
    over_generated: float


def spm_file(given: Path | None) -> Path | None:
    """FLORES-200's SentencePiece model: `given`, or where sacrebleu keeps it, or None. Nothing is downloaded.

    Raises:
        DataError: `given` does not exist, or is a Git LFS pointer.
    """
    if given is not None:
        if not given.is_file():
            raise DataError(f"{given}: no such file", "Name FLORES-200's SentencePiece model with --spm.")
        refuse_pointer(given, DataError)
        return given
    folder = os.environ.get("SACREBLEU") or str(Path.home() / ".sacrebleu")
    path = Path(folder) / "models" / SPM_NAME
    return path if path.is_file() else None


def spm_missing() -> str:
    """The line that says how to get spBLEU."""
    return (
        f"No spBLEU: FLORES-200's SentencePiece model is not on this machine. Give it with --spm FILE, or "
        f"put it at ~/.sacrebleu/models/{SPM_NAME} (`sacrebleu --tokenize flores200` downloads it there)."
    )


def make_metrics(spm: Path | None) -> dict[str, Any]:
    """sacrebleu's metrics by name: chrF++ (word order 2), chrF, BLEU (13a), and spBLEU where `spm` is given.

    Raises:
        DataError: `spm` is not a SentencePiece model.
    """
    from sacrebleu.metrics import BLEU, CHRF

    metrics: dict[str, Any] = {
        "chrf++": CHRF(word_order=2),
        "chrf": CHRF(),
        "bleu": BLEU(tokenize="13a"),
    }
    if spm is not None:
        spbleu = BLEU(tokenize="none")
        spbleu.tokenizer = _Pieces(spm)
        spbleu.tokenizer_signature = spbleu.tokenizer.signature()
        metrics["spbleu"] = spbleu
    return metrics


class _Pieces:
    """sacrebleu's flores200 tokenizer, from a given file: sacrebleu's own would download a missing one."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.Load(str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: not a SentencePiece model") from error
        self._known: dict[str, str] = {}

    def signature(self) -> str:
        return "flores200"

    def __call__(self, line: str) -> str:
        if line not in self._known:
            self._known[line] = " ".join(self._processor.EncodeAsPieces(line))
        return self._known[line]


def is_over_generated(translation: Translation, reference: str) -> bool:
    """Whether an output runs on: right at first, then repetition or hallucination (2212.09811, section 6.4).

    The paper gives no rule; this one is ours. It does where decoding was ended by the length limit, or where the
    output has more than twice as many characters as the reference, plus 20: `len(output) > 2 * len(reference) + 20`.
    """
    return not translation.finished or len(translation.text) > OVER_FACTOR * len(reference) + OVER_MARGIN


def score(
    translations: Sequence[Translation], references: Sequence[str], metrics: Mapping[str, Any]
) -> Scores:
    """Score the outputs of one pair against one reference each."""
    texts = [translation.text for translation in translations]
    values = {
        name: float(metric.corpus_score(texts, [list(references)]).score) for name, metric in metrics.items()
    }
    over = [is_over_generated(made, right) for made, right in zip(translations, references, strict=True)]
    return Scores(
        values=values,
        length_ratio=sum(map(len, texts)) / max(1, sum(map(len, references))),
        over_generated=sum(over) / len(over),
    )


def scores_json(scores: Scores) -> dict[str, Any]:
    """The scores as evaluation.json has them."""
    rounded = {name: round(value, 4) for name, value in scores.values.items()}
    return {
        **rounded,
        "length_ratio": round(scores.length_ratio, 4),
        "over_generated": round(scores.over_generated, 6),
    }


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """The plain mean over pairs, each pair counting the same."""
    count = len(scores)
    return Scores(
        values={name: sum(s.values[name] for s in scores) / count for name in scores[0].values},
        length_ratio=sum(s.length_ratio for s in scores) / count,
        over_generated=sum(s.over_generated for s in scores) / count,
    )
