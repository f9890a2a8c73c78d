import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from prunecli.analysis.explanation import Explained, parse_question
from prunecli.commands.command import COMMANDS, parameters
from prunecli.errors import CheckpointError
from prunecli.methods.options import ExpertOptions, HeadOptions, LayerOptions, NarrowOptions
from prunecli.methods.sharing.options import FfnOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.decision import Decision
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from prunecli.results.decisions import FILE, Written, read_decisions
from prunecli.results.unit_scores import Scores
from tests.contracts.method_contract import made_of
from tests.contracts.test_vocabulary_method import to_lines
from tests.families import tiny_family
from tests.families.records import CASES
from tests.gates import random_gates
from tests.reference import ranking
from tests.scores import scores_by_hand, scores_of_all
from tests.stock_mixtures import save_mixture
from tests.structures import kept_ids
from tests.tiny import write_json

JSON = TypeAdapter(Written)
PRUNING = ("prune-experts", "prune-heads", "prune-ffn", "prune-layers", "share-ffn", "trim-vocabulary")


def heads(source: Checkpoint) -> Scores:
    generator = np.random.default_rng(4)
    layers = source.layout.own_attentions
    values = {layer.name: generator.integers(1, 5, len(layer.heads)).astype(float) for layer in layers}
    return scores_of_all(source, "head", generator, values, task="translation", examples=10)


def measured(source: Checkpoint) -> Scores:
    generator = np.random.default_rng(5)
    depth = {stack.side: source.layout.sizes.depth(stack) for stack in source.layout.family.stacks}
    distances = {side: generator.random((count + 1, count + 1)) for side, count in depth.items()}
    cosines = {side: 1 - np.diagonal(own, 1) for side, own in distances.items()}
    return scores_by_hand(
        cosines,
        "layer",
        "cosine",
        fingerprint=source.fingerprint,
        examples=1,
        distances={side: own.tolist() for side, own in distances.items()},
    )


def by_experts(strategy: str) -> Callable[[Checkpoint], Rewrite]:
    def decide(source: Checkpoint) -> Rewrite:
        least = None if strategy == "per-layer" else 2
        gates = random_gates(source, ("code", "chat"))
        return made_of(source, ExpertOptions(gates=gates, ratio=0.4, least=least, strategy=strategy))  # type: ignore[arg-type]

    return decide


def scored(options: HeadOptions | LayerOptions) -> Callable[[Checkpoint], Rewrite]:
    """By random scores."""
    score = heads if isinstance(options, HeadOptions) else measured
    return lambda source: made_of(source, options.model_copy(update=dict(scores=score(source))))


CHOICES = {
    "experts-per-layer": ("qwen3_moe", "expert", by_experts("per-layer")),
    "experts-of-groups": ("deepseek_v3", "expert", by_experts("per-layer")),
    "experts-threshold": ("mixtral", "expert", by_experts("global-threshold")),
    "heads": ("bart", "head", scored(HeadOptions(ratio=0.5, least=1))),
    "heads-of-a-kind": (
        "bart",
        "head",
        scored(HeadOptions(count=2, attention=("cross",), normalize="none")),
    ),
    "layers": ("bart", "layer", scored(LayerOptions(count=2))),
    "layers-of-a-run": ("llama", "layer", scored(LayerOptions(count=2, contiguous=True))),
    "widths": ("llama", "unit", NarrowOptions(ratio=0.3, metric="norms")),
    "widths-together": ("llama", "unit", NarrowOptions(ratio=0.3, metric="norms", uniform=False)),
    "shared": ("llama", "unit", FfnOptions(preset="Shared", width=5, keep_units="norms")),
    "tokens": ("bart", "token", to_lines),
}


@pytest.fixture(scope="module", params=CHOICES)
def result(request, shared_path):
    case, part, decide = CHOICES[request.param]
    folder = shared_path / request.param
    make = tiny_family if case in CASES else save_mixture
    source = open_model(make(folder / "source", case))
    rewrite = made_of(source, decide)
    apply(source, rewrite, folder / "out")
    return part, folder / "out", rewrite


def test_the_kept_are_exactly_those_that_the_result_tells_of(result):
    part, out, rewrite = result
    decision = rewrite.decision
    assert decision.part == part
    told = read_decisions(out, rewrite.structure.history)[0]
    step = {"step": 0, "command": rewrite.structure.history[0]["command"]}
    assert JSON.dump_python(told) == {**step, **JSON.dump_python(decision)}
    for place in told.places:
        together = told.together(place)
        values = [value for other in together for value in np.asarray(other.values).tolist()]
        kept = [stays for other in together for stays in other.kept.tolist()]
        bound = told.bound if part == "token" else ranking.cutoff(values, kept)
        assert place.cutoff == bound
        start = sum(len(other.ids) for other in together[: together.index(place)])
        ranks = np.asarray(place.ranks).tolist()
        assert ranks == [ranking.rank(values, kept, start + at) for at in range(len(place.ids))]
        if bound is None:
            assert place.kept.all()
            continue
        needed = np.zeros(len(place.ids), bool) if place.reason is None else place.reason > 0
        below = np.asarray(place.values) < bound
        assert not (~place.kept & ~below & (np.asarray(place.values) > bound)).any()
        if not told.least:  # then the cut says it all
            assert (place.kept & below <= needed).all()
    named = kept_ids(rewrite.structure, part)
    kept_in = {}
    for place in told.places:  # the groups of a router have one name
        kept_in.setdefault(place.side if part == "layer" else place.module, []).extend(
            place.ids[place.kept].tolist()
        )
    assert {name: tuple(kept_in[name]) for name in named} == named


def test_any_component_is_explained(result):
    part, out, rewrite = result
    explained = Explained.open(out)
    place = rewrite.decision.places[-1]
    for at in (0, len(place.ids) // 2, len(place.ids) - 1):
        where = f"of {place.side} layer {place.layer}" if place.layer is not None else ""
        cross = (
            "cross-attention" if place.attention == "cross" else "self-attention" if place.attention else ""
        )
        words = f"{part} {place.ids[at]} {cross} {where}"
        if part == "layer":
            words = f"{place.side} layer {place.ids[at]}"
        if part == "token":
            words = f"token {(place.labels or ())[at] or place.ids[at]}"
        answer = explained.answers(parse_question(words.split()))[0]
        assert answer.fields["kept"] == bool(place.kept[at])
        assert answer.fields["value"] == pytest.approx(float(np.asarray(place.values)[at]))
        assert ("was kept" if place.kept[at] else "was removed") in answer.text


def test_every_pruning_command_shows_it():
    known = {name for names in COMMANDS.values() for name in names}
    explaining = {name for name, parameters in parameters().items() if "explain" in parameters}
    assert explaining == {*PRUNING}
    assert {name for name in known if name.startswith(("prune-", "trim-"))} <= explaining


def hostile(decision: Decision, **changes: object) -> dict[str, object]:
    payload = json.loads(json.dumps(JSON.dump_python(decision)))
    payload["places"][0] |= changes
    return {"format": "prunecli.decisions/2", "decisions": [payload | {"step": 0, "command": "prune-layers"}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"values": [1.0]},
        {"kept": [0, 0]},
        {"count": 1 << 40},
        {"values": [1e300, 0, 0]},
        {"values": {"dtype": "float16", "count": 3, "data": "eJxj"}},
        {"kept": {"dtype": "bits", "count": 1 << 24, "data": ""}},
        {"reason": [0, 0, 200]},
    ],
)
def test_hostile_files_are_refused_in_a_line(changes, models):
    source = open_model(models["llama"])
    rewrite = scored(LayerOptions(count=1))(source)
    apply(source, rewrite, "out")
    decision = rewrite.decision
    depth = len(decision.places[0].ids)
    changes = {
        key: value[:depth] if isinstance(value, list) and depth < 3 else value
        for key, value in changes.items()
    }
    write_json(f"out/{FILE}", hostile(decision, **changes))
    with pytest.raises(CheckpointError) as caught:
        Explained.open(Path("out"))
    assert len(str(caught.value).splitlines()) == 2
    assert FILE in str(caught.value)
