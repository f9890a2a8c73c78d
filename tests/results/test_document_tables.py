import pandas as pd
import pytest

from prunecli.errors import UsageError
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


def test_csv_holds_every_digit(tmp_path):
    write_tables(tmp_path / "t.csv", TABLES)
    found = pd.read_csv(tmp_path / "t.csv", float_precision="round_trip", dtype={"count": "Int64"})
    assert found["chrf++"][0] == 0.1 + 0.2
    assert list(found["count"].fillna(0)) == [2**60 + 1, 0, 3]
    assert found["name"][0] == "a|b_c & 50 %"
    assert b"\r" not in (tmp_path / "t.csv").read_bytes()


def test_markdown(tmp_path):
    write_tables(tmp_path / "t.MD", TABLES)
    assert (tmp_path / "t.MD").read_text() == (
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


def test_latex(tmp_path):
    write_tables(tmp_path / "t.tex", TABLES)
    text = (tmp_path / "t.tex").read_text()
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
