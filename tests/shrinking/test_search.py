"""The search over mixtures, with costs that are known formulas."""

from typing import Any

import pytest

from prunecli import demo
from prunecli.errors import UsageError
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.progress import silent, unsaid
from prunecli.results.rewriting import Quality, Tried
from prunecli.selection.cut import Selection, cut
from prunecli.shrinking.levers import Lever, Levers
from prunecli.shrinking.options import ShrinkOptions
from prunecli.shrinking.search import UNLIKE, Search, curve, sizes_of

KINDS = {"units": "unit", "heads": "head", "layers": "layer", "experts": "expert"}
SHARES = tuple(step / 16 for step in range(16))


def lever(*metrics: str) -> Lever:
    return Lever((), SHARES, metrics or ("gradient",), lambda *_: pytest.fail("nothing is cut here"))


def search(costs: dict[str, Any], *, most: float = 0.6, minutes: int = 1000, **levers: Lever) -> Search:
    """Two halves of a model, of which each kind has one; a mixture costs what its kinds cost alone."""
    calls = iter(range(minutes))

    def size(shares: Any, _metrics: Any = None) -> float:
        return sum(0.5 * (1 - shares.get(name, 0.0)) for name in levers)

    def attempt(shares: Any, metrics: Any, stage: str) -> Tried | None:
        if next(calls, None) is None:
            return None
        cost = 1 + sum(costs[name](share, metrics[name]) for name, share in shares.items())
        sizes = {"parameters": round(1000 * size(shares)), "bytes": 1}
        return Tried(shares=shares, metrics=metrics, stage=stage, quality=Quality(cost=cost), **sizes)

    return Search(levers, size, lambda one: one.parameters / 1000, most, 1.0, attempt)


@pytest.mark.parametrize("minutes", [2, 5])
def test_a_short_time_is_spent_on_the_middle_of_every_curve(minutes):
    costs = {"layers": lambda share, _: 4 * share**2, "units": lambda share, _: share**2}
    model = search(costs, layers=lever(), units=lever())
    model.attempt = lambda shares, metrics, stage, attempt=model.attempt: (
        None if stage == "curve" and len(model.tried) >= minutes else attempt(shares, metrics, stage)
    )
    best = model.run(0)
    assert [{*one.shares} for one in model.tried[:2]] == [{"layers"}, {"units"}]
    assert best.shares["units"] == pytest.approx(0.64, abs=0.07)
    assert best.shares["layers"] == pytest.approx(0.16, abs=0.07)


def test_a_target_that_the_model_reaches_already_is_refused():
    with pytest.raises(UsageError, match="reaches the target already"):
        search({"units": lambda share, _: share}, most=0.5, units=lever()).run(0)


def test_the_better_metric_is_taken():
    costs = {"units": lambda share, metric: share * (1 if metric == "second" else 2)}
    best = search(costs, most=0.3, units=lever("first", "second")).run(0)
    assert best.metrics == {"units": "second"}


def test_of_equal_costs_the_least_divergence_counts_else_the_simplest_mixture():
    costs = {"units": lambda share, _: 1e-4 * share, "layers": lambda share, _: 2e-4 * share}
    alike, run = (search(costs, most=0.7, units=lever(), layers=lever()) for _ in range(2))
    assert [*alike.run(4).shares] == ["units"]
    attempt = run.attempt

    def diverging(*given: Any) -> Tried:
        """Layers make no next token another one."""
        made = attempt(*given)
        quality = made.quality.model_copy(update={"divergence": made.shares.get("units", 0.0)})
        return made.model_copy(update={"quality": quality})

    run.attempt = diverging
    assert [*run.run(4).shares] == ["layers"]


def test_shares_of_experts_hidden_units_are_widths_that_run():
    """A width of 24 leaves 16 or 8: torch's grouped product wants rows of 16 bytes."""
    given = (None, None, ShrinkOptions(), None, silent, unsaid)
    assert Levers(open_model(demo.LM_CHECKPOINT), *given)._units().shares == (0.0, 0.3333, 0.6666)


@pytest.mark.parametrize(
    "target", ["--params 0.7", "--size 1234567890", "--fit 4294967296", "--speed 1.5", "--speed 2"]
)
def test_the_target_of_a_history_can_be_typed_again(target):
    name, value = target.removeprefix("--").split()
    assert ShrinkOptions(**{name: value}).target == target


def test_no_time_for_a_mixture_is_refused():
    with pytest.raises(UsageError, match="No mixture that was measured"):
        search({"units": lambda share, _: share}, most=0.3, minutes=0, units=lever()).run(1)


def test_a_ruined_model_is_a_point_of_no_curve():
    found = curve({0.0: 0.0, 0.5: 1.0, 0.25: 2.0})
    assert [found(share) for share in (0.0, 0.25, 0.5, 0.6)] == [0.0, 2.0, 2.0, float("inf")]


@pytest.mark.parametrize("family", ["llama", "nllb-moe"])
def test_sizes_of_mixtures_are_those_of_cut_models(models, family):
    checkpoint = open_model(models[family])
    axes = {name: axes_of(checkpoint, kind) for name, kind in KINDS.items()}
    # Heads and layers not the same number from each axis, so that their sizes count.
    kept, levers = {}, {}
    for name, own in axes.items():
        for place, axis in enumerate(own):
            count = len(axis.ids)
            kept[axis.name] = axis.ids[: max(1, count - 1 - place % 2) if name in UNLIKE else count // 2]
            levers[name] = Lever(tuple(own), (), (), lambda *_: Selection(kept))
    sizes = sizes_of(checkpoint, levers, in_bytes=False)
    assert sizes({}, {}) == checkpoint.total_parameters
    rewrite = cut(checkpoint, Selection(kept, step={"command": "test", "arguments": {}}))
    made = sum(output.info.numel for output in rewrite.outputs)
    shares = dict.fromkeys(levers, 0.5)
    assert sizes(shares, dict.fromkeys(levers, "gradient")) == pytest.approx(made, rel=1e-9)
