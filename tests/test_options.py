from pathlib import Path

import pytest

import prunecli
from prunecli.commands.collect_gates import CollectGates
from prunecli.errors import UsageError

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
    assert prunecli.ScoreOptions(select_data="d").select_data == Path("d")
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
