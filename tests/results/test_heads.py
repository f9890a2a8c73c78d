"""heads.json: what is written is read, sums add up, and what no run could give is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import StatisticsError
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from prunecli.results.heads import HeadScores, Method, ReportedHeads, merge, read_scores
from prunecli.results.matching import match_scores
from prunecli.selection.cut import cut
from prunecli.tensors.documents import write_json
from tests.results.tables import setting
from tests.selections import kept_heads
from tests.tiny import tiny_nllb_moe

A, B, C = (f"model.encoder.layers.{n}.self_attn" for n in range(3))


def scores(method: Method = "gradient", **changes: Any) -> HeadScores:
    made = HeadScores(
        method=method,
        fingerprint="sha256:00",
        model_type="bert",
        task="mlm",
        examples=4,
        heads={A: (0, 1), B: (0, 2, 3), C: ()},
        values={A: np.array([1.0, 3.0]), B: np.array([0.0, 2.0, 1.0]), C: np.zeros(0)},
    )
    if method != "gradient":
        made = replace(made, metric="accuracy", base=2.5)
    return replace(made, **changes)


def written(path: Path, made: HeadScores) -> Path:
    write_json(path, {"format": HeadScores.FORMAT, **made.to_json()}, force=True)
    return path


def same(one: HeadScores, other: HeadScores) -> bool:
    return one.to_json() == other.to_json()


P_VALUES = {A: np.array([0.5, 0.001]), B: np.array([1.0, 0.0, 0.2]), C: np.zeros(0)}


@pytest.mark.parametrize(
    "made",
    [
        scores(),
        scores(per="token", tokens={A: 7, B: 7, C: 9}, texts=("a, b.txt", "c.txt"), split="dev"),
        scores("ablation"),
        scores("ablation", p_values=P_VALUES),
        scores("all-but-one", metric="loss", p_values=P_VALUES),
        scores("ablation", dtype="float32", also=(scores("ablation", metric="bleu", p_values=P_VALUES),)),
        scores(
            "all-but-one", reported=ReportedHeads("accuracy", 7, 0.5, {A: 0.25, B: 1.0}, {A: 0.125, B: 1.0})
        ),
    ],
    ids=["gradient", "per token", "ablation", "tested ablation", "all but one", "two metrics", "other text"],
)
def test_what_is_written_is_read(made: HeadScores, tmp_path: Path) -> None:
    found = read_scores(written(tmp_path / "heads.json", made))
    assert same(found, made)
    assert (found.method, found.metric, found.base) == (made.method, made.metric, made.base)


PER_TOKEN = {A: 8, B: 8, C: 5}


def test_scores_per_token_are_means_over_the_tokens() -> None:
    made = scores(per="token", tokens=PER_TOKEN)
    assert made.importance() == {A: {0: 0.125, 1: 0.375}, B: {0: 0.0, 2: 0.25, 3: 0.125}, C: {}}
    other = scores(
        per="token", tokens=dict.fromkeys(PER_TOKEN, 2), examples=1, texts=("b.txt", "a.txt"), split="dev"
    )
    whole = merge([replace(made, texts=("a.txt",)), other])
    assert (whole.tokens, whole.examples, whole.per) == ({A: 10, B: 10, C: 7}, 5, "token")
    assert (whole.texts, whole.split) == (("a.txt", "b.txt"), "dev")


def test_a_file_that_does_not_say_it_is_per_example(tmp_path: Path) -> None:
    path = written(tmp_path / "heads.json", scores())
    payload = json.loads(path.read_text())
    assert payload.pop("importance") == "example"
    path.write_text(json.dumps(payload))
    assert read_scores(path).per == "example"


@pytest.mark.parametrize(
    ("command", "texts", "split"),
    [
        (["--text", "a.txt", "--text=b.txt"], ("a.txt", "b.txt"), None),
        (["--split=dev", "--pairs", "a-b, b-a", "--split", "test"], ("a-b", "b-a"), "test"),
        (["--langs"], (), None),
        (None, (), None),
    ],
)
def test_the_text_of_an_older_file_is_that_of_its_command_line(
    tmp_path: Path, command: list[str] | None, texts: tuple[str, ...], split: str | None
) -> None:
    payload = {"format": HeadScores.FORMAT, **scores().to_json(), "command": command}
    found = HeadScores.from_json(payload, tmp_path)
    assert (found.texts, found.split) == (texts, split)
    assert HeadScores.from_json({**payload, "texts": ["c.txt"], "split": "val"}, tmp_path).texts == ("c.txt",)


def test_keys_of_the_file() -> None:
    assert scores().to_json()["sum"] == {A: [1.0, 3.0], B: [0.0, 2.0, 1.0], C: []}
    assert scores("ablation").to_json()["without"][A] == [1.0, 3.0]
    alone = scores("all-but-one").to_json()
    assert (alone["only"][A], alone["best"]) == ([1.0, 3.0], {A: 1, B: 2})


def test_importance_of_gradients_is_the_mean_over_the_examples() -> None:
    assert scores().importance() == {A: {0: 0.25, 1: 0.75}, B: {0: 0.0, 2: 0.5, 3: 0.25}, C: {}}


@pytest.mark.parametrize(("metric", "found"), [("accuracy", {0: 1.5, 1: -0.5}), ("loss", {0: -1.5, 1: 0.5})])
def test_importance_of_ablation_is_what_the_model_loses(metric: str, found: dict[int, float]) -> None:
    assert scores("ablation", metric=metric).importance()[A] == found


def test_the_best_single_head_has_the_best_score() -> None:
    assert scores("all-but-one").best() == {A: 1, B: 2}
    assert scores("all-but-one", metric="perplexity").best() == {A: 0, B: 0}


def test_single_heads_rank_no_model() -> None:
    with pytest.raises(StatisticsError, match="heads of one layer"):
        scores("all-but-one").importance()


def test_sums_and_examples_add_up_in_any_order() -> None:
    draw = np.random.default_rng(0)
    parts = [
        scores(
            examples=n,
            values={A: draw.integers(0, 9, 2) / 4, B: draw.integers(0, 9, 3) / 4, C: np.zeros(0)},
        )
        for n in (3, 5, 8)
    ]
    whole = merge(parts)
    assert whole.examples == 16
    np.testing.assert_array_equal(whole.values[B], sum(part.values[B] for part in parts))
    assert same(whole, merge(parts[::-1]))
    other = merge([replace(parts[0], whole_files=True), replace(parts[1], whole_files=False)])
    assert (other.whole_files, other.mixed, whole.mixed) == (None, True, False)
    assert same(whole, merge([merge(parts[:2]), parts[2]]))
    assert same(merge(parts[:1]), parts[0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (scores(fingerprint="sha256:01"), "one.json and other.json .* the models that they are of differ"),
        (scores(task="lm"), "their tasks differ"),
        (scores(heads={A: (0, 2), B: (0, 2, 3), C: ()}), "the heads that were scored differ"),
        (scores(per="token", tokens={A: 7, B: 7, C: 9}), "per example or per token. differ"),
        (scores("ablation"), "no sums"),
    ],
)
def test_scores_that_do_not_go_together_are_not_merged(other: HeadScores, message: str) -> None:
    with pytest.raises(StatisticsError, match=message):
        merge([scores(), other], ["one.json", "other.json"])


def test_two_ablations_are_not_merged() -> None:
    with pytest.raises(StatisticsError, match="scores 1: scores of the method ablation are no sums"):
        merge([scores("ablation"), scores("ablation")])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (setting("format", to="prunecli.gates/1"), "not .prunecli.heads/1"),
        (setting("format", to="prunecli.heads/2"), "Use the prunecli"),
        (setting("method", to="magic"), "magic.* not one of gradient, ablation, all-but-one"),
        (setting("method", to="ablation"), "lacks 'without'"),
        (setting("examples", to=0), "examples is 0"),
        (setting("importance", to="word"), "importance is 'word', not one of example, token"),
        (setting("importance", to="token"), "lacks 'tokens'"),
        (setting("importance", to=[1]), "importance is .1., not one of"),
        (setting("examples", to=2.5), "examples is 2.5"),
        (setting("sum", A, to=[1.0, float("nan")]), "NaN"),
        (setting("sum", A, to=[1.0, -1.0]), "negative"),
        (setting("sum", A, to=[1.0, 1e300]), "no run gives"),
        (setting("examples", to=10**19), "not a count"),
        (setting("sum", A, to=[1.0]), "holds 1 values; 2 are needed"),
        (setting("sum", A, to="many"), "not an array"),
        (setting("sum", A, to=[1, None]), "NaN or infinity"),
        (setting("sum", to={}), "unlike under heads"),
        (setting("sum", "bert.else", to=[1.0]), "bert.else is only there"),
        (setting("sum", to=[1, 2]), "unlike under heads|damaged"),
        (setting("heads", A, to=[0, 0]), "ids are whole and differ"),
        (setting("heads", A, to=[0, -1]), "ids are whole and differ"),
        (setting("heads", A, to=[0, 10**19]), "ids are whole and differ"),
        (setting("heads", A, to=[0, 1.5]), "ids are whole and differ"),
        (setting("heads", A, to=[0, "x"]), "ids are whole and differ"),
        (setting("heads", A, to=[0, [1]]), "ids are whole and differ"),
        (setting("heads", A, to=7), "damaged"),
        (setting("model", to={}), "lacks 'fingerprint'"),
        (setting("model", to=3), "damaged"),
    ],
)
def test_damaged_files_are_refused(spoil: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    payload = {"format": HeadScores.FORMAT, **scores().to_json()}
    spoil(payload)
    path.write_text(json.dumps(payload))
    with pytest.raises(StatisticsError, match=message) as caught:
        read_scores(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (setting("base", to=None), "base holds NaN"),
        (setting("only", A, to=[1.0]), "only of .* holds 1 values; 2 are needed"),
        (setting("also", to={"bleu": {"base": 1.0, "only": {}}}), "unlike under heads"),
        (setting("also", to=[1]), "damaged"),
        (setting("reported", to={"base": 1.0, "only": {A: 1.0}, "p_value": {}}), "lacks"),
        (setting("reported", to={"only": {A: "x", B: 1.0}}), "reported only of .* not an array of numbers"),
    ],
)
def test_damaged_scores_of_single_heads_are_refused(
    spoil: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "heads.json"
    payload = {"format": HeadScores.FORMAT, **scores("all-but-one").to_json()}
    spoil(payload)
    path.write_text(json.dumps(payload))
    with pytest.raises(StatisticsError, match=message):
        read_scores(path)


def test_a_file_of_no_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StatisticsError, match="no heads"):
        read_scores(written(tmp_path / "heads.json", scores(heads={}, values={})))


def scored(path: Path) -> HeadScores:
    """Scores of the checkpoint in a directory."""
    with open_model(path) as checkpoint:
        layers = checkpoint.layout.attentions
        return HeadScores(
            method="gradient",
            fingerprint=checkpoint.fingerprint,
            model_type=checkpoint.model_type,
            task="translation",
            examples=1,
            heads={layer.name: layer.heads for layer in layers},
            values={layer.name: np.ones(layer.num_heads) for layer in layers},
        )


def check(made: HeadScores, path: Path) -> None:
    with open_model(path) as checkpoint:
        match_scores(made, checkpoint, checkpoint.layout.attentions)


def pruned(source: Path, output: Path, head: int) -> Path:
    """Without one of the two heads of the first layer."""
    with open_model(source) as checkpoint:
        rewrite = cut(
            checkpoint, kept_heads({A: (1 - head,)}, step={"source": {"fingerprint": checkpoint.fingerprint}})
        )
        apply(checkpoint, rewrite, output)
    return output


def test_scores_of_the_model_and_of_what_it_was_pruned_from_match(tmp_path: Path) -> None:
    source = tiny_nllb_moe(tmp_path / "source", layers=2)
    small = pruned(source, tmp_path / "small", 0)
    check(scored(source), source)
    check(scored(small), small)
    check(scored(source), small)


def test_scores_of_another_model_or_after_another_pruning_do_not(tmp_path: Path) -> None:
    source = tiny_nllb_moe(tmp_path / "source", layers=2)
    one, other = (pruned(source, tmp_path / f"without{head}", head) for head in (0, 1))
    with pytest.raises(StatisticsError, match="another model"):
        check(scored(tiny_nllb_moe(tmp_path / "other", layers=2, seed=1)), source)
    with pytest.raises(StatisticsError, match="another pruning"):
        check(scored(one), other)
    with pytest.raises(StatisticsError, match="another pruning"):
        check(scored(one), source)


def test_scores_that_lack_heads_of_the_model_do_not_match(tmp_path: Path) -> None:
    source = tiny_nllb_moe(tmp_path / "source", layers=2)
    made = scored(source)
    with pytest.raises(StatisticsError, match=f"lack head 1 of {A}"):
        check(replace(made, heads={**made.heads, A: (0,)}), source)
    with pytest.raises(StatisticsError, match=f"lack head 0 of {A}"):
        check(replace(made, heads={name: ids for name, ids in made.heads.items() if name != A}), source)
