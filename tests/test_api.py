import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import prunecli
from prunecli.commands.measure import CollectGates
from prunecli.errors import UsageError
from tests.tiny import json_of

PUBLIC = [
    getattr(prunecli, name) for name in prunecli.__all__ if name not in ("demo", "results", "__version__")
]
DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "reference" / "api.md"
NOTEBOOK = DOCS / "tutorials" / "prune-experts.ipynb"


def test_every_public_name_is_there():
    for name in prunecli.__all__:
        assert getattr(prunecli, name) is not None, name
    assert set(prunecli.__all__) <= set(dir(prunecli))
    with pytest.raises(AttributeError, match="no_such_name"):
        prunecli.no_such_name


def test_importing_prunecli_imports_nothing_heavy():
    heavy = "{name for name in ('torch', 'transformers', 'pandas') if name in sys.modules}"
    script = f"import sys, prunecli; print({heavy})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_page_runs_as_it_stands():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) > 3
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_the_notebook_runs_as_it_stands():
    """Without a kernel: its cells are plain Python, and the last cell shows a translation and its reference."""
    cells = json_of(NOTEBOOK)["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    for source in sources:
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert names["scores"]["chrf++"].min() > 90
    shown = [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and not cell["outputs"]]
    assert shown == [], "each cell was run before it was saved"


def functions_of(public: Any) -> Iterator[Any]:
    """A function itself; the public methods and properties of a class, and how it is made."""
    if inspect.isfunction(public):
        yield public
        return
    for name, member in [*vars(public).items()]:
        member = getattr(member, "fget", None) or getattr(member, "func", None) or member
        member = getattr(member, "__func__", member)
        if (
            inspect.isfunction(member)
            and member.__module__.startswith("prunecli")
            and (not name.startswith("_") or name == "__init__")
        ):
            yield member


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_docstrings_say_what_each_thing_is(public):
    described = inspect.getdoc(public) or ""
    assert described, public
    if is_dataclass(public):
        lacking = [
            field.name for field in fields(public) if not re.search(rf"\b{field.name}\b[^\n]*: ", described)
        ]
        assert lacking == [], "Attributes"
    elif inspect.isfunction(public):
        several = len(inspect.signature(public).parameters) > 3
        assert not several or "Args" in described
        assert "Raises" in described
    for function in functions_of(public):
        assert function.__name__ == "__init__" or inspect.getdoc(function), function


def test_words_that_are_no_choice_are_refused():
    for make, remedy in (
        (lambda: prunecli.CollectOptions(mode="greedy"), "forced, beam"),
        (lambda: prunecli.FfnOptions(encoder="merge"), "share, keep, drop"),
        (lambda: prunecli.HeadOptions(attention=("encoder", "self")), "encoder, decoder, cross"),
        (lambda: prunecli.TrainingOptions(train="layers"), "all, routers, embeddings, experts"),
    ):
        with pytest.raises(prunecli.PruneError, match=rf"no such choice.*\nChoose one of {remedy}\.$"):
            make()
    assert prunecli.FfnOptions(width=512).width == 512
    assert prunecli.FfnOptions(width="match").width == "match"


DATA = prunecli.demo.DATA
NAMES = ["qba_Latn", "qbo_Latn"]


@pytest.mark.parametrize(
    "choice",
    [
        prunecli.TextChoice(data=str(DATA), langs=NAMES),
        prunecli.TextChoice(data=DATA, langs="qba_Latn, qbo_Latn"),
        prunecli.TextChoice(data=DATA, pairs=["qba_Latn-qbo_Latn", "qbo_Latn-qba_Latn"]),
        prunecli.TextChoice(data=DATA, pairs=(("qba_Latn", "qbo_Latn"), ("qbo_Latn", "qba_Latn"))),
    ],
)
def test_names_of_languages_are_text_or_a_sequence(choice):
    assert choice.parallel()[1] == (("qba_Latn", "qbo_Latn"), ("qbo_Latn", "qba_Latn"))
    if choice.langs is not None:
        assert choice.lines().asked == ("qba_Latn", "qbo_Latn")


@pytest.mark.parametrize(
    ("langs", "message"), [([3, "b"], "langs=3"), (["qba_Latn"], "needs two"), (3, "langs=3")]
)
def test_what_names_no_language_is_refused_in_a_line(langs, message):
    with pytest.raises(UsageError, match=message):
        prunecli.TextChoice(data=DATA, langs=langs).parallel()


def test_a_path_may_be_text():
    assert prunecli.Start("here", config="c.json").config == Path("c.json")
    assert prunecli.Destination("there").steps == Path("there.steps")
    assert prunecli.TrainingOptions(teacher="big").teacher == Path("big")
    assert prunecli.ScoreOptions(metric="all-but-one", select_data="d").select_data == Path("d")
    assert prunecli.EvaluationOptions(groups="g.tsv", hypotheses="h").hypotheses == Path("h")
    with pytest.raises(UsageError, match="teacher=3`: no path"):
        prunecli.TrainingOptions(teacher=3)  # type: ignore[arg-type]


def test_a_list_may_stand_for_a_tuple_and_one_name_for_several():
    assert prunecli.LatencyOptions(beams=[1, 4], batch_sizes=range(1, 3)).batch_sizes == (1, 2)
    assert prunecli.ExpertOptions(sources="qba_Latn", targets=NAMES).sources == ("qba_Latn",)
    assert prunecli.VocabularyOptions(keep=["<x>"]).keep == ("<x>",)
    assert prunecli.HeadOptions(attention="cross").attention == ("cross",)
    assert prunecli.Destination(Path("out"), keep_at=[5]).keep_at == (5,)


def test_fields_in_a_message_are_spelt_as_options_and_commands_stay():
    text = "Lower `batch_tokens`, or `mode=beam`; run `git lfs pull`, then `prunecli collect-gates`."
    assert CollectGates.as_typed(text) == (
        "Lower --batch-tokens, or --mode beam; run `git lfs pull`, then `prunecli collect-gates`."
    )
