import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from prunecli.commands.prune import prune_experts
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from tests.commands.calls import both, names, refusals, refused
from tests.gates import random_gates
from tests.reference import released_statistics, weights
from tests.stock_mixtures import save_mixture
from tests.tiny import json_of, tiny_nllb_moe

PAIRS = tuple(f"{a}_Latn-{b}_Latn" for a in ("eng", "fra", "deu") for b in ("eng", "fra", "deu") if a != b)
ENCODER, DECODER = (tuple(f"model.{side}.layers.{n}.ffn" for n in (1, 3)) for side in ("encoder", "decoder"))


run, done = both(prune_experts)


@pytest.fixture(scope="module")
def model(shared_path):
    return tiny_nllb_moe(shared_path / "tiny", experts=16)


@pytest.fixture
def folder(model):
    """A working directory with the gates.json of `model`."""
    random_gates(open_model(model), PAIRS).write(Path("gates.json"), force=False)


def kept(directory: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = open_model(directory)
    checkpoint.check()
    return {layer.name: layer.experts for layer in checkpoint.require_mixtures()}


def test_prunes_by_language(model, folder):
    result = done(model, "--ratio 0.75 --source eng_Latn --target fra_Latn")
    assert "granularity language (default): eng_Latn to fra_Latn" in result.err
    assert "Written: pruned-experts" in result.out
    found = kept("pruned-experts")
    assert [len(ids) for ids in found.values()] == [4, 4, 4, 4]
    assert "Decoder layers" not in result.err
    assert "No languages named" not in result.err
    pruned = open_model("pruned-experts")
    step = pruned.structure.history[-1]
    assert pruned.structure.fingerprints() == (open_model(model).fingerprint,)
    assert shim_classes(pruned.config)
    assert step["arguments"]["source"] == ["eng_Latn"]
    assert step["arguments"]["ratio"] == 0.75
    assert step["experts"] == {"before": 64, "after": 16}
    assert step["statistics"]["file"] == "gates.json"


def test_without_languages_and_ratio_the_defaults_are_said(model, folder):
    done(model).says(
        "Experts by importance (default), balance 1:1 (default), granularity global (default),",
        "No --ratio given: removing at least 80%",
        "No languages named: all of gates.json count; --source and --target choose",
    )
    assert [len(ids) for ids in kept("pruned-experts").values()] == [3, 3, 3, 3]
    assert shim_classes(open_model("pruned-experts").config)


def test_a_pruned_checkpoint_is_pruned_further_with_the_statistics_of_the_original(model, folder):
    done(model, "--ratio 0.5 --balance 1:1 -o half")
    assert sum(done("half --ratio 0.5 --balance 1:1 -o quarter --json").json["held"].values()) == 32
    done(model, "--ratio 0.75 --balance 1:1 -o direct")
    assert kept("quarter") == kept("direct")
    quarter = open_model("quarter")
    assert len(quarter.structure.history) == 2
    held = {name: units.of for name, units in quarter.structure.of_kind("expert").items()}
    assert held == dict.fromkeys((*ENCODER, *DECODER), 16)


def test_fit_prints_the_arithmetic_and_fits(model, folder):
    budget = open_model(model).total_bytes
    done(model, f"--fit {budget} --fit-length 2 --fit-beam 1 -o small").shows(
        "10%", "batch 1, beam 1, 2 tokens"
    )
    assert open_model("small").total_bytes <= budget * 0.9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--balance 3:1", "Decoder layers keep 4 of 16 experts, encoder layers 12 of 16: with"),
        ("--experts-per-layer 9,3", "Decoder layers keep 3 of 16 experts, encoder layers 9 of 16"),
        ("--balance 1:3", None),
        ("--strategy global-threshold", None),
    ],
)
def test_a_decoder_that_loses_more_than_the_encoder_is_warned_of_before_writing(model, folder, options, says):
    amount = "" if "--experts-per-layer" in options else "--ratio 0.5"
    result = done(model, amount, options, "--quiet --dry-run")
    assert result.err.count("Decoder layers") == (says is not None)
    assert says is None or says in result.err


def test_thresholds_on_published_statistics_are_those_of_the_released_code(model, folder):
    layers = [[21, *[1] * 15], [6] * 16, [90, 90, 30, *[1] * 13], [*range(16)]]
    entry = {name: [x / sum(row) for row in layers for x in row] for name in ("top1", "conf1")}
    Path("stats.json").write_text(json.dumps({"eng_Latn-fra_Latn": entry}))
    options = "--metric top1 --strategy global-threshold --ratio 0.5 --min 3"
    result = done(model, "--gates stats.json", options)
    counts, theta = released_statistics.threshold_counts(layers, 32, 3)
    assert [len(ids) for ids in kept("pruned-experts").values()] == counts
    assert f"theta: {float(theta):.4f} (model), counted as in the authors' released code" in result.err


@refusals(
    ("--ratio 0.9", "would be kept"),
    ("--source eng_Lat", "Did you mean eng_Latn", 1),
    ("--granularity pair --source eng_Latn --target eng_Latn", "no tran"),
    ("--granularity global --source eng_Latn", "takes no --source"),
    ("--granularity language", "needs --source or --target"),
    ("--ratio 0.5 --experts-per-layer 3,3", "Give one of"),
    ("--fit 1KiB", "No ratio fits"),
    ("--multiple-of 4 --strategy global-threshold", "--multiple-of goes with --strategy per-layer"),
    ("--balance 3:1 --strategy global-threshold", "--balance goes with --strategy per-layer"),
    ("--multiple-of 32", "no multiple of 32"),
    ("--keep gates.json --metric top1 --multiple-of 4", "or --multiple-of"),
    ("--keep gates.json", "go with --gates", 1),
)
def test_bad_usage_ends_in_two_lines(refusal, model, folder):
    refusal(run, model)
    assert names() == ["gates.json"]


def test_checkpoints_that_have_no_experts_end_in_two_lines(folder):
    refused(run(tiny_nllb_moe("dense", sparse_step=0)), "no experts", 1)


# `prunecli prune-experts` of language models: by texts, by weights, by ids, and every refusal of its own.


FAMILIES = ("granitemoe", "glm4_moe")
"""Stacked experts, and experts of their own tensors in groups."""


@pytest.fixture(scope="module", params=FAMILIES)
def text_model(request, shared_path):
    return save_mixture(shared_path / request.param, request.param)


@pytest.fixture
def text_folder(text_model):
    """A working directory with the gates.json of `text_model`."""
    write_statistics(text_model)


def write_statistics(text_model: Path) -> None:
    """Random statistics; of `code` expert 3 saw 2 tokens, the others 200 or more."""
    made = random_gates(open_model(text_model), ("code", "chat"))
    made.entries["code"].routed[:, 3] = 2
    made.write(Path("gates.json"), force=False)


def best(text_model: Path, values: dict[str, list[float]], count: int) -> dict[str, tuple[int, ...]]:
    """The highest values of each layer, as many of each group."""
    found = {}
    checkpoint = open_model(text_model)
    for layer in checkpoint.require_mixtures():
        width = layer.num_experts // layer.groups.count
        own = []
        for group in range(layer.groups.count):
            members = range(group * width, (group + 1) * width)
            ranked = sorted(members, key=lambda e, name=layer.name: (-values[name][e], e))
            own += ranked[: count // layer.groups.count]
        found[layer.name] = tuple(sorted(own))
    return found


def by_weights(text_model: Path) -> dict[str, list[float]]:
    """Layer's name -> minus AIMER of each expert."""
    values = {}
    checkpoint = open_model(text_model)
    for layer in checkpoint.require_mixtures():
        stacked = [checkpoint.read(name) for name in layer.stacked_tensors]
        values[layer.name] = []
        for expert in range(layer.num_experts):
            names = [layer.expert_tensor(expert, suffix) for suffix in layer.expert_tensors]
            own = [*map(checkpoint.read, names), *(tensor[expert] for tensor in stacked)]
            values[layer.name].append(-weights.aimer(own))
    return values


def test_a_layer_that_no_text_enters_goes_by_its_weights():
    text_model = save_mixture("tiny", "glm4_moe")
    tensors = load_file(text_model / "model.safetensors")
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    predicting = {
        name.replace("layers.2", "layers.3"): value.flip(0).contiguous() for name, value in last.items()
    }
    save_file({**tensors, **predicting}, text_model / "model.safetensors", {"format": "pt"})
    write_statistics(text_model)
    done(text_model, "--ratio 0.5 -o out").says("By aimer for layers that predict further tokens")
    name = "model.layers.3.mlp"
    found = kept("out")
    assert found[name] == best(text_model, by_weights(text_model), 4)[name]


def test_by_text_and_by_default_a_quarter_goes(text_model, text_folder):
    done(text_model, "--for code -o out").says(
        "removing at least 25%", "Experts by reap (default) for code, from gates.json"
    )
    payload = json_of("gates.json")
    sums = payload["entries"]["code"]
    values = {
        name: [total / n for total, n in zip(sums["gate_norm_sum"][row], sums["routed"][row], strict=True)]
        for row, name in enumerate(payload["layers"])
    }
    assert kept("out") == best(text_model, values, 6)
    arguments = open_model("out").structure.history[-1]["arguments"]
    assert (arguments["metric"], arguments["ratio"], arguments["for"]) == ("reap", 0.25, ["code"])


def test_experts_that_saw_little_are_told_of(text_model, text_folder):
    result = done(text_model, "--for code --metric frequency --dry-run --json")
    found = result.json
    layers = [name.removesuffix(".experts") for name in found["kept"]]
    assert found["details"]["few_tokens"] == {name: [3] for name in layers}
    held = 8 * len(layers)
    result.says(
        f"{len(layers)} of {held} experts received fewer than 100 tokens of this text",
        f"; the result lacks {len(layers)} of them.",
    )
    assert "received fewer" not in run(text_model, "--dry-run").err  # with the tokens of both texts


def test_by_weights_alone(text_model, text_folder):
    Path("gates.json").unlink()
    done(text_model, "--metric aimer --ratio 0.5 -o out")
    assert kept("out") == best(text_model, by_weights(text_model), 4)


@refusals(
    ("--for cod", "Did you mean code?", 1),
    ("--source eng_Latn", "Choose the statistics that count with --for"),
    ("--strategy side-threshold", "is for encoders and decoders"),
    ("--experts-per-layer 6,4", "Give one number"),
)
def test_bad_usage(refusal, text_model, text_folder):
    refusal(run, text_model, "-o out")
    assert not Path("out").exists()
