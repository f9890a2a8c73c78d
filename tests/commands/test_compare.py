import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from prunecli import demo, results
from prunecli.analysis import model_similarity as cka
from prunecli.analysis.language_comparison import compare_by_language, compare_by_text
from prunecli.commands.compare import compare_heads, compare_languages, compare_models
from prunecli.methods.options import LanguageOptions
from prunecli.model.checkpoint import open_model
from tests.commands.calls import both, names, refusals, refused
from tests.commands.gates import (
    LAYERS,
    TEXT_LAYERS,
    statistics,
    text_statistics,
    write_gates,
    write_text_gates,
)
from tests.commands.heads import scored
from tests.families import tiny_family
from tests.ffn_layouts import write_changed
from tests.gates import changed
from tests.pictures import pixels
from tests.results.tables import rows
from tests.tiny import change_config, json_of, write_files, write_json

run, done = both(compare_heads)


@pytest.fixture
def files():
    checkpoint = open_model(demo.CHECKPOINT)
    for seed, name in enumerate(("a.json", "b.json")):
        write_json(name, scored(checkpoint, seed))


def test_table_picture_and_file(files):
    result = done("a.json b.json --plot points.png --table table.csv")
    result.shows("a.json and b.json", "all", "48", "cross", "16")
    assert "Written to head-comparison.json, points.png" in result.err
    pixels("points.png")
    assert len(results.read("head-comparison.json").frame("heads")) == 48
    assert Path("table.csv").read_text().startswith("table,of,heads,pearson,pearson_p")
    assert run("a.json b.json --json --force").json["first"]["file"] == "a.json"
    assert run("a.json b.json").status == 1  # the result exists


def test_scores_of_two_models_are_said_to_be(files):
    other = json_of("b.json")
    other["models"][0]["fingerprint"] = "sha256:11"
    other["ids"] = {name: ids[:-1] for name, ids in other["ids"].items()}
    other["values"] = {name: row[:-1] for name, row in other["values"].items()}
    write_json("b.json", other)
    run("a.json b.json").shows("of two models", "left out: 12")


@refusals(
    ("a.json ./a.json", "given twice"),
    ("a.json c.json", "no such file", 1),
    ("a.json b.json --plot points.jpg", "unknown kind of file"),
)
def test_head_scores_that_are_refused(refusal, files):
    refusal(run)
    assert not Path("head-comparison.json").exists()


# `prunecli compare-languages` on statistics whose answer is known beforehand.


languages, compared = both(compare_languages)


def test_sets_trees_and_counts_are_those_known_beforehand():
    write_gates()
    result = compared("--plot languages.png")
    found = json_of("languages.json")
    assert found["format"] == "prunecli.languages/1"
    assert found["balance"] == "1:1"
    assert found["models"] == [{"fingerprint": "sha256:00", "model_type": "nllb-moe"}]
    # 75 % of 2 x 16 leaves 8, 4 a side: just the language's own. Sisters share 2 of 6, strangers none.
    relations = found["similarity"]["relations"]
    assert relations["encoder"]["same source"] == {"comparisons": 12, "mean": 1, "lowest": 1, "highest": 1}
    assert relations["decoder"]["same target"]["lowest"] == 1
    assert relations["decoder"]["same source"]["highest"] == pytest.approx(1 / 3, abs=1e-6)
    assert relations["decoder"]["same source"]["lowest"] == 0
    first, second = (found["pairs"].index(pair) for pair in ("qba-qka", "qbo-qka"))
    assert found["similarity"]["encoder"][first][second] == pytest.approx(1 / 3, abs=1e-6)
    assert found["similarity"]["decoder"][first][second] == 1
    for side in ("encoder", "decoder"):
        families = [set(cluster["members"]) for cluster in found["clustering"][side]["clusters"]["members"]]
        assert sorted(map(sorted, families)) == [["qba", "qbo"], ["qka", "qko"]]
    assert found["experts_per_layer"]["mean"] == [4, 4]
    assert found["experts_per_layer"]["by_pair"]["qba-qka"] == [4, 4]
    pixels("languages.png")
    result.shows("same target", "├─ ", LAYERS[0], "33", "12 qko-qka")


def test_statistics_by_language_give_trees_alone():
    pairs = statistics().entries
    entries = {f"{name}-X": pairs[f"{name}-{other}"] for name, other in (("qba", "qka"), ("qka", "qba"))}
    found = compare_by_language(changed(statistics(), entries=entries), LanguageOptions(), ())
    assert found.similarity is None
    assert found.experts_per_layer is None
    assert found.clustering.encoder.order == ["qba", "qka"]
    assert found.clustering.decoder is None


def test_one_pair_has_nothing_to_be_compared_with():
    entries = {"qba-qka": statistics().entries["qba-qka"]}
    found = compare_by_language(changed(statistics(), entries=entries), LanguageOptions(), ())
    assert found.similarity.encoder == [[1.0]]
    assert set(found.similarity.relations["encoder"].values()) == {None}
    assert found.clustering.encoder is None


def test_groups_families_and_another_metric_of_the_layers():
    write_gates()
    Path("classes.tsv").write_text("qko\tlow\nqba\thigh\nqbo\thigh\nqka\tlow\n")
    write_json("families.json", {"qba": "b", "qbo": "b", "qka": "k", "qko": "k"})
    files = "--groups classes.tsv --families families.json --plot l.png"
    result = compared(files, "--layer-metric top2 --ratio 0.5 --table t.csv")
    result.shows("50% of the experts removed by top2")
    found = json_of("languages.json")
    assert found["groups"] == {"qko": "low", "qba": "high", "qbo": "high", "qka": "low"}
    assert found["families"]["qko"] == "k"
    assert (found["metric"], found["experts_per_layer"]["metric"]) == ("importance", "top2")
    counts = found["experts_per_layer"]["by_pair"]
    groups = found["experts_per_layer"]["by_group"]
    assert [(group["source"], group["target"], group["pairs"]) for group in groups] == [
        ("low", "low", 2), ("low", "high", 4), ("high", "low", 4), ("high", "high", 2),
    ]  # fmt: skip
    for group in groups:
        ends = {pair: [found["groups"][end] for end in pair.split("-")] for pair in counts}
        own = [row for pair, row in counts.items() if ends[pair] == [group["source"], group["target"]]]
        assert group["encoder"] == pytest.approx(sum(row[0] for row in own) / len(own), abs=1e-4)
        assert group["decoder"] == pytest.approx(sum(row[1] for row in own) / len(own), abs=1e-4)
    assert rows("t.csv", "experts_by_group") == groups
    pixels("l.png")


def test_texts_select_the_experts_known_beforehand():
    write_text_gates()
    Path("families.tsv").write_text("code\tmachine\nshell\tmachine\nnovel\tprose\n")
    result = compared("--plot t.png --families families.tsv --table t.csv")
    result.shows("only shell", "├─ ", TEXT_LAYERS[1], "33")
    found = json_of("texts.json")
    assert found["format"] == "prunecli.texts/1"
    assert found["models"] == [{"fingerprint": "sha256:00", "model_type": "qwen3_moe"}]
    assert (found["metric"], found["texts"]) == ("reap", ["code", "shell", "novel"])
    # 75 % of 16 leaves 4 a layer: a text's own. code and shell share 2 of 6 in each layer, novel none.
    third = pytest.approx(1 / 3, abs=1e-6)
    assert found["similarity"] == [[1, third, 0], [third, 1, 0], [0, 0, 1]]
    assert set(found["clustering"]["clusters"]["members"][0]["members"]) == {"code", "shell"}
    first = found["layers"][0]
    assert (first["layer"], first["kept"], first["common"]) == (TEXT_LAYERS[0], 4, [])
    assert first["own"] == {"code": [0, 1], "shell": [4, 5], "novel": [8, 9, 10, 11]}
    assert first["jaccard"] == pytest.approx(1 / 9, abs=1e-6)
    assert found["families"]["novel"] == "prose"
    pixels("t.png")
    assert rows("t.csv", "layers")[1]["own_novel"] == 4
    assert [row["jaccard"] for row in rows("t.csv", "similarity")] == [third, 0, 0]


def test_texts_select_as_many_experts_of_each_group_that_the_router_picks_first():
    statistics = changed(text_statistics(), groups=4)
    found = compare_by_text(statistics, LanguageOptions(ratio=0.5, texts=("code",)), [])
    # The text uses the first group's experts alone.
    assert found.layers[0].common == [0, 1, 4, 5, 8, 9, 12, 13]


def test_texts_can_be_chosen():
    write_text_gates()
    found = compared("--for novel,code --metric frequency --json -o t.json").json
    assert found["texts"] == ["novel", "code"]
    assert found["metric"] == "frequency"
    one = compared("--for novel --json -o one.json").json
    assert one["similarity"] == [[1]]
    assert one["layers"][0]["common"] == [8, 9, 10, 11]
    assert one["layers"][0]["own"] == {"novel": []}
    assert "clustering" not in one or one["clustering"] is None


@pytest.mark.parametrize(
    ("write", "arguments", "status", "message"),
    [
        (write_text_gates, "--for cod", 1, "no text 'cod'"),
        (write_text_gates, "--langs code", 2, "--langs is for translation"),
        (write_text_gates, "--ratio 0.95", 2, "would be kept"),
        (write_gates, "--for code", 2, "--for names texts"),
        (write_gates, "--groups none.tsv", 1, "none.tsv: no such file"),
        (write_gates, "--ratio 0.9", 2, "4"),
        (write_gates, "--metric importence", 2, "No metric 'importence'"),
        (write_gates, "-o gates.json", 1, "gates.json"),
    ],
)
def test_bad_input_about_languages_writes_nothing(write, arguments, status, message):
    write()
    before = Path("gates.json").read_bytes()
    refused(languages(arguments), message, status)
    assert names() == ["gates.json"]
    assert Path("gates.json").read_bytes() == before


def test_without_gates_it_says_how_to_make_them():
    refused(languages(), "collect-gates", 1)


def test_without_altair_it_names_the_package(monkeypatch):
    write_gates()
    monkeypatch.setitem(sys.modules, "altair", None)
    refused(languages("--plot a.png"), "pip install altair", 1)
    assert not Path("languages.json").exists()


@pytest.mark.parametrize(("most", "listed"), [(12, 66), (11, 0)])
def test_similarities_of_many_pairs_are_not_listed(monkeypatch, most, listed):
    monkeypatch.setattr("prunecli.results.languages.TABLE_PAIRS", most)
    write_gates()
    assert compared("--table t.csv").err.endswith("Written to languages.json and t.csv.\n")
    assert len(rows("t.csv", "similarity")) == listed
    assert [row["experts_mean"] for row in rows("t.csv", "experts_per_layer")] == [4, 4]


SENTENCES = [f"the {'hen' * (n % 3)} {n} in {n * n}" for n in range(30)]


@pytest.fixture
def folder(monkeypatch):
    Path("scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "scratch")
    for seed, name in enumerate(("full", "twin", "third")):
        tiny_family(name, "m2m_100", seed=seed)
        tiny_family(f"lm-{name}", "gpt2", seed=seed)
    for language in ("eng_Latn", "fra_Latn", "deu_Latn"):
        write_files("data", {f"test.{language}": "".join(f"{line} {language[0]}\n" for line in SENTENCES)})
    Path("text.txt").write_text("\n".join(SENTENCES) + "\n")


run_models, models = both(compare_models, "--device cpu")


PAIR = "--data data --pairs eng_Latn-fra_Latn"


def test_two_models(folder):
    result = models("full twin", PAIR, "--plot map.png")
    result.shows(
        "full and twin, encoder",
        "CKA cross",
        "LNS FFN",
        "30 sentences of eng_Latn-fra_Latn",
        "fewer sentences than the width of the outputs (30 < 32)",
    )
    assert "Written to similarity.json and map.png." in result.err
    payload = json_of("similarity.json")
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
    pixels("map.png")
    assert not list(Path("scratch").glob("prunecli-*"))


def test_benchmarks_and_random_weights(folder):
    bounds = "--benchmarks third --random-baseline 2"
    payload = models("full twin", bounds, PAIR, "--measure cka --json -q").json
    assert payload == json_of("similarity.json")
    assert payload["benchmarks"] == ["third"]
    assert list(payload["matrices"]) == ["cka"]
    row = payload["corresponding"][3]
    assert row["cka_normalised"] == pytest.approx(100 * row["cka"] / row["cka_benchmark"], abs=0.01)
    assert payload["mean"]["decoder"]["cka_normalised"] > 0
    assert payload["random_seeds"] == [0, 1]
    assert payload["mean"]["decoder"]["cka_random"] > 0
    models("full twin", bounds, PAIR, "--force").shows("% of the benchmarks", "CKA, random")


def test_one_model(folder):
    result = models("full", PAIR, "--measure lns --neighbours 0.1 -o own.json")
    assert "full, decoder" in result.out
    assert "CKA" not in result.out
    payload = json_of("own.json")
    assert payload["checkpoints"] == ["full"]
    assert list(payload["matrices"]["lns"]) == ["first"]
    assert [row["second"] for row in payload["successive"]][:1] == ["model.encoder.layers.0.ffn"]


def test_several_pairs_and_removed_ffns(folder):
    gone = {f"model.decoder.layers.{layer}": {"removed": True} for layer in range(2)}
    write_changed("full", "less", "m2m_100", gone)
    models("full less --data data --langs eng_Latn,fra_Latn").shows(
        "30 sentences of each of 2 pairs, averaged.",
        "of less, removed: model.decoder.layers.0.ffn, model.decoder.layers.1.ffn.",
    )


def test_without_arguments_the_demo_is_compared_with_what_is_here(folder):
    shutil.copytree(demo.CHECKPOINT, "mine.copy")
    change_config("mine.copy", prunecli={"version": 1})  # as of what prunecli wrote
    Path("mine").symlink_to("mine.copy")
    models("--pairs qba_Latn-qka_Latn --max-sentences 40").says(
        "comparing the bundled demo model with mine, the first of 2 checkpoints here."
    )
    assert json_of("similarity.json")["checkpoints"][0] == "demo"


@refusals(
    (f"full twin {PAIR} --max-sentences 19", "19 sentences are too few", 1),
    (f"full twin {PAIR} --neighbours 0.01", "0 neighbours"),
    (f"full full {PAIR}", "full is given twice"),
    (f"full --random-baseline 1 {PAIR}", "--random-baseline goes with two models"),
    (f"full twin {PAIR} --text text.txt", "--text goes with models"),
    (f"full lm-full {PAIR}", "lm-full: a model with one stack"),
)
def test_models_that_are_refused(refusal, folder):
    refusal(run_models)
    assert not Path("similarity.json").exists()
    assert not list(Path("scratch").glob("prunecli-*"))


def test_an_interrupt_leaves_nothing(folder, monkeypatch):
    monkeypatch.setattr(cka, "linear_cka", Mock(side_effect=KeyboardInterrupt))
    assert run_models("full twin", PAIR).status == 130
    assert not Path("similarity.json").exists()
    assert not list(Path("scratch").glob("prunecli-*"))
