"""The training script writes a loadable stock directory; its objective is what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from prunecli.demo import CHECKPOINT, LANGUAGES
from prunecli.demo.model import SIZES
from prunecli.demo.muon import Muon, orthogonalize
from prunecli.demo.objective import RoutingGoals, by_language, routing_loss
from prunecli.demo.train import Settings, batches, main, schedule

FAMILIES = (0, 0, 1, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "model"
    main(["--output", str(output), "--steps", "2", "--sentences", "8", "--threads", "1"])
    return output


def test_two_steps_write_a_directory_that_loads(trained: Path) -> None:
    from prunecli import load_model

    model = load_model(trained, device="cpu")
    ids = torch.tensor([[800, 10, 11, 2]])
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert logits.shape == (1, 4, model.config.vocab_size)
    assert torch.isfinite(logits).all()


def test_the_script_writes_the_bundled_sizes_and_tokenizer(trained: Path) -> None:
    written, bundled = (json.loads((path / "config.json").read_text()) for path in (trained, CHECKPOINT))
    assert SIZES.items() <= written.items()
    assert SIZES.items() <= bundled.items()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((trained / name).read_text()) == json.loads((CHECKPOINT / name).read_text())


def test_the_same_seed_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    main(["--output", str(tmp_path), "--steps", "2", "--sentences", "8", "--threads", "1"])
    assert (tmp_path / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--epochs", "3"])


def test_an_output_is_asked_for() -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "1"])


def gates_of(experts: list[int], count: int = 8) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(experts), count).double()


def test_mean_gates_by_language_by_hand() -> None:
    gates = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.2, 0.8]])
    found = by_language(gates, torch.tensor([0, 0, 1]), 3)
    assert torch.allclose(found, torch.tensor([[0.75, 0.25], [0.2, 0.8], [0.0, 0.0]]))


def test_the_routing_loss_vanishes_where_every_goal_is_met() -> None:
    """Four languages on two experts of their own each: balanced, 2 per language, 4 per family."""
    gates = gates_of([0, 1, 2, 3, 4, 5, 6, 7])
    languages = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    loss = routing_loss(gates, languages, FAMILIES, RoutingGoals(1.0, 2.0, 4.0))
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], math.log(8)),  # all on one expert: log 8 - 0
        (
            [0, 1, 0, 1, 4, 5, 6, 7],
            math.log(8) - 0.5 * math.log(4) - 0.5 * math.log(8),
        ),  # sisters share 0 and 1
    ],
)
def test_the_routing_loss_by_hand(experts: list[int], expected: float) -> None:
    languages = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    loss = routing_loss(gates_of(experts), languages, FAMILIES, RoutingGoals(1.0, 2.0, 4.0))
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_a_language_on_too_many_experts_is_penalised() -> None:
    """Every language on all 8: log 8 - log 2 for languages, log 8 - log 4 for families, half of both by weight."""
    gates = torch.full((8, 8), 1 / 8)
    languages = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    loss = routing_loss(gates, languages, FAMILIES, RoutingGoals(0.5, 2.0, 4.0))
    assert float(loss) == pytest.approx(0.5 * (math.log(4) + math.log(2)), abs=1e-6)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    for wide in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalize(wide))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_muon_leaves_a_parameter_without_gradient_alone() -> None:
    still, moved = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4, 4, requires_grad=True)
    moved.grad = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    Muon([still, moved]).step(0.1)
    assert torch.equal(still, torch.ones(4, 4))
    assert not torch.equal(moved, torch.ones(2, 4, 4))


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match="unpack"):
        Muon([torch.zeros(3)])


def test_batches_mix_languages_and_never_copy() -> None:
    encoded = [[[800 + language, 10 + line, 2] for line in range(9)] for language in range(len(LANGUAGES))]
    batch = next(batches(encoded, Settings(sentences=64)))
    assert (batch.source_language != batch.target_language).all()
    assert (
        set(batch.source_language.tolist())
        == set(batch.target_language.tolist())
        == set(range(len(LANGUAGES)))
    )
    assert torch.equal(batch.source[:, 0], 800 + batch.source_language)
    assert torch.equal(batch.target[:, 0], 800 + batch.target_language)
    assert torch.equal(batch.source[:, 1], batch.target[:, 1])  # the same line


def test_the_schedule_warms_up_and_decays() -> None:
    settings = Settings(steps=100, warmup=10)
    rates = [schedule(step, settings) for step in range(100)]
    assert rates[9] == 1.0
    assert np.argmax(rates) in (9, 10)
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] < 0.02
