from __future__ import annotations

import pytest
import sentencepiece

from prunecli.errors import DataError
from prunecli.evaluation.decoding import Translation
from prunecli.evaluation.scoring import (
    SPM_NAME,
    is_over_generated,
    make_metrics,
    score,
    spm_file,
)

REFERENCES = ("the cat sat on the mat", "a dog ran over the hill")
OUTPUTS = (Translation("the cat sat on a mat", True), Translation("a dog ran over the hill", True))


def test_bleu_by_hand():
    # 12 unigrams, 11 match; 10 bigrams, 8; 8 trigrams, 6; 6 4-grams, 4; no brevity penalty (12 against 12)
    expected = 100 * (11 / 12 * 8 / 10 * 6 / 8 * 4 / 6) ** 0.25
    assert score(OUTPUTS, REFERENCES, make_metrics(None))["bleu"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("length", "finished", "over"),
    [(0, True, False), (40, True, False), (41, True, True), (5, False, True)],
    ids=["empty", "2 x 10 + 20", "one more", "ended by the limit"],
)
def test_over_generation(length, finished, over):
    assert is_over_generated(Translation("x" * length, finished), "y" * 10) is over


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("\n".join(REFERENCES) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "m.model"


def test_spbleu_is_bleu_over_pieces(spm):
    metrics = make_metrics(spm)
    values = score(OUTPUTS, REFERENCES, metrics)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))

    def pieces(text):
        return " ".join(processor.encode(text, out_type=str))

    from sacrebleu.metrics import BLEU

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
