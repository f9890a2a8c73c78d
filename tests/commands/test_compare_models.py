import json
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from prunecli import demo
from prunecli.analysis import model_similarity as cka
from prunecli.commands.compare import compare_models
from prunecli.errors import DataError, UsageError
from tests.commands.calls import raising
from tests.families import tiny_family
from tests.ffn_layouts import write_changed
from tests.pictures import pixels
from tests.tiny import config_of, json_of

LINES = [f"the {'hen' * (n % 3)} {n} in {n * n}" for n in range(30)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    for seed, name in enumerate(("full", "twin", "third")):
        tiny_family(name, "m2m_100", seed=seed)
        tiny_family(f"lm-{name}", "gpt2", seed=seed)
    (tmp_path / "data").mkdir()
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        lines = [f"{line} {language[0]}" for line in LINES]
        (tmp_path / "data" / f"test.{language}").write_text("\n".join(lines) + "\n")
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path


def _run(*arguments):
    return raising(compare_models, *arguments, "--device", "cpu")


PAIR = ("--data", "data", "--pairs", "eng_Latn-fra_Latn")


def test_two_models(folder):
    result = _run("full", "twin", *PAIR, "--plot", "map.png")
    assert result.exit_code == 0
    for text in ("full and twin, encoder", "CKA cross", "LNS FFN", "30 sentences of eng_Latn-fra_Latn"):
        assert text in result.stdout
    assert "fewer sentences than the width of the outputs (30 < 32)" in result.stdout
    assert "Written to similarity.json and map.png." in result.stderr
    payload = json_of(folder / "similarity.json")
    assert payload["format"] == "prunecli.similarity/1"
    assert payload["checkpoints"] == ["full", "twin"]
    assert [model["model_type"] for model in payload["models"]] == ["m2m_100"] * 2
    assert payload["text"][0]["neighbours"] == 2  # 5 % of 30, to the nearest even number
    assert set(payload["matrices"]) == {"cka", "lns"}
    assert [len(payload["matrices"]["cka"][name]) for name in ("first", "second", "between")] == [12] * 3
    first = payload["corresponding"][0]
    assert first["first"] == "model.encoder.layers.0.self_attn"
    assert first["cka"] == payload["matrices"]["cka"]["between"][0][0]
    assert set(payload["mean"]) == {"encoder", "decoder"}
    pixels(folder / "map.png")
    assert not list((folder / "scratch").glob("prunecli-*"))


def test_benchmarks_and_random_weights(folder):
    bounds = ("--benchmarks", "third", "--random-baseline", "2")
    result = _run("full", "twin", *bounds, *PAIR, "--measure", "cka", "--json", "-q")
    payload = json.loads(result.stdout)
    assert payload == json_of(folder / "similarity.json")
    assert payload["benchmarks"] == ["third"]
    assert list(payload["matrices"]) == ["cka"]
    row = payload["corresponding"][3]
    assert row["cka_normalised"] == pytest.approx(100 * row["cka"] / row["cka_benchmark"], abs=0.01)
    assert payload["mean"]["decoder"]["cka_normalised"] > 0
    assert payload["random_seeds"] == [0, 1]
    assert payload["mean"]["decoder"]["cka_random"] > 0
    shown = _run("full", "twin", *bounds, *PAIR, "--force").stdout
    assert "% of the benchmarks" in shown
    assert "CKA, random" in shown


def test_one_model(folder):
    result = _run("full", *PAIR, "--measure", "lns", "--neighbours", "0.1", "-o", "own.json")
    assert "full, decoder" in result.stdout
    assert "CKA" not in result.stdout
    payload = json_of(folder / "own.json")
    assert payload["checkpoints"] == ["full"]
    assert list(payload["matrices"]["lns"]) == ["first"]
    assert [row["second"] for row in payload["successive"]][:1] == ["model.encoder.layers.0.ffn"]


def test_several_pairs_and_removed_ffns(folder):
    gone = {f"model.decoder.layers.{layer}": {"removed": True} for layer in range(2)}
    write_changed(folder / "full", folder / "less", "m2m_100", gone)
    result = _run("full", "less", "--data", "data", "--langs", "eng_Latn,fra_Latn")
    assert "30 sentences of each of 2 pairs, averaged." in result.stdout
    assert "of less, removed: model.decoder.layers.0.ffn, model.decoder.layers.1.ffn." in result.stdout


def test_without_arguments_the_demo_is_compared_with_what_is_here(folder):
    quick = ("--pairs", "qba_Latn-qka_Latn", "--max-sentences", "40")
    config = config_of(demo.CHECKPOINT)
    (folder / "mine").symlink_to(_copied(folder, config))
    result = _run(*quick)
    assert "comparing the bundled demo model with mine, the first of 2 checkpoints here." in result.stderr
    assert json_of(folder / "similarity.json")["checkpoints"][0] == "demo"


def _copied(folder: Path, config: dict) -> Path:
    """The demo model with the key that marks what prunecli wrote."""
    target = folder / "mine.copy"
    target.mkdir()
    for path in demo.CHECKPOINT.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (target / "config.json").write_text(json.dumps({**config, "prunecli": {"version": 1}}))
    return target


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("full", "twin", *PAIR, "--max-sentences", "19"), DataError, "19 sentences are too few"),
        (("full", "twin", *PAIR, "--neighbours", "0.01"), UsageError, "0 neighbours"),
        (("full", "full", *PAIR), UsageError, "full is given twice"),
        (("full", "--random-baseline", "1", *PAIR), UsageError, "--random-baseline goes with two models"),
        (
            ("full", "twin", *PAIR, "--text", "text.txt"),
            UsageError,
            "--text goes with models that have one stack",
        ),
        (("full", "lm-full", *PAIR), UsageError, "lm-full: a model with one stack"),
    ],
)
def test_refused(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        _run(*arguments)
    assert not (folder / "similarity.json").exists()
    assert not list((folder / "scratch").glob("prunecli-*"))


def test_an_interrupt_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr(cka, "linear_cka", Mock(side_effect=KeyboardInterrupt))
    assert _run("full", "twin", *PAIR).exit_code == 130
    assert not (folder / "similarity.json").exists()
    assert not list((folder / "scratch").glob("prunecli-*"))
