"""`prune-experts --constant-experts`: the full model, the outputs of experts that go replaced by their mean."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from prunecli.commands.evaluate import evaluate
from prunecli.commands.finetune import finetune
from prunecli.commands.measure import collect_gates
from prunecli.commands.prune import prune_experts, prune_layers
from prunecli.errors import StatisticsError
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.modules.stock_experts import expert_modules
from prunecli.results.gates import read_outputs, write_outputs
from prunecli.text.tokens import load_tokenizer
from tests.commands.calls import call, done, refused
from tests.contracts.method_contract import assert_near
from tests.contracts.test_mixtures import assert_opens_with_its_code, logits, masked_logits, stock_class
from tests.opening import load
from tests.reference.stock_experts import every_output, expert_calls
from tests.stock_mixtures import save_mixture
from tests.tiny import config_of, write_json

FAMILIES = ("mixtral", "deepseek_v3")
"""Experts with other names on disk; correction biases and groups."""
PROSE = ("the hen and a hat", "a", "the hat is in the inn", "no hen")
CODE = ("if x: return y, else no", "x - 1")

TEXTS = "--lines --text prose=prose --text code=code"
SUMS = Path("gates.outputs.safetensors")
MEASURED = f"{TEXTS} --mean-outputs --context 8 --batch-tokens 32"

collect = partial(call, collect_gates)
prune = partial(call, prune_experts)


@pytest.fixture(autouse=True)
def _texts():
    for name, lines in (("prose", PROSE), ("code", CODE)):
        Path(name).write_text("\n".join(lines) + "\n")


def measured(model_type: str) -> Path:
    """A tiny model, its gates.json and the sums of outputs; each type is measured once."""
    kept = f"../measured-{model_type}"
    if Path(kept).is_dir():
        shutil.copytree(kept, ".", dirs_exist_ok=True)
        return Path("full")
    source = save_mixture("full", model_type)
    done(collect_gates, source, MEASURED)
    shutil.copytree(".", kept)
    return source


def outputs_by_hand(source: Path, model_type: str, lines: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
    """Sums by mixture: outputs `[experts, width]` and tokens `[experts]`, each line alone."""
    model = stock_class(model_type).from_pretrained(source).eval()
    model.set_experts_implementation("eager")
    tokenizer, modules = load_tokenizer(source), expert_modules(model)
    found = []
    with torch.no_grad():
        for line in lines:
            ids = torch.tensor([tokenizer(line)["input_ids"]])
            for start in range(0, ids.shape[1], 8):
                calls = expert_calls(model, modules, input_ids=ids[:, start : start + 8])
                for number, (name, (hidden, experts, _)) in enumerate(calls.items()):
                    outputs = every_output(modules[name], hidden)
                    chosen = functional.one_hot(experts, len(outputs)).sum(dim=1).T  # [experts, tokens]
                    if number == len(found):
                        found.append((torch.zeros(len(outputs), outputs.shape[2]).double(), torch.zeros(8)))
                    found[number][0].add_(torch.einsum("et,eth->eh", chosen.double(), outputs.double()))
                    found[number][1].add_(chosen.sum(dim=1))
    return found


@contextmanager
def with_constants(model: Any, constants: Mapping[str, Mapping[int, Tensor]]) -> Iterator[None]:
    """The stock model, every output of these experts replaced before the router's weight: module's name -> those."""

    def replaced(
        own: Mapping[int, Tensor], module: Any, given: tuple[Tensor, Tensor, Tensor], _: Tensor
    ) -> Tensor | None:
        if given[1].shape[1] == 1:  # asked by `every_output`
            return None
        hidden, experts, weights = given
        outputs = every_output(module, hidden)
        for number, value in own.items():
            outputs[number] = value
        rows = torch.arange(len(hidden))[:, None]
        return (outputs.transpose(0, 1)[rows, experts] * weights[..., None]).sum(dim=1)

    model.set_experts_implementation("eager")
    with ExitStack() as hooks:
        for name, module in expert_modules(model).items():
            hooks.enter_context(module.register_forward_hook(partial(replaced, constants[name])))
        yield


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_full_model_with_means(model_type):
    source = measured(model_type)
    by_hand = [outputs_by_hand(source, model_type, lines) for lines in (PROSE, CODE)]
    _, stored = read_outputs(SUMS)
    layers = open_model(source).mixtures
    for text, own in zip(("prose", "code"), by_hand, strict=True):
        for layer, (sums, _) in zip(layers, own, strict=True):
            torch.testing.assert_close(torch.from_numpy(stored[text, layer.name]), sums, rtol=1e-4, atol=1e-5)

    kept = {layer.name: [[0, 5], [1, 2, 4, 6, 7], [3, 4, 5]][number] for number, layer in enumerate(layers)}
    write_json("ids.json", {"kept": kept})
    done(prune_experts, source, "--keep ids.json --constant-experts --for prose,code -o out")
    step = config_of("out")["prunecli"]["history"][-1]
    assert step["arguments"] == {"constant_experts": True, "for": ["prose", "code"]}
    assert [Path(one["file"]).name for one in step["statistics"]] == ["ids.json", "gates.json"]

    full = stock_class(model_type).from_pretrained(source).eval()
    means = {}
    for number, (layer, name) in enumerate(zip(layers, expert_modules(full), strict=True)):
        total, tokens = (sum(own[number][part] for own in by_hand) for part in (0, 1))
        gone = [expert for expert in range(8) if expert not in kept[layer.name]]
        means[name] = {e: (total[e] / tokens[e].clamp(min=1)).float() for e in gone}
    expected = masked_logits(full, with_constants(full, means))
    pruned = load("out")
    assert isinstance(pruned, stock_class(model_type))
    assert_near(logits(pruned), expected)
    assert_opens_with_its_code("out", pruned, "constants stand for experts")


def test_as_vllm_reads_it():
    source = measured("mixtral")
    options = "--ratio 0.5 --strategy global-threshold --min 2 --constant-experts"
    done(prune_experts, source, options, "-o out")
    config = config_of("out")
    before, after = (load_file(f"{name}/model.safetensors") for name in ("full", "out"))
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert config["num_local_experts"] == 8
    assert sum(map(len, config["approximate_experts"].values())) == 12
    for layer in range(3):
        gone = config["approximate_experts"].get(str(layer), [])
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        for expert in range(8):
            beginning = f"{prefix}.{expert}."
            own = {name.removeprefix(beginning) for name in after if name.startswith(beginning)}
            assert own == ({"approx_value"} if expert in gone else {"w1.weight", "w2.weight", "w3.weight"})
            if expert in gone:
                assert after[f"{prefix}.{expert}.approx_value"].shape == (32,)
    for name in set(before) & set(after):
        assert torch.equal(before[name], after[name])
    assert any(name.endswith("gate.weight") for name in set(before) & set(after))


def test_it_is_evaluated_and_changed_no_more():
    measured("qwen3_moe")
    done(prune_experts, "full --ratio 0.5 --constant-experts -o out")
    done(evaluate, "full out --task lm --text prose=prose --context 8")
    refused(collect("out --text prose=prose -o again.json"), "constants stand for experts", 1)
    for command, options in (
        (prune_experts, "--metric random --ratio 0.25"),
        (prune_experts, "--metric aimer"),
        (finetune, "--text prose --steps 1"),
        (prune_layers, "--keep 0,1"),
    ):
        refused(call(command, "out", options, "-o again"), "constants stand for experts", 1)
    assert "## Constants" in Path("out/README.md").read_text()
    with pytest.raises(ValueError, match="copy the directory"):
        load_model("out", device="cpu").save_pretrained("copy")


def of_another_run() -> None:
    write_outputs(SUMS, "sha256:0", [read_outputs(SUMS)[1]])


def cut_off() -> None:
    SUMS.write_bytes(SUMS.read_bytes()[:100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path("gates.json").unlink, "gates.json: no such file"),
        (SUMS.unlink, "no such file"),
        (of_another_run, "is of another run"),
        (cut_off, "is damaged"),
    ],
)
def test_bad_sums_are_said_plainly(damage, said):
    measured("qwen3_moe")
    damage()
    for metric in ("reap", "random"):
        refused(prune(f"full --ratio 0.5 --metric {metric} --constant-experts -o out"), said, 1)
    assert not Path("out").exists()


def test_stacked_experts_are_refused():
    measured("granitemoe")
    refused(prune("full --ratio 0.5 --constant-experts -o out"), "are stacked in one tensor", 1)


def test_layer_by_layer_to_the_last_bit():
    measured("deepseek_v3")
    done(collect_gates, "full", MEASURED, "--memory 4GiB -o layers.json")
    one, other = (read_outputs(Path(f"{name}.outputs.safetensors"))[1] for name in ("gates", "layers"))
    assert all(values.any() for values in one.values())
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_experts_that_hand_out_no_outputs():
    source = save_mixture("full", "llama4_text")
    refused(collect(source, "--text prose=prose --mean-outputs"), "hand out no outputs", 1)
    assert not Path("gates.json").exists()


def test_a_text_without_sums():
    measured("qwen3_moe")
    fingerprint, stored = read_outputs(SUMS)
    write_outputs(SUMS, fingerprint, [{key: value for key, value in stored.items() if key[0] == "code"}])
    assert prune("full --ratio 0.5 --for code --constant-experts -o out").status == 0
    refused(prune("full --ratio 0.5 --constant-experts -o other"), "'prose'", 1)
    with pytest.raises(StatisticsError, match="no such file"):
        read_outputs(Path("nowhere"))
