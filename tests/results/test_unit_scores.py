"""Scores of units: what is written is read, sums add up, and what no run could give is refused."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import StatisticsError
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.results.matching import match_scores, scores_for
from prunecli.results.unit_scores import Effects, Method, Reported, Scores, read_scores
from tests.contracts import method_contract
from tests.contracts.test_heads_method import keeping_heads
from tests.results.tables import setting
from tests.scores import scores_by_hand, scores_of_all
from tests.tiny import tiny_nllb_moe, write_json

A, B, C = (f"model.encoder.layers.{n}.self_attn" for n in range(3))
AT, BT, CT = (f"{name}.heads" for name in (A, B, C))
VALUES = {A: [1.0, 3.0], B: [0.0, 2.0, 1.0], C: []}
IDS = {A: (0, 1), B: (0, 2, 3), C: ()}
P_VALUES = {A: [0.5, 0.001], B: [1.0, 0.0, 0.2], C: []}


def scores(method: Method = "gradient", **changes: Any) -> Scores:
    fields = {"ids": IDS}
    if method != "gradient":
        fields |= {"metric": "accuracy", "base": 2.5}
    if method == "all-but-one":
        fields["best"] = {A: 1, B: 2}
    return scores_by_hand(changes.pop("values", VALUES), "head", method, **{**fields, **changes})


def written(path: Path, made: Scores) -> Path:
    made.write(path, force=True)
    return path


def layers() -> Scores:
    fields = {"ids": {"decoder": (0, 2)}, "counts": {"decoder": 4}, "per": "token"}
    fields["distances"] = {"decoder": [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]}
    return scores_by_hand({"decoder": [3.0, 1.0]}, "layer", "cosine", **fields)


REPORTED = Reported(metric="loss", examples=7, base=0.5, only={AT: 0.25, BT: 1.0}, p_value={AT: 0.5, BT: 1.0})
ALSO = Effects(metric="bleu", base=1.0, values={**scores().values})


@pytest.mark.parametrize(
    "made",
    [
        scores(),
        scores(per="token", counts={A: 7, B: 7, C: 9}, texts=["a, b.txt", "c.txt"], split="dev"),
        scores("ablation"),
        scores("all-but-one", metric="loss", p_values=P_VALUES),
        scores("ablation", dtype="float32", also=[ALSO]),
        scores("all-but-one", reported=REPORTED),
        layers(),
        scores_by_hand({"mlp": [4.0, 9.0]}, "unit", "activation-norm", per="token"),
    ],
)
def test_what_is_written_is_read(made):
    assert read_scores(written("scores.json", made), made.kind) == made


OF = {"fingerprint": "sha256:00", "model_type": "bert"}
OLD = {"format": "prunecli.heads/1", "method": "gradient", "task": "mlm", "examples": 4}
OLD |= {"models": [{"path": "here", **OF}], "model": OF}
OLD |= {"heads": {A: [0, 1], B: [0, 2, 3], C: []}, "sum": VALUES}


def old(**changes: Any) -> Scores:
    return read_scores(write_json("heads.json", {**OLD, **changes}))


def test_files_of_0_2_0_are_read():
    found = old()
    said = attrgetter(
        "kind", "method", "fingerprint", "model_type", "task", "examples", "ids", "values", "counts"
    )
    assert said(found) == said(scores())
    assert (found.per, found.models[0].path) == ("example", "here")
    per_token = old(importance="token", tokens={A: 8, B: 8, C: 5})
    assert (per_token.per, per_token.counts) == ("token", {AT: 8, BT: 8, CT: 5})


@pytest.mark.parametrize(("metric", "found"), [("accuracy", [1.5, -0.5]), ("loss", [-1.5, 0.5])])
def test_importance_of_ablation_is_what_the_model_loses(metric, found):
    assert scores("ablation", metric=metric).importance()[AT].tolist() == found


def test_sums_and_examples_add_up_in_any_order():
    draw = np.random.default_rng(0)

    def quarters(count: int) -> list[float]:
        return (draw.integers(0, 9, count) / 4).tolist()

    parts = [scores(examples=n, values={A: quarters(2), B: quarters(3), C: []}) for n in (3, 5, 8)]
    whole = Scores.merged(parts, "abc")
    assert (whole.examples, whole.counts[AT]) == (16, 16)
    np.testing.assert_array_equal(whole.values[BT], np.sum([part.values[BT] for part in parts], axis=0))
    assert (
        whole
        == Scores.merged(parts[::-1], "abc")
        == Scores.merged([Scores.merged(parts[:2], "ab"), parts[2]], "ab")
    )
    first = parts[0].model_copy(update={"whole_files": True, "texts": ["a"], "split": "dev"})
    other = Scores.merged(
        [first, parts[1].model_copy(update={"whole_files": False, "texts": ["b", "a"]})], "ab"
    )
    assert (other.whole_files, other.mixed, whole.mixed) == (None, True, False)
    assert (other.texts, other.split) == (["a", "b"], "dev")
    assert Scores.merged(parts[:1], "a") == parts[0]
    both = Scores.merged([layers(), layers()], "ab")
    assert (both.distances["decoder.layers"][0], both.counts) == ([0.0, 2.0, 4.0], {"decoder.layers": 8})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (scores(fingerprint="sha256:01"), "one.json and other.json .* fingerprint is"),
        (scores(task="lm"), "task is 'mlm' and 'lm'"),
        (scores(ids={A: (0, 2), B: (0, 2, 3), C: ()}), "ids is"),
        (scores(per="token"), "per is"),
        (scores("ablation"), "method is"),
        (layers(), "kind is"),
    ],
)
def test_scores_that_do_not_go_together_are_not_merged(other, message):
    with pytest.raises(StatisticsError, match=message):
        Scores.merged([scores(), other], ["one.json", "other.json"])
    with pytest.raises(StatisticsError, match="the method ablation are no sums"):
        Scores.merged([scores("ablation")] * 2, "ab")


DAMAGES = {
    "0.2.0": [
        (setting("importance", to="token"), "counts are not those of the axes"),
        *((setting("heads", to=7), "damaged"), (setting("model", to=3), "damaged")),
        (setting("model", to={}), "no fingerprint"),
    ],
    "gradient": [
        (setting("format", to="prunecli.scores/2"), 'this prunecli reads "prunecli.scores/1"'),
        (setting("method", to="cosine"), "method is 'cosine', not one of gradient, ablation, all-but-one"),
        (setting("method", to="ablation"), "metric or base is missing"),
        (setting("examples", to=0), "examples: .*greater than or equal to 1"),
        (setting("counts", to={}), "counts are not those of the axes"),
        *((setting("values", AT, to=[1.0, float("nan")]), "NaN"), (setting("ids", to={}), "no heads")),
        *(
            (setting("values", AT, to=[1.0, bad]), said)
            for bad, said in ((-1.0, "negative"), (1e300, "less than"))
        ),
        *(
            (setting("values", name, to=[1.0]), "values are not those of the units")
            for name in (AT, "bert.else")
        ),
        *(
            (setting("ids", AT, to=[0, bad]), said)
            for bad, said in ((0, "do not differ"), (-1, "greater than"))
        ),
        (setting("distances", to={AT: [[1.0]]}), "distances of .* not those of its layers"),
        (setting("p_values", to={AT: [1.0, 0.5]}), "p_values are not those of the units"),
    ],
    "all-but-one": [
        (setting("base", to=None), "metric or base is missing"),
        (setting("also", to=[{"metric": "bleu", "base": 1.0, "values": {}}]), "values are not those of the"),
        (setting("best", to={AT: 7, BT: 0}), "best of .* is not one of its heads"),
        (setting("reported", to={"metric": "x", "examples": 1, "base": 1.0, "only": {AT: 1.0}}), "p_value"),
        (
            setting("reported", to={"metric": "x", "examples": 1, "base": 1, "only": {AT: 1}, "p_value": {}}),
            "reported lacks",
        ),
    ],
}
"""Kind of file -> its damages, and what is said of them."""


@pytest.mark.parametrize(
    ("kind", "spoil", "message"), [(kind, *damage) for kind, own in DAMAGES.items() for damage in own]
)
def test_damaged_files_are_refused(kind, spoil, message):
    payload = {**OLD} if kind == "0.2.0" else {"distances": {}, **scores(kind).to_json()}
    payload = json.loads(json.dumps(payload))
    if kind == "0.2.0":
        del payload["models"]
    spoil(payload)
    path = write_json("heads.json", payload)
    with pytest.raises(StatisticsError, match=message) as caught:
        read_scores(path)
    assert str(path) in caught.value.message


def scored(path: Path, kind: Any = "head") -> Scores:
    method = {"head": "gradient", "unit": "activation", "layer": "cosine"}[kind]
    return scores_of_all(open_model(path), kind, np.random.default_rng(0), method=method)


def check(made: Scores, path: Path) -> Scores:
    checkpoint = open_model(path)
    return match_scores(made, checkpoint, axes_of(checkpoint, made.kind))


def pruned(source: Path, output: Path, head: int) -> Path:
    """Without one of the two heads of the first layer."""
    return method_contract.written(source, lambda opened: keeping_heads(opened, {A: (1 - head,)}), output)


def test_scores_of_the_model_and_of_what_it_was_pruned_from_match():
    source = tiny_nllb_moe("source", layers=2)
    small = pruned(source, "small", 0)
    check(scored(source), source)
    check(scored(small), small)
    for kind in ("head", "unit", "layer"):
        check(scored(source, kind), small)


def test_scores_of_another_model_or_after_another_pruning_do_not():
    source = tiny_nllb_moe("source", layers=2)
    one, other = (pruned(source, f"without{head}", head) for head in (0, 1))
    with pytest.raises(StatisticsError, match="another model"):
        check(scored(tiny_nllb_moe("other", layers=2, seed=1)), source)
    with pytest.raises(StatisticsError, match="another pruning"):
        check(scored(one), other)
    with pytest.raises(StatisticsError, match="another pruning"):
        check(scored(one), source)


def test_scores_that_lack_heads_of_the_model_do_not_match():
    source = tiny_nllb_moe("source", layers=2)
    made = scored(source)
    with pytest.raises(StatisticsError, match=f"lack head 1 of {A}"):
        check(made.model_copy(update={"ids": {**made.ids, AT: [0]}}), source)
    path = written(Path("heads.json"), made)
    checkpoint = open_model(tiny_nllb_moe("larger", layers=3))
    axes = axes_of(checkpoint, "head")
    with pytest.raises(StatisticsError, match=f"{path}: The scores are of another model"):
        scores_for(checkpoint, (path,), axes)
    with pytest.raises(StatisticsError, match="no such file"):
        scores_for(checkpoint, (Path("none.json"),), axes)
