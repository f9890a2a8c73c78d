"""Which text is read: what its options may name together, and the demo's where they name none."""

from pathlib import Path

import pytest

from prunecli.errors import DataError, UsageError
from prunecli.text.choice import TextChoice
from prunecli.text.plain import PlainText, say_convention

ENGLISH, FRENCH = "eng_Latn", "fra_Latn"


def test_a_file_of_one_language_needs_the_other_and_the_pair():
    source, target, pair = Path("a.en"), Path("a.fr"), f"{ENGLISH}-{FRENCH}"
    for files in ((source, None, pair), (None, target, pair), (source, target, None)):
        choice = TextChoice(source_file=files[0], target_file=files[1], pairs=files[2])
        with pytest.raises(UsageError, match="go together"):
            choice.parallel()
    for name, value in (("data", Path("data")), ("langs", f"{ENGLISH},{FRENCH}")):
        for other in ({"source_file": source, "target_file": target}, {"pairs": pair}):
            if (name, *other) != ("data", "pairs"):
                with pytest.raises(UsageError, match=f"`{next(iter(other))}` does not go with `{name}`"):
                    TextChoice(**{name: value}, **other)
    source.write_text("the hen\n")
    target.write_text("la poule\n")
    assert TextChoice(source_file=source, target_file=target, pairs=pair).parallel()[1] == (
        (ENGLISH, FRENCH),
    )


def test_each_task_reads_its_own_text():
    plain, labelled = Path("a.txt"), Path("a.tsv")
    plain.write_text("the hen\n\nno\n")
    labelled.write_text("1\tthe hen\n0\tno\n")
    choice = TextChoice(files=(plain,), labelled=labelled, max_sentences=1, context=8)
    data = choice.read("lm")
    assert (data.text, data.pairs, data.context) == (PlainText((plain,), ("the hen",), (), True), (), 8)
    assert len(choice.read("classification").text) == 1
    for task in ("translation", "classification", "lm"):
        with pytest.raises(UsageError, match=r"no text is given|needs labels|no file of text"):
            TextChoice().read(task)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "asked", "whole"),
    [
        ("lm", None, True),
        ("lm", False, False),
        ("mlm", None, False),
        ("mlm", True, True),
        ("embedding", None, False),
        ("feature-extraction", None, False),
    ],
)
def test_causal_language_models_read_whole_files_and_all_others_lines(task, asked, whole):
    path, said = Path("a.txt"), list[str]()
    path.write_text("the hen\n\nno\n")
    text, _ = TextChoice(files=(path,), whole_files=asked).text_of(task, said.append)
    assert text == PlainText((path,), ("the hen\n\nno",) if whole else ("the hen", "no"), (), whole)
    expected = []
    say_convention([path], expected.append, whole_files=whole)
    assert said == expected != []


@pytest.mark.parametrize(
    ("choice", "texts", "split"),
    [
        (TextChoice(pairs="a-b, b-a"), ("a-b", "b-a"), "val"),
        (TextChoice(data="data", split="dev", langs=("a", "b")), ("a", "b"), "dev"),
        (TextChoice(source_file="a", target_file="b", pairs="a-b"), ("a-b",), None),
        (TextChoice(files=("a, b.txt", "c.txt")), ("a, b.txt", "c.txt"), None),
        (TextChoice(labelled="a.tsv"), ("a.tsv",), None),
        (TextChoice(), (), "val"),
    ],
)
def test_results_name_the_text(choice, texts, split):
    assert (choice.texts, choice.split_read) == (texts, split)


def test_lines_of_whole_splits_and_files():
    files = {"val.eng": "a\n\nb\n", "val.fra": "c\nd\nd\n", "train.eng": "b\n", "x.eng": "z\n", "more": "e\n"}
    for name, text in files.items():
        Path(name).write_text(text)
    lines = TextChoice(data=".", files=("more",)).lines()
    assert lines.texts == ("b", "a", "b", "c", "d", "d", "e")
    assert (lines.splits, lines.asked, lines.languages) == (("train", "val"), (), ("eng", "fra"))
    assert TextChoice(data=".", split="x,val", langs="eng").lines().texts == ("z", "a", "b")
    with pytest.raises(UsageError, match="`split` and `langs` go with `data`"):
        TextChoice(split="val").lines()
    assert TextChoice(data=".", split="val,").lines().splits == ("val",)
    with pytest.raises(DataError, match="no text in 'fra'"):
        TextChoice(data=".", split="train", langs="fra").lines()
