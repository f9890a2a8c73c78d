"""`prunecli prune-experts` of language models: by texts, by weights, by ids, and every refusal of its own."""

import json
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from prunecli.commands.prune import prune_experts
from prunecli.model.checkpoint import open_model
from prunecli.tensors.documents import write_json
from tests.commands import calls
from tests.commands.calls import call
from tests.commands.test_prune_experts import kept
from tests.contracts.test_mixtures import save_tiny
from tests.gates import random_gates
from tests.reference import weights
from tests.tiny import json_of

run, done = partial(call, prune_experts), partial(calls.done, prune_experts)
FAMILIES = ("granitemoe", "glm4_moe")
"""Stacked experts, and experts of their own tensors in groups."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", request.param)


@pytest.fixture
def folder(tmp_path, model):
    """A working directory with the gates.json of `model`."""
    write_statistics(tmp_path / "gates.json", model)
    return tmp_path


def write_statistics(path: Path, model: Path) -> None:
    """Random statistics; of `code` expert 3 saw 2 tokens, the others 200 or more."""
    with open_model(model) as checkpoint:
        made = random_gates(checkpoint, ("code", "chat"))
    made.entries["code"].routed[:, 3] = 2
    write_json(path, {"format": made.format, **made.to_json()})


def best(model: Path, values: dict[str, list[float]], count: int) -> dict[str, tuple[int, ...]]:
    """The highest values of each layer, as many of each group."""
    found = {}
    with open_model(model) as checkpoint:
        for layer in checkpoint.require_mixtures():
            width = layer.num_experts // layer.groups.count
            own = []
            for group in range(layer.groups.count):
                members = range(group * width, (group + 1) * width)
                ranked = sorted(members, key=lambda e, name=layer.name: (-values[name][e], e))
                own += ranked[: count // layer.groups.count]
            found[layer.name] = tuple(sorted(own))
    return found


def by_weights(model: Path) -> dict[str, list[float]]:
    """Layer's name -> minus AIMER of each expert."""
    values = {}
    with open_model(model) as checkpoint:
        for layer in checkpoint.require_mixtures():
            stacked = [checkpoint.read(name) for name in layer.stacked_tensors]
            values[layer.name] = [
                -weights.aimer(
                    [
                        *(checkpoint.read(layer.expert_tensor(e, suffix)) for suffix in layer.expert_tensors),
                        *(tensor[e] for tensor in stacked),
                    ]
                )
                for e in range(layer.num_experts)
            ]
    return values


def test_a_layer_that_no_text_enters_goes_by_its_weights(tmp_path):
    model = save_tiny(tmp_path / "tiny", "glm4_moe")
    tensors = load_file(model / "model.safetensors")
    predicting = {
        name.replace("layers.2.", "layers.3."): value.flip(0).contiguous()
        for name, value in tensors.items()
        if name.startswith("model.layers.2.")
    }
    save_file({**tensors, **predicting}, model / "model.safetensors", {"format": "pt"})
    write_statistics(tmp_path / "gates.json", model)
    result = done(model, "--ratio", 0.5, "-o", "out")
    assert "By aimer for layers that predict further tokens" in result.err
    name = "model.layers.3.mlp"
    found = kept(tmp_path / "out")
    assert found[name] == best(model, by_weights(model), 4)[name]


def test_by_text_and_by_default_a_quarter_goes(model, folder):
    result = done(model, "--for", "code", "-o", "out")
    for text in ("removing at least 25%", "Experts by reap (default) for code, from gates.json"):
        assert text in result.err
    payload = json_of(folder / "gates.json")
    sums = payload["entries"]["code"]
    values = {
        name: [total / n for total, n in zip(sums["gate_norm_sum"][row], sums["routed"][row], strict=True)]
        for row, name in enumerate(payload["layers"])
    }
    assert kept(folder / "out") == best(model, values, 6)
    with open_model(folder / "out") as checkpoint:
        arguments = checkpoint.structure.history[-1]["arguments"]
    assert (arguments["metric"], arguments["ratio"], arguments["for"]) == ("reap", 0.25, ["code"])


def test_experts_that_saw_little_are_told_of(model, folder):
    result = done(model, "--for", "code", "--metric", "frequency", "--dry-run", "--json")
    found = json.loads(result.out)
    layers = [name.removesuffix(".experts") for name in found["kept"]]
    assert found["details"]["few_tokens"] == {name: [3] for name in layers}
    assert found["arguments"]["min_tokens"] == 100
    held = 8 * len(layers)
    assert f"{len(layers)} of {held} experts received fewer than 100 tokens of this text" in result.err
    assert f"; the result lacks {len(layers)} of them." in result.err
    quiet = run(model, "--for", "code", "--min-tokens", 2, "--dry-run", "--json")
    assert json.loads(quiet.out)["details"] == {}
    assert "saw fewer" not in quiet.err
    assert "saw fewer" not in run(model, "--dry-run").err  # with the tokens of both texts


def test_by_weights_alone(model, folder):
    (folder / "gates.json").unlink()
    done(model, "--metric", "aimer", "--ratio", 0.5, "-o", "out")
    assert kept(folder / "out") == best(model, by_weights(model), 4)


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (("--for", "cod"), "Did you mean code?", 1),
        (("--source", "eng_Latn"), "Choose the statistics that count with --for", 2),
        (("--strategy", "side-threshold"), "is for encoders and decoders", 2),
        (("--experts-per-layer", "6,4"), "Give one number", 2),
    ],
)
def test_bad_usage(arguments, message, status, model, folder):
    result = run(model, *arguments, "-o", "out")
    assert result.status == status
    assert message in result.err
    assert not (folder / "out").exists()
