import json
import zlib
from base64 import b64encode
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import TypeAdapter

from prunecli import results
from prunecli.errors import UsageError
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.results.decisions import FILE, Written, document
from prunecli.results.document import frame, stacked, write_tables
from prunecli.results.evaluation import SCORES

TABLES = {
    "by_a|b": [
        {"name": "a|b_c & 50 %", "chrf++": 0.1 + 0.2, "count": 2**60 + 1, "fits": True},
        {"name": None, "chrf++": None, "count": None, "share": 1},
    ],
    "empty_column": [{"count": 3, "nothing": None}],
}


def test_counts_stay_whole_where_some_are_missing():
    made = frame(TABLES["by_a|b"])
    assert list(made) == ["name", "chrf++", "count", "fits", "share"]
    assert made["count"].dtype == "Int64"
    assert made["count"][0] == 2**60 + 1
    assert made["chrf++"].dtype == "float64"
    assert list(stacked(TABLES)["table"]) == ["by_a|b", "by_a|b", "empty_column"]


def test_numbers_of_any_size_are_kept():
    assert frame([{"count": 1 << 70, "of": 2}])["count"].tolist() == [1 << 70]


def test_csv_holds_every_digit():
    write_tables(Path("t.csv"), TABLES)
    found = pd.read_csv("t.csv", float_precision="round_trip", dtype={"count": "Int64"})
    assert found["chrf++"][0] == 0.1 + 0.2
    assert list(found["count"].fillna(0)) == [2**60 + 1, 0, 3]
    assert found["name"][0] == "a|b_c & 50 %"
    assert b"\r" not in Path("t.csv").read_bytes()


def test_markdown():
    write_tables(Path("t.MD"), TABLES)
    assert Path("t.MD").read_text() == (
        "## by_a|b\n\n"
        "| name | chrf++ | count | fits | share |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        f"| a\\|b_c & 50 % | 0.30000000000000004 | {2**60 + 1} | True |  |\n"
        "|  |  |  |  | 1 |\n"
        "\n## empty_column\n\n"
        "| count | nothing |\n"
        "| ---: | --- |\n"
        "| 3 |  |\n"
    )


@pytest.mark.parametrize("name", ["t.xlsx", "t.csv.gz"])
def test_other_endings_are_refused_with_the_three(tmp_path, name):
    with pytest.raises(UsageError) as error:
        write_tables(tmp_path / name, TABLES)
    assert error.value.remedy == "Choose a name that ends in .csv, .md or .tex."
    assert not list(tmp_path.iterdir())


def test_latex():
    write_tables(Path("t.tex"), TABLES)
    text = Path("t.tex").read_text()
    assert text.startswith("% by_a|b\n\\begin{tabular}{lrrrr}\n\\toprule\n")
    assert f"a|b\\_c \\& 50 \\% & 0.30000000000000004 & {2**60 + 1} & True &  \\\\\n" in text
    assert text.count("\\end{tabular}") == 2


@pytest.mark.parametrize(
    ("task", "name", "value", "first", "said"),
    [
        ("translation", "bleu", 60.04, 70.0, "-10.0"),
        ("lm", "perplexity", 1075.0, 1000.0, "+7.5%"),
        ("mlm", "perplexity", 4.0, 8.0, "-50%"),
        ("classification", "accuracy", 0.9, 0.9125, "-1.2"),
        ("embedding", "spearman", 0.75, 0.8, "-0.0500"),
    ],
)
def test_a_difference_is_in_points_or_a_share_of_the_first_score(task, name, value, first, said):
    assert SCORES[task][name].difference(value, first) == said


JSON = TypeAdapter(Written)


def test_many_units_are_rounded_and_the_choice_is_not():
    generator = np.random.default_rng(0)
    places = []
    for layer in range(9):
        values = np.exp(3 * generator.normal(size=8192))
        kept = np.argsort(-values)[:6000]
        places.append(Ranked.of((f"layers.{layer}.mlp", "decoder", layer), range(8192), kept, values))
    decision = Decision("unit", tuple(places), "norms")
    text = json.dumps(JSON.dump_python(decision, context=FILE), separators=(",", ":"))
    again = JSON.validate_python(json.loads(text))
    assert len(text) < 16 * 9 * 8192  # bytes a unit
    for old, new in zip(decision.places, again.places, strict=True):
        np.testing.assert_array_equal(new.kept, old.kept)
        large = np.asarray(old.values) > 1e-3 * np.max(np.asarray(old.values))
        np.testing.assert_allclose(np.asarray(new.values)[large], np.asarray(old.values)[large], rtol=1e-3)
        # Values that are equal once they are rounded do not mix what stays and what goes.
        ranks = np.asarray(new.ranks)
        assert set(ranks[new.kept]) == set(range(1, 6001))


def test_packed_lists_of_earlier_files_are_read():
    def packed(values, **more):
        raw = json.dumps(values).encode() if isinstance(values, list) else values.tobytes()
        return {"count": 3, "data": b64encode(zlib.compress(raw)).decode(), **more}

    payload = {
        "part": "unit",
        "metric": "norms",
        "places": [
            {
                "name": "layers.0.mlp.units",
                "side": "decoder",
                "layer": 0,
                "count": 3,
                "values": packed(np.array([1, 0.5, 0.25], "<f2"), dtype="float16", scale=4.0),
                "kept": packed(np.packbits([True, False, True]), dtype="bits"),
                "labels": packed(["a", "b", "c"]),
            }
        ],
    }
    (place,) = JSON.validate_python(payload).places
    assert place.values.tolist() == [4.0, 2.0, 1.0]
    assert place.kept.tolist() == [True, False, True]
    assert place.labels == ("a", "b", "c")


def test_the_file_is_a_table_of_components():
    place = Ranked.of(("layers.1.mlp", "decoder", 1), [0, 2, 5], [2], [0.5, 2.0, 1.5])
    origin = Origin((("gates.json", "12ab"),), ("code",))
    decision = Decision("expert", (place,), "reap", origin=origin, step=1, command="prune-experts")
    document({1: decision}).write(FILE, force=False)
    frame = results.read(FILE).frame("decisions")
    assert frame["expert"].tolist() == [0, 2, 5]
    assert frame["rank"].tolist() == [3, 1, 2]
    assert frame["margin"].tolist() == [-1.5, 0.0, -0.5]
    assert frame["kept"].tolist() == [False, True, False]
    assert set(frame["cutoff"]) == {2.0}
    assert set(frame["step"]) == {1}
