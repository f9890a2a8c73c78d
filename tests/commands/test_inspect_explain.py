from functools import partial
from pathlib import Path

import pytest

from prunecli.commands import console
from prunecli.commands.inspect import explain
from prunecli.commands.prune import prune_layers
from prunecli.model.checkpoint import open_model
from prunecli.results.decisions import FILE
from prunecli.tensors.transaction import write_json
from tests.commands.calls import call, done, names, refusals
from tests.commands.heads import done as prune_heads
from tests.commands.heads import scored
from tests.families import tiny_family

ask = partial(call, explain)


@pytest.fixture(autouse=True)
def _model_and_scores():
    write_json("heads.json", scored(open_model(tiny_family("bart", "bart")), split="dev"))


def test_a_question_and_the_overview():
    made = prune_heads("bart --count 3 --json")
    Path("heads.json").unlink()  # the result is enough
    decision = made.json["decision"]
    place = next(one for one in decision["places"] if one["attention"] == "cross")
    answer = done(explain, f"pruned-heads head 1 of decoder cross-attention layer {place['layer']}")
    value, rank = place["values"][1], place["ranks"][1]
    verb = "kept" if 1 in place["kept"] else "removed"
    where = f"the cross-attention of decoder layer {place['layer']}"
    assert answer.out.startswith(f"Head 1 of {where} was {verb}: its importance")
    answer.shows(f" {value:.4g} is rank {rank} of ", "8 sentences", "split dev, in heads.json (sha256 ")
    assert ask("pruned-heads 'head 1 of cross-attention' --json").json["answers"][0]["fields"]["rank"] == rank
    overview = ask("pruned-heads").out
    assert overview.startswith("Step 1, prune-heads:\n")
    assert overview.count("decoder layer 0, cross-attention") == 1
    assert ask("pruned-heads --json").json["decisions"][0]["places"] == decision["places"]


def test_a_dry_run_explains_and_writes_nothing(monkeypatch):
    monkeypatch.setattr(console, "NO_TERMINAL_WIDTH", 60)
    before = names()
    made = prune_heads("bart --count 3 --explain --dry-run")
    assert names() == before
    tables = made.out.partition("Where each place was cut")[2]
    assert "removed" in tables
    assert max(map(len, tables.partition("Not a stock")[0].splitlines())) <= 60


def test_the_layers_that_were_named_have_no_table():
    done(prune_layers, "bart --remove encoder:0 --explain").shows("named by --remove; no values.")
    assert ask("pruned-layers 'encoder layer 0'").out == (
        "Encoder layer 0 was removed: named by --remove; it has no value.\n"
    )


@refusals(
    ("bart 'head 1'", "prunecli did not write", 1),
    ("pruned-layers 'head 1'", "chose among heads", 1),
    ("pruned-layers 'layer 99'", "nothing tells of layer 99", 1),
    ("pruned-layers 'house 1'", "no part of a model"),
)
def test_refusals_are_two_lines(refusal):
    done(prune_layers, "bart --remove encoder:0")
    refusal(ask)
    Path("pruned-layers", FILE).write_text("{")
    assert "cut short" in ask("pruned-layers 'layer 1'").err
