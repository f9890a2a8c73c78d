"""What results say of their components, and how numbers are followed from step to step."""

import json
from pathlib import Path

import numpy as np
import pytest

from prunecli import results
from prunecli.analysis.explanation import (
    Explained,
    Question,
    cuts,
    explain,
    parse_question,
    sentence,
    summary,
)
from prunecli.errors import CheckpointError, DataError, UsageError
from prunecli.methods.plans import LayerOptions, NarrowOptions
from prunecli.methods.sharing.options import FfnOptions
from prunecli.model.checkpoint import open_model
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.pipeline import apply
from prunecli.results.decisions import FILE, read_decisions
from tests.contracts.method_contract import made_of, written
from tests.families import tiny_family
from tests.tiny import json_of


@pytest.fixture
def thrice():
    """Narrower FFNs, fewer layers, narrower FFNs again, one FFN for all."""
    tiny_family("source", "llama")
    for source, name, options in (
        ("source", "one", NarrowOptions(ratio=0.2, metric="norms")),
        ("one", "two", LayerOptions(remove="0")),
        ("two", "three", NarrowOptions(ratio=0.5, metric="norms")),
        ("three", "four", FfnOptions(preset="Shared", width=2, keep_units="norms")),
    ):
        written(source, options, name)


def test_units_are_followed_through_steps_and_layers(thrice):
    """By hand: what the first step keeps of the original's layer 1 is ranked again in the third."""
    model = open_model("three")
    told = read_decisions(model.path, model.structure.history)
    first, third = (next(place for place in told[step].places if place.layer == 1) for step in (0, 2))
    assert (first.module, third.module) == ("model.layers.1.mlp",) * 2
    assert third.ids.tolist() == first.ids[first.kept].tolist()
    for unit in first.ids.tolist():
        answers = explain("three", f"unit {unit} of layer 1")
        assert [answer.fields["kept"] for answer in answers if answer.step is not None] == [
            bool(place.kept[place.place_of(unit)])
            for place in (first, third)
            if place.place_of(unit) is not None
        ]
        if unit not in third.ids[third.kept]:
            assert answers[-1].step is not None
            continue
        now = third.ids[third.kept].tolist().index(unit)
        assert f"Unit {unit} of the FFN of decoder layer 1 was kept" in answers[1].text
        assert answers[-1].text == f"In the result it is unit {now} of decoder layer 0."
    with pytest.raises(DataError, match="nothing tells of unit 999"):
        explain("three", "unit 999 of layer 1")


def test_a_file_of_the_first_version_is_read(thrice):
    """The file numbers layers and hidden units as the source of each step did."""

    def explained():
        return [explain("three", question) for question in ("unit 3 of layer 1", "layer 2", "layer 0")]

    path, wanted = Path("three", FILE), explained()
    content = json_of(path)
    assert content["format"] == "prunecli.decisions/2"
    content["format"] = "prunecli.decisions/1"
    for place in content["decisions"][1]["places"]:
        del place["name"]
    for place in content["decisions"][0]["places"]:
        place["name"] = place["name"].removesuffix(".units")
    for place in content["decisions"][2]["places"]:
        ids = place.pop("ids")
        place["kept"] = [ids.index(unit) for unit in place["kept"]]
        place["layer"] -= 1
        place["name"] = f"model.layers.{place['layer']}.mlp"
    path.write_text(json.dumps(content))
    assert explained() == wanted
    assert "decisions" in results.read(path).tables()
    path.write_text(json.dumps({**content, "format": "prunecli.decisions/3"}))
    with pytest.raises(CheckpointError, match=r"decisions/3"):
        explain("three", "layer 2")


def test_a_result_without_the_file_says_what_to_do(thrice):
    Path("two", FILE).unlink()
    with pytest.raises(DataError, match=f"holds no {FILE}") as caught:
        explain("two", "unit 1")
    assert "save_pretrained" in str(caught.value.remedy)
    assert "Nothing tells" in [*Explained.open(Path("two")).overview][1]
    # The structure still says which layers went.
    assert explain("two", "layer 0")[0].text == "Decoder layer 0 was removed; no record says why."


def test_a_file_of_another_history_is_refused(thrice):
    Path("two", FILE).write_text(Path("four", FILE).read_text())
    with pytest.raises(CheckpointError, match="not of the history"):
        explain("two", "unit 1")
    # It stands in the way of no further step, which leaves it out.
    said = []
    model = open_model("two")
    rewrite = made_of(model, NarrowOptions(ratio=0.5, metric="norms"))
    apply(model, rewrite, "next", say=said.append)
    assert "left out" in said[0]
    assert [*Explained.open(Path("next")).decisions] == [2]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("expert 7 of layer 3", Question("expert", 7, layer=3)),
        ("Expert 7 of the encoder layer 3", Question("expert", 7, side="encoder", layer=3)),
        ("expert 7", Question("expert", 7)),
        ("head 2 of decoder cross-attention layer 1", Question("head", 2, "", "decoder", "cross", 1)),
        ("head 2 of layer 1, self-attention", Question("head", 2, "", None, "self", 1)),
        ("unit 5 of layer 0 of the encoder", Question("unit", 5, side="encoder", layer=0)),
        ("unit 5 of expert 7 of layer 3", Question("unit", 5, layer=3, expert=7)),
        ("layer 4", Question("layer", 4)),
        ("decoder layer 4", Question("layer", 4, side="decoder")),
        ("token ▁house", Question("token", text="▁house")),
        ("token of", Question("token", text="of")),
        ('token "a b"', Question("token", text='"a b"')),
    ],
)
def test_questions_are_read(text, question):
    assert parse_question([text]) == parse_question(text.split()) == question


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no part of a model"),
        ("expert 7 of house 3", "'house 3' is no part"),
        ("head 2 of expert 3", "two of one kind"),
        ("head 2 of cross-attention, self-attention", "two of one kind"),
        ("expert 7x", "'expert 7x' is no part"),
    ],
)
def test_what_is_no_question_is_refused_with_examples(text, said):
    with pytest.raises(UsageError, match=said) as caught:
        parse_question(text.split())
    assert "expert 7 of layer 3" in str(caught.value.remedy)


# Decisions in words: each sentence written out by hand.


ORIGIN = Origin(files=(("gates.json", "0123456789abcdef"),), texts=("eng-fra",), split="dev")
ON = "; measured on 40 tokens of eng-fra, split dev, in gates.json (sha256 0123456789ab…)."


def said(decision: Decision, at: int, index: int = 0) -> str:
    return sentence(decision, decision.places[index], at, "It")


def test_experts_of_one_layer():
    values = [1.0, 0.25, 4.0, 0.5, 0.5]
    place = Ranked.of(("a", "encoder", 3), range(5), [0, 2, 3], values, tokens=40)
    decision = Decision("expert", (place,), "importance", "per-layer", origin=ORIGIN)
    assert said(decision, 0) == (
        f"It was kept: its importance 1 is rank 2 of 5, 0.5 above the cut-off 0.5{ON}"
    )
    assert said(decision, 1) == (
        f"It was removed: its importance 0.25 is rank 5 of 5, 0.25 below the cut-off 0.5{ON}"
    )
    assert said(decision, 4) == (
        f"It was removed: its importance 0.5 is rank 4 of 5, the cut-off 0.5{ON} "
        "2 have this value, of which 1 are kept: their order decided."
    )
    (row,) = cuts(decision).rows
    assert list(row.values()) == ["encoder layer 3", "5", "3", "0.5", "3: 0.5", "4: 0.5", "0.000"]
    assert next(summary(decision)) == "3 of 5 experts kept by importance; per-layer."


def test_a_head_that_its_layer_needs_says_so():
    # 0.1 and 0.2 go; 0.15 is the last one of its attention.
    places = [
        Ranked.of(("a", "decoder", 0), [0, 1, 2], [2], [0.1, 0.2, 0.9], attention="cross", cut="heads"),
        Ranked.of(("b", "decoder", 1), [1], [1], [0.15], attention="decoder", cut="heads"),
    ]
    decision = Decision("head", tuple(places), "importance", least="every attention keeps 1 at least")
    assert said(decision, 0, 1) == (
        "It was kept: its importance 0.15 is rank 3 of 4, 0.75 below the cut-off 0.9; every attention keeps 1 at "
        "least; of the weights alone."
    )
    assert said(decision, 1, 0) == (
        "It was removed: its importance 0.2 is rank 2 of 4, 0.7 below the cut-off 0.9; of the weights alone."
    )


def test_tokens_say_what_they_are_needed_for():
    place = Ranked.of(
        *(("", "", None), range(4), [0, 1, 2], [3.0, 1.0, 0.0, 1.0]),
        reasons=("asked for", "characters and bytes"),
        reason=np.array([0, 1, 2, 0], np.uint8),
        labels=("a", "b", "c", "d"),
    )
    decision = Decision("token", (place,), "count", bound=2, origin=Origin(sentences=5, sha256="ab" * 32))
    for at, words in enumerate(
        (
            "kept: it occurs 3 times; tokens that occur 2 times or more are kept",
            "kept: it occurs once; --keep asks for it",
            "kept: it occurs 0 times; single characters and bytes are always kept",
            "removed: it occurs once; tokens that occur 2 times or more are kept",
        )
    ):
        assert said(decision, at) == f"It was {words}; measured on 5 sentences, sha256 abababababab…."
