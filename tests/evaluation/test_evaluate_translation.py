from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForQuestionAnswering

from prunecli import progress
from prunecli.errors import OutputError, UnsupportedModelError
from prunecli.evaluation import evaluate as module
from prunecli.evaluation.decoding import DecodingOptions, Translation, translate
from prunecli.evaluation.evaluate import evaluate
from prunecli.evaluation.options import EvaluationOptions
from prunecli.modules import fitting
from prunecli.results.evaluation import Evaluation
from prunecli.running.encoding import length_limit
from prunecli.tensors.transaction import partial_path
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode, language_id, load_tokenizer
from tests.families import full_and_pruned
from tests.opening import load
from tests.tiny import json_of, tiny_nllb_moe

TEXT = ParallelText(
    "test", {"eng_Latn": ("the hat", "no", "a hen"), "fra_Latn": ("le chapeau", "non", "une poule")}
)
PAIRS = (("eng_Latn", "fra_Latn"), ("fra_Latn", "eng_Latn"))
DATA = Dataset("translation", TEXT, PAIRS)
OPTIONS = EvaluationOptions(beam=2, batch_tokens=64, max_new_tokens=6, device="cpu", samples=20)


@pytest.fixture(scope="module")
def checkpoints(shared_path):
    return full_and_pruned(shared_path, "nllb-moe")


@pytest.fixture
def good_and_bad(monkeypatch):
    """Translations by script: "full" is right, "pruned" is wrong in French; returns the calls made."""
    calls = []

    def load_model(path, **_options):
        return Path(path).name

    def translate(model, _tokenizer, sentences, pair, _options, _advance, _place):
        calls.append((model, pair))
        wrong = model == "pruned" and pair[1] == "fra_Latn"
        right = TEXT.sentences[pair[1]]
        return [Translation("x" * 200 if wrong else right[i % 3], not wrong) for i in range(len(sentences))]

    monkeypatch.setattr(module, "load_for_decoding", load_model)
    monkeypatch.setattr(module, "translate", translate)
    return calls


def test_scores_means_and_significance(checkpoints, good_and_bad, monkeypatch):
    monkeypatch.setattr(module, "require_comet", lambda: "comet-score")

    def comet_scores(model, sources, references, systems, *, gpu):
        assert (model, gpu, len(sources), len(references)) == ("some/model", False, 6, 6)
        right = np.array(references)
        return {label: np.where(np.array(own) == right, 90.0, 30.0) for label, own in systems.items()}

    monkeypatch.setattr("prunecli.evaluation.evaluate.comet_scores", comet_scores)
    payload = evaluate(checkpoints, DATA, OPTIONS.updated(comet="some/model")).to_json()
    full, pruned = payload["results"]
    wrong, right = (pruned["pairs"][pair] for pair in ("eng_Latn-fra_Latn", "fra_Latn-eng_Latn"))
    assert (full["mean"]["comet"], pruned["mean"]["comet"], wrong["comet"]) == (90, 60, 30)
    assert wrong["bootstrap"]["comet"]["p_value"] < 0.05
    assert pruned["mean"]["significant"]["comet"] == {"worse": 1, "better": 0}
    assert payload["signatures"]["comet"] == "model:some/model|scale:100"
    assert full["mean"]["chrf++"] == 100
    assert (right["chrf++"], wrong["over_generated"]) == (100, 1)
    assert pruned["mean"]["over_generated"] == 0.5
    assert pruned["mean"]["chrf++"] == pytest.approx((100 + wrong["chrf++"]) / 2)
    assert wrong["bootstrap"]["chrf++"]["p_value"] == pytest.approx(1 / 21, abs=1e-6)
    assert right["bootstrap"]["chrf++"]["p_value"] == 1
    assert pruned["mean"]["significant"]["chrf++"] == {"worse": 1, "better": 0}
    assert "p_value" not in full["pairs"]["eng_Latn-fra_Latn"]["bootstrap"]["chrf++"]
    assert payload["significance"]["baseline"] == "full"
    assert set(payload["signatures"]) == {"chrf++", "chrf", "bleu", "comet"}


def test_what_all_checkpoints_take_is_said_with_what_takes_less(checkpoints, monkeypatch):
    monkeypatch.setattr(progress, "TOLD_AFTER_S", 0)
    monkeypatch.setattr(progress, "LONG_S", 0)
    said = []
    evaluate(checkpoints, DATA, OPTIONS, say=said.append)
    assert [line.split(": about")[0] for line in said[1:]] == ["2 checkpoints x 2 pairs x 3 sentences"]
    assert said[1].endswith("; `max_sentences` and `pairs` take fewer.")


OUTPUT = Path("e.json")


def interrupt(checkpoints, monkeypatch):
    """Stop a run before its last pair."""
    scripted = module.translate

    def translate(model, *rest):
        if (model, rest[2]) == ("pruned", PAIRS[1]):
            raise KeyboardInterrupt
        return scripted(model, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "translate", translate)
        with pytest.raises(KeyboardInterrupt):
            evaluate(checkpoints, DATA, OPTIONS, OUTPUT)


def test_an_interrupted_run_goes_on_in_its_type_and_ends_alike(checkpoints, good_and_bad, monkeypatch):
    """Less memory was free the first time: the second would choose another type, and translate everything anew."""
    said = []

    def computed_in(dtype):
        return lambda asked, *_, **__: (getattr(torch, dtype if asked == "auto" else asked),)

    monkeypatch.setattr(fitting, "candidates", computed_in("bfloat16"))
    interrupt(checkpoints, monkeypatch)
    assert not OUTPUT.exists()
    assert partial_path(OUTPUT).exists()
    monkeypatch.setattr(fitting, "candidates", computed_in("float32"))
    payload = evaluate(checkpoints, DATA, OPTIONS, OUTPUT, say=said.append).to_json()
    assert good_and_bad[3:] == [("pruned", PAIRS[1])]
    assert not partial_path(OUTPUT).exists()
    assert said[-1] == "Computed in bfloat16, as before the interruption."
    assert [row["dtype"] for row in payload["results"]] == ["bfloat16", "bfloat16"]
    again = evaluate(checkpoints, DATA, OPTIONS, OUTPUT, force=True)
    assert [row["dtype"] for row in again.to_json()["results"]] == ["float32", "float32"]
    assert payload == evaluate(checkpoints, DATA, OPTIONS.updated(dtype="bfloat16")).to_json()


def test_other_arguments_do_not_take_what_was_kept(checkpoints, good_and_bad, monkeypatch):
    interrupt(checkpoints, monkeypatch)
    assert len(good_and_bad) == 3
    evaluate(checkpoints, DATA, OPTIONS.updated(beam=3), OUTPUT)
    assert len(good_and_bad) == 7


def test_existing_results_are_refused_before_the_work_if_not_forced(checkpoints, good_and_bad):
    OUTPUT.write_text('{"format": "prunecli.old/1"}')
    with pytest.raises(OutputError, match="exists"):
        evaluate(checkpoints, DATA, OPTIONS, OUTPUT)
    kept = Path("pruned/test.fra_Latn-eng_Latn.hyp")
    kept.parent.mkdir()
    OUTPUT.rename(kept)
    options = OPTIONS.updated(hypotheses=Path())
    with pytest.raises(OutputError, match="exists"):
        evaluate(checkpoints, DATA, options, OUTPUT)
    assert good_and_bad == []
    assert kept.read_text() == '{"format": "prunecli.old/1"}'
    kept.rename(OUTPUT)
    evaluation = evaluate(checkpoints, DATA, options, OUTPUT, force=True)
    assert evaluation.to_json() == json_of(OUTPUT)
    outputs = Path("full/test.eng_Latn-fra_Latn.hyp").read_text()
    assert outputs.splitlines() == list(TEXT.sentences["fra_Latn"])


SENTENCES = ("the hat", "", "a", "the hen is on the hat in the inn", "no", "the hat is thin then")
PAIR = ("eng_Latn", "fra_Latn")


@pytest.fixture(scope="module")
def loaded(shared_path):
    path = tiny_nllb_moe(shared_path / "model")
    return load(path), load_tokenizer(path)


def _one_by_one(model, tokenizer, beam, limit):
    """Each sentence alone through `generate`, without padding, batches or a cache of our own."""
    texts = []
    for sentence in SENTENCES:
        ids = torch.tensor(encode(tokenizer, [sentence], PAIR[0]))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        search = {"num_beams": beam, "do_sample": False, "max_length": None, "max_new_tokens": limit}
        output = model.generate(**inputs, **search, forced_bos_token_id=language_id(tokenizer, PAIR[1]))
        texts.append(tokenizer.decode(output[0], skip_special_tokens=True).strip())
    return texts


@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_batches_change_nothing_and_results_come_in_file_order(loaded, batch_tokens):
    options = DecodingOptions(3, batch_tokens, max_new_tokens=8)
    made = translate(*loaded, SENTENCES, PAIR, options)
    assert [translation.text for translation in made] == _one_by_one(*loaded, 3, 8)


def test_an_output_without_end_token_was_ended_by_the_limit(loaded, monkeypatch):
    model, tokenizer = loaded
    letter = tokenizer.convert_tokens_to_ids("a")
    french = language_id(tokenizer, "fra_Latn")
    # The first id starts the decoder and is the end token too: it does not count.
    generate = Mock(return_value=torch.tensor([[2, french, letter, letter], [2, french, letter, 2]]))
    monkeypatch.setattr(model, "generate", generate)
    made = translate(model, tokenizer, ["a", "a"], PAIR, DecodingOptions(2))
    assert made == [Translation("aa", finished=False), Translation("a", finished=True)]
    settings = generate.call_args.kwargs
    assert (settings["forced_bos_token_id"], settings["max_new_tokens"]) == (french, length_limit(3, 64))
    assert (settings["num_return_sequences"], settings["return_dict_in_generate"]) == (1, False)
    # BART's `forced_eos_token_id` ends an output that has come to the limit.
    made = translate(model, tokenizer, ["a", "a"], PAIR, DecodingOptions(2, max_new_tokens=3))
    assert not any(one.finished for one in made)


def test_a_model_that_generates_nothing_is_refused(loaded):
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=99)
    with pytest.raises(UnsupportedModelError, match="BartForQuestionAnswering, which has no head"):
        translate(BartForQuestionAnswering(config), loaded[1], ["a"], PAIR, DecodingOptions(2))


@pytest.mark.parametrize(("tokens", "positions", "limit"), [(10, None, 80), (100, 256, 255)])
def test_length_limit(tokens, positions, limit):
    assert length_limit(tokens, positions) == limit


def evaluation(task, *scores):
    field = "mean" if task == "translation" else "scores"
    results = [{"checkpoint": name, field: own} for name, own in zip("ab", scores, strict=False)]
    return Evaluation(format=Evaluation.FORMAT, task=task, results=results)


@pytest.mark.parametrize(
    ("gate", "task", "first", "other", "missed"),
    [
        ({"min_ratio": 0.9}, "translation", {"chrf++": 50.0}, {"chrf++": 45.0}, []),
        ({"min_ratio": 0.91}, "translation", {"chrf++": 50.0}, {"chrf++": 45.0}, ["b: chrf++ is 45"]),
        ({"min_ratio": 0.5}, "lm", {"perplexity": 10.0}, {"perplexity": 20.0}, []),
        ({"min_ratio": 0.51}, "lm", {"perplexity": 10.0}, {"perplexity": 20.0}, ["b: perplexity is 20"]),
        ({"min_ratio": 0.9}, "embedding", {}, {"cosine": 0.5}, ["spearman or retrieval was not measured"]),
        ({"min_ratio": 0.9}, "embedding", {"spearman": 0.8}, {"spearman": 0.7}, ["b: spearman is 0.7"]),
        ({"least": ["bleu=20"]}, "translation", {"bleu": 19.0}, {"bleu": 20.0}, ["a: bleu is 19; at"]),
        ({"least": ["spbleu=20"]}, "translation", {"bleu": 19.0}, {}, ["spbleu was not measured"]),
        ({"most": ["kl_divergence=0.1"]}, "lm", {}, {"kl_divergence": 0.2}, ["b: kl_divergence is 0.2"]),
        ({"most": ["over_generated=0.1"]}, "translation", {"over_generated": 0.1}, {}, []),
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
