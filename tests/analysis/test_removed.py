from typing import Any

import pytest

from prunecli.analysis.removed import Removed, names, removed, setting, steps_of_one_training
from prunecli.model.checkpoint import open_model
from prunecli.report.pictures import training_curves
from tests.families import tiny_family
from tests.pictures import drawn
from tests.tiny import fewer_experts, tiny_nllb_moe


def _step(command, **arguments):
    return {"command": command, "arguments": arguments}


def _heads(name, heads, *history):
    """A Marian model (3 + 2 layers of 4 heads) whose config.json says that it kept these."""
    mark = {"version": 1, "heads": heads, "original_heads": dict.fromkeys(heads, 4), "history": list(history)}
    return open_model(tiny_family(name, "marian", prunecli=mark))


def test_heads_of_one_attention_and_of_all():
    encoder = {
        f"model.encoder.layers.{layer}.self_attn": kept for layer, kept in enumerate([[0], [], [1, 3]])
    }
    cross = {"model.decoder.layers.1.encoder_attn": [2]}
    prune = "prune-heads"
    unit, found = removed(
        [
            open_model(tiny_family("full", "marian")),
            _heads("encoder", encoder, _step(prune, ratio=0.75, attention=["encoder"])),
            _heads("all", {**encoder, **cross}, _step(prune, ratio=0.4)),
            _heads("one", cross, _step(prune, attention="cross"), _step("finetune", attention=[])),
            _heads("two", cross, _step(prune, attention=["decoder", "cross"])),
            _heads("every", cross, _step(prune, attention=["encoder", "decoder", "cross"])),
        ]
    )
    assert unit == "heads"
    kinds = ("attention encoder", "attention all", "finetune, attention cross", "attention decoder, cross")
    lines = [f"prune-heads, {kind}" for kind in (*kinds, "attention all")]
    fractions = (9 / 12, 12 / 28, 3 / 8, 3 / 16, 3 / 28)
    reduced = [Removed(pytest.approx(f), (line,)) for f, line in zip(fractions, lines, strict=True)]
    assert found == [Removed(0.0, tuple(dict.fromkeys(lines)), is_original=True), *reduced]


def test_experts():
    steps = {"a": {"granularity": "language", "metric": "importance"}, "b": {"metric": "random"}}
    made = (fewer_experts(name, (0, 7), _step("prune-experts", **step)) for name, step in steps.items())
    pruned = map(open_model, made)
    unit, found = removed([open_model(tiny_nllb_moe("full")), *pruned])
    assert unit == "experts"
    assert found == [
        Removed(0.0, ("metric importance", "metric random"), is_original=True),
        Removed(0.75, ("metric importance",)),
        Removed(0.75, ("metric random",)),
    ]


def test_heads_and_experts_are_counted_as_parameters():
    experts = open_model(fewer_experts("experts", (0, 7), _step("prune-experts")))
    heads = _heads("heads", {"model.decoder.layers.1.encoder_attn": [2]}, _step("prune-heads"))
    unit, found = removed([open_model(tiny_nllb_moe("full")), experts, heads])
    assert unit == "parameters"
    alone = [("prune-experts",), ("prune-heads",)]
    assert [one.lines for one in found] == [("prune-experts", "prune-heads"), *alone]


def test_parameters_of_a_reduced_checkpoint_are_counted_against_its_original():
    before = {"parameters": 1 << 20, "bytes": 1}
    step = {**_step("prune-ffn"), "source": {"path": "full"}, "before": before}
    one = open_model(fewer_experts("one", (0, 7), step))
    assert removed([one])[1][0].fraction == 1 - one.total_parameters / (1 << 20)


ORIGIN = {"path": "full", "fingerprint": "sha256:aaaaaaaaaa"}


def step(command: str = "prune-experts", *, gates: str | None = "1" * 64, **arguments: Any) -> dict[str, Any]:
    made = {**_step(command, **arguments), "source": ORIGIN}
    return made if gates is None else {**made, "statistics": {"file": "gates.json", "sha256": gates}}


def called(*histories: Any) -> list[str]:
    """Names of histories; a step alone is one too."""
    return names([setting(own if isinstance(own, list) else [own]) for own in histories])


@pytest.mark.parametrize(
    ("histories", "wanted"),
    [
        ([step(balance="1:1"), step(balance="3:1")], ["balance 1:1", "balance 3:1"]),
        (
            [
                step(metric="importance", granularity="language", source=["a"], target=["b"]),
                step(metric="importance", granularity="global"),
                step(metric="random", seed=0, gates=None),
            ],
            [
                "metric importance, granularity language",
                "metric importance, granularity global",
                "metric random",
            ],
        ),
        (
            [step(gates="1" * 64), step(gates="2" * 64)],
            ["statistics gates.json (11111111)", "statistics gates.json (22222222)"],
        ),
        ([step(gates="1" * 64, seed=0), step(gates="2" * 64, seed=1)], ["seed 0", "seed 1"]),
        ([step(min_per_layer=4), step()], ["min per layer 4", "no min per layer"]),
        ([[step(), step(ratio=0.5)], step(ratio=0.9)], ["", ""]),
        ([step(ratio=0.5, keep=128), step(ratio=0.8, keep=51)], ["", ""]),  # amounts are one line
        ([step(fit_bytes=5, ratio=0.1), step(ratio=0.3)], ["", ""]),
        ([step(experts_per_layer={"encoder": 36, "decoder": 12}), step(ratio=0.8)], ["", ""]),
        (
            [[step(), step(gates="2" * 64)], step()],
            ["statistics of each step", "statistics gates.json (11111111)"],
        ),
        ([step(), [step(), step("finetune", steps=5)]], ["prune-experts", "prune-experts, finetune"]),
        ([step(), step(), step(dtype="float16")], ["no dtype", "no dtype", "dtype float16"]),
        (
            [
                step("prune-ffn", gates=None, text={"files": [name], "sha256": name * 64})
                for name in ("a", "b")
            ],
            ["text a (aaaaaaaa)", "text b (bbbbbbbb)"],
        ),
        (
            [step("prune-layers", removed={"decoder": [number]}) for number in (3, 5)],
            ['removed {"decoder": [3]}', 'removed {"decoder": [5]}'],
        ),
        (
            [step("prune-layers", encoder=1), step("prune-layers", decoder=2, removed={"decoder": [1]})],
            ["side encoder", "side decoder"],
        ),
        (
            [[step(ratio=ratio), step("finetune"), step("prune-heads", ratio=0.5)] for ratio in (0.1, 0.2)],
            ["ratio 0.1", "ratio 0.2"],
        ),
    ],
)
def test_lines_are_named_by_what_differs(histories, wanted):
    assert called(*histories) == wanted


def test_origins_are_told_apart_by_name_and_by_fingerprint():
    other = {**step(), "source": {"path": "other", "fingerprint": "sha256:bbbbbbbbbb"}}
    same = {**step(), "source": {"path": "full", "fingerprint": "sha256:bbbbbbbbbb"}}
    assert called(step(), other) == ["of full (aaaaaaaa)", "of other (bbbbbbbb)"]
    assert called(step(), same) == ["of full (aaaaaaaa)", "of full (bbbbbbbb)"]
    stock = setting([], "stock (c)")
    assert names([stock, setting([step()])]) == ["of stock (c)", "of full (aaaaaaaa)"]


def trained(steps: int, seed: int = 0, **arguments: Any) -> dict[str, Any]:
    return _step("finetune", steps=steps, seed=seed, **arguments)


PRUNED = _step("prune-heads", ratio=0.5)


@pytest.fixture
def made():
    count = iter(range(100))

    def make(*history):
        mark = {"version": 1, "history": list(history)}
        return open_model(tiny_family(str(next(count)), "gpt2", prunecli=mark))

    return make


def test_checkpoints_of_one_training_and_what_was_made_of_them(made):
    early, late = trained(10), trained(40, best=30)
    checkpoints = [made(early), made(late), made(late, PRUNED), made(early, PRUNED), made(early, PRUNED)]
    steps = [(10, 0), (40, 1), (40, 1), (10, 0), (10, 0)]
    assert steps_of_one_training(checkpoints, [0, 0, 0.5, 0.5, 0.25]) == steps


OTHERS = {
    "no training": [[], [PRUNED]],
    "nothing reduced": [[trained(10)], [trained(40)]],
    "one step": [[trained(10)], [trained(10), PRUNED]],
    "two trainings": [[trained(10)], [trained(40, seed=1)], [trained(10), PRUNED]],
    "other origins": [[trained(10)], [PRUNED, trained(40)], [trained(10), PRUNED]],
    "one share twice": [[trained(10)], [trained(40), PRUNED], [trained(40), PRUNED, trained(1)]],
    "no steps": [[{"command": "finetune"}], [trained(40)], [trained(40), PRUNED]],
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_are_none(made, case):
    checkpoints = [made(*history) for history in OTHERS[case]]
    removed = [0.5 if PRUNED in history[1:] else 0.0 for history in OTHERS[case]]
    assert steps_of_one_training(checkpoints, removed) is None


def test_scores_are_relative_to_the_unpruned_model_of_the_step():
    removed = [0.0, 0.0, 0.5, 0.5]
    steps = [(10, 0), (100, 1), (100, 1), (10, 0)]
    for scores, whole, half in (
        ([20.0, 50.0, 40.0, 5.0], [(10, 1.0), (100, 1.0)], [(10, 0.25), (100, 0.8)]),
        ([0.0, 40.0, 10.0, 0.0], [(100, 1.0)], [(100, 0.25)]),
    ):
        chart = training_curves("c", scores, removed, steps, ("heads", "chrF++")).specification(400)
        lines = {}
        for row in drawn(chart, "line"):
            lines.setdefault(row["series"], []).append((row["x"], row["y"]))
        assert lines == {"0% of heads removed": whole, "50% of heads removed": half}
        x_axis = chart["layer"][0]["encoding"]["x"]
        assert (x_axis["scale"]["type"], x_axis["axis"]["values"]) == ("log", [10, 100])
        assert chart["layer"][0]["encoding"]["y"]["scale"] == {"zero": True}
