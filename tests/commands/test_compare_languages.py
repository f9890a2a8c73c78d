"""`prunecli compare-languages` on statistics whose answer is known beforehand."""

import json
import sys
from functools import partial

import pytest

from prunecli.analysis.language_comparison import compare_by_language
from prunecli.commands.compare import compare_languages
from prunecli.errors import DataError, OutputError, PruneError, StatisticsError, UsageError
from prunecli.methods.options import LanguageOptions
from tests.commands.calls import raising
from tests.commands.gates import LAYERS, TEXT_LAYERS, statistics, write_gates, write_text_gates
from tests.gates import changed
from tests.pictures import pixels
from tests.results.tables import rows

run = partial(raising, compare_languages)


def test_sets_trees_and_counts_are_those_known_beforehand(tmp_path):
    write_gates(tmp_path / "gates.json")
    result = run("--plot", "languages.png")
    assert result.exit_code == 0
    found = json.loads((tmp_path / "languages.json").read_text())
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
    pixels(tmp_path / "languages.png")
    for text in ("same target", "├─ ", LAYERS[0], "33", "12 qko-qka"):
        assert text in result.stdout


def test_statistics_by_language_give_trees_alone():
    pairs = statistics().entries
    entries = {f"{name}-X": pairs[f"{name}-{other}"] for name, other in (("qba", "qka"), ("qka", "qba"))}
    found = compare_by_language(changed(statistics(), entries=entries), LanguageOptions(), ())
    assert found.similarity is None
    assert found.experts_per_layer is None
    assert found.clustering.encoder.order == ["qba", "qka"]
    assert found.clustering.decoder is None


def test_one_pair_has_nothing_to_be_compared_with(tmp_path):
    entries = {"qba-qka": statistics().entries["qba-qka"]}
    found = compare_by_language(changed(statistics(), entries=entries), LanguageOptions(), ())
    assert found.similarity.encoder == [[1.0]]
    assert set(found.similarity.relations["encoder"].values()) == {None}
    assert found.clustering.encoder is None


def test_groups_families_and_another_metric_of_the_layers(tmp_path):
    write_gates(tmp_path / "gates.json")
    (tmp_path / "classes.tsv").write_text("qko\tlow\nqba\thigh\nqbo\thigh\nqka\tlow\n")
    (tmp_path / "families.json").write_text(json.dumps({"qba": "b", "qbo": "b", "qka": "k", "qko": "k"}))
    files = ("--groups", "classes.tsv", "--families", "families.json", "--plot", "l.png")
    shown = run(*files, "--layer-metric", "top2", "--ratio", "0.5", "--table", "t.csv").stdout
    found = json.loads((tmp_path / "languages.json").read_text())
    assert found["groups"] == {"qko": "low", "qba": "high", "qbo": "high", "qka": "low"}
    assert found["families"]["qko"] == "k"
    assert (found["metric"], found["experts_per_layer"]["metric"]) == ("importance", "top2")
    assert "50% of the experts removed by top2" in shown
    counts = found["experts_per_layer"]["by_pair"]
    groups = found["experts_per_layer"]["by_group"]
    assert [(group["source"], group["target"], group["pairs"]) for group in groups] == [
        ("low", "low", 2), ("low", "high", 4), ("high", "low", 4), ("high", "high", 2),
    ]  # fmt: skip
    for group in groups:
        own = [
            row
            for pair, row in counts.items()
            if [found["groups"][end] for end in pair.split("-")] == [group["source"], group["target"]]
        ]
        assert group["encoder"] == pytest.approx(sum(row[0] for row in own) / len(own), abs=1e-4)
        assert group["decoder"] == pytest.approx(sum(row[1] for row in own) / len(own), abs=1e-4)
    assert rows("t.csv", "experts_by_group") == groups
    pixels(tmp_path / "l.png")


def test_texts_select_the_experts_known_beforehand(tmp_path):
    write_text_gates(tmp_path / "gates.json")
    (tmp_path / "families.tsv").write_text("code\tmachine\nshell\tmachine\nnovel\tprose\n")
    shown = run("--plot", "t.png", "--families", "families.tsv", "--table", "t.csv").stdout
    found = json.loads((tmp_path / "texts.json").read_text())
    assert found["format"] == "prunecli.texts/1"
    assert found["models"] == [{"fingerprint": "sha256:00", "model_type": "qwen3_moe"}]
    assert (found["metric"], found["texts"]) == ("reap", ["code", "shell", "novel"])
    # 75 % of 16 leaves 4 a layer: a text's own. code and shell share 2 of 6 in each layer, novel none.
    third = pytest.approx(1 / 3, abs=1e-6)
    assert found["similarity"] == [[1, third, 0], [third, 1, 0], [0, 0, 1]]
    assert [set(cluster["members"]) for cluster in found["clustering"]["clusters"]["members"][:1]] == [
        {"code", "shell"}
    ]
    first = found["layers"][0]
    assert (first["layer"], first["kept"], first["common"]) == (TEXT_LAYERS[0], 4, [])
    assert first["own"] == {"code": [0, 1], "shell": [4, 5], "novel": [8, 9, 10, 11]}
    assert first["jaccard"] == pytest.approx(1 / 9, abs=1e-6)
    assert found["families"]["novel"] == "prose"
    pixels(tmp_path / "t.png")
    assert rows("t.csv", "layers")[1]["own_novel"] == 4
    assert [row["jaccard"] for row in rows("t.csv", "similarity")] == [third, 0, 0]
    for text in ("only shell", "├─ ", TEXT_LAYERS[1], "33"):
        assert text in shown


def test_texts_can_be_chosen(tmp_path):
    write_text_gates(tmp_path / "gates.json")
    found = json.loads(run("--for", "novel,code", "--metric", "frequency", "--json", "-o", "t.json").stdout)
    assert found["texts"] == ["novel", "code"]
    assert found["metric"] == "frequency"
    one = json.loads(run("--for", "novel", "--json", "-o", "one.json").stdout)
    assert one["similarity"] == [[1]]
    assert one["layers"][0]["common"] == [8, 9, 10, 11]
    assert one["layers"][0]["own"] == {"novel": []}
    assert "clustering" not in one or one["clustering"] is None


@pytest.mark.parametrize(
    ("write", "arguments", "error", "message"),
    [
        (write_text_gates, ["--for", "cod"], StatisticsError, "no text 'cod'"),
        (write_text_gates, ["--langs", "code"], UsageError, "--langs is for translation"),
        (write_text_gates, ["--ratio", "0.95"], UsageError, "would be kept"),
        (write_gates, ["--for", "code"], UsageError, "--for names texts"),
        (write_gates, ["--groups", "none.tsv"], DataError, "none.tsv: no such file"),
        (write_gates, ["--ratio", "0.9"], UsageError, "4"),
        (write_gates, ["--metric", "importence"], UsageError, "No metric 'importence'"),
        (write_gates, ["-o", "gates.json"], OutputError, "gates.json"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, write, arguments, error, message):
    write(tmp_path / "gates.json")
    before = (tmp_path / "gates.json").read_bytes()
    with pytest.raises(error, match=message):
        run(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["gates.json"]
    assert (tmp_path / "gates.json").read_bytes() == before


def test_without_gates_it_says_how_to_make_them():
    with pytest.raises(StatisticsError) as caught:
        run()
    assert "collect-gates" in str(caught.value)


def test_without_altair_it_names_the_package(tmp_path, monkeypatch):
    write_gates(tmp_path / "gates.json")
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(PruneError) as caught:
        run("--plot", "a.png")
    assert "pip install altair" in str(caught.value)
    assert not (tmp_path / "languages.json").exists()


@pytest.mark.parametrize(("most", "listed"), [(12, 66), (11, 0)])
def test_similarities_of_many_pairs_are_not_listed(tmp_path, monkeypatch, most, listed):
    monkeypatch.setattr("prunecli.results.languages.TABLE_PAIRS", most)
    write_gates(tmp_path / "gates.json")
    assert run("--table", "t.csv").stderr.endswith("Written to languages.json and t.csv.\n")
    assert len(rows("t.csv", "similarity")) == listed
    assert [row["experts_mean"] for row in rows("t.csv", "experts_per_layer")] == [4, 4]
