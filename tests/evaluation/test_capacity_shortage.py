"""Models that do not fit, as each command that runs one refuses them; the memory that is free is made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prunecli.commands.bench_latency import bench_latency
from prunecli.commands.compare import compare_models
from prunecli.commands.evaluate import evaluate
from prunecli.commands.factorize_embeddings import factorize_embeddings
from prunecli.commands.finetune import finetune
from prunecli.commands.prune import prune_experts
from prunecli.commands.score_heads import score_heads
from prunecli.commands.share import share_ffn
from prunecli.evaluation.capacity import option_size
from prunecli.methods.embeddings import factorize
from prunecli.model import cost
from prunecli.model.checkpoint import open_model
from prunecli.modules import building, fitting
from prunecli.training import train
from tests.commands.calls import Result, call, refused
from tests.families import tiny_family
from tests.quantising import quantise
from tests.stock_mixtures import tiny_mixture
from tests.tiny import tiny_nllb_moe, write_plain_tokenizer

LINES = "the hen\na hat\nno\nthe inn is on the tin\nhat and hen\n" * 4
DATA = ("--data", "text", "--pairs", "eng_Latn-fra_Latn")
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_nllb_moe(tmp_path / "moe", experts=64, d_model=32, ffn=64)
    tiny_family(tmp_path / "llama", "llama", hidden_size=64, intermediate_size=256)
    (tmp_path / "text").mkdir()
    for split in ("val", "test", "train"):
        for language in ("eng_Latn", "fra_Latn"):
            (tmp_path / "text" / f"{split}.{language}").write_text(LINES)
    (tmp_path / "lines").write_text(LINES)
    return tmp_path


def weights(path: Path, width: int) -> int:
    with open_model(path) as checkpoint:
        return width * sum(info.numel for info in checkpoint.tensors.values())


COMMANDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "evaluate": (evaluate, ("moe", *DATA, "--batch-tokens", "64", "--beam", "1", "--max-new-tokens", "4")),
    "evaluate lm": (evaluate, ("llama", "--task", "lm", "--text", "lines")),
    "bench-latency": (bench_latency, ("moe", *DATA, "--beam", "1", "--max-new-tokens", "2")),
    "score-heads": (score_heads, ("moe", *DATA)),
    "score-heads ablation": (score_heads, ("llama", "--text", "lines", "--metric", "ablation")),
    "compare-models": (compare_models, ("moe", *DATA, "--measure", "cka")),
    "finetune": (finetune, ("moe", *DATA, "--steps", "1", "--batch-tokens", "64")),
    "finetune a teacher's": (
        finetune,
        ("moe", *DATA, "--steps", "1", "--batch-tokens", "64", "--teacher", "moe"),
    ),
    "share-ffn": (
        share_ffn,
        ("llama", "--decoder", "share", "--width", "8", "--keep-units", "activations", "--text", "lines"),
    ),
}


def run(name: str, *more: str) -> Result:
    command, arguments = COMMANDS[name]
    return call(command, *arguments, *more)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"share-ffn"}))
def test_refused_before_a_weight_is_read(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(building, "read_into", read)
    monkeypatch.setattr(building, "fill", read)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 30 * KIB)
    made = run(name)
    refused(made, "30.00 KiB are free", 1)
    assert "More: prunecli inspect " in made.err
    assert not list(folder.glob("*.json"))


def ratio_of(made: Result) -> str:
    found = re.search(r"prune-experts moe --ratio ([\d.]+)", made.err)
    assert found, made.err
    return found[1]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("evaluate", ()),
        ("score-heads", ()),
        ("compare-models", ()),
        ("finetune", ()),
        ("finetune a teacher's", ()),
    ],
)
def test_the_ratio_that_is_named_fits_and_the_next_smaller_does_not(
    name: str, more: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "multiplies_natively", lambda *_: True)
    trains = name.startswith("finetune")
    # Half of the experts, more or less: 4 values of 4 bytes for each trained weight, else 2 bytes.
    free = weights(folder / "moe", 16 if trains else 2) * 2 // 3
    free += weights(folder / "moe", 4) if "teacher" in name else 0
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    made = run(name, *more)
    refused(made, "are free", 1)
    named = float(ratio_of(made))
    dtype = () if trains else ("--dtype", "bf16")
    step = 16 / (4 * 64)  # at 3:1 experts go by the dozen or so
    for fits, ratio in ((True, named), (False, named - step)):
        out = str(folder / f"out-{fits}")
        pruned = call(prune_experts, "moe", "--metric", "random", "--ratio", str(ratio), *dtype, "-o", out)
        assert pruned.status == 0, pruned.err
        again = call(
            COMMANDS[name][0], out, *COMMANDS[name][1][1:], "-o", str(folder / f"r-{fits}"), "--force"
        )
        assert (again.status == 0) is fits, again.err


def test_layer_by_layer_is_named_where_the_command_can(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model takes less than a process, so what is free is made out to be much, and its weights more."""
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 5 << 30)
    for module in (fitting, train, cost):
        monkeypatch.setattr(module, "weight_bytes", lambda *_: 8 << 30)
    for name in ("evaluate lm", "score-heads"):
        assert "--memory 4GiB" in run(name).err
    for name in ("evaluate", "score-heads ablation", "finetune", "bench-latency"):
        assert "--memory" not in run(name).err
    assert run("evaluate lm", "--memory", "4GiB").status == 0


def test_a_smaller_type_is_named_where_float32_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = weights(folder / "llama", 4)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    refused(run("evaluate lm", "--compute-dtype", "fp32"), "What fits: --compute-dtype bfloat16 (", 1)
    made = run("evaluate lm")
    assert made.status == 0
    assert "llama: stored as float32, computed in bfloat16 on the CPU (it would take " in made.err


def test_units_are_measured_in_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 30 * KIB)
    refused(run("share-ffn"), "30.00 KiB are free", 1)
    assert not (folder / "shared-ffn").exists()


def test_a_unit_that_does_not_fit_is_not_fitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factorize, "new_memory", lambda _device: 30 * KIB)
    made = call(factorize_embeddings, "llama", "--side", "input", "-o", "factorised")
    refused(made, "llama: the fit needs ", 1)
    assert "--map-dim" in made.err
    assert not (folder / "factorised").exists()


@pytest.mark.parametrize(
    ("count", "text"),
    [(18 << 30, "18GiB"), (20_000_000_000, "18.6GiB"), (MIB * 3 // 2, "1.5MiB"), (99, "99")],
)
def test_sizes_that_options_take(count: int, text: str) -> None:
    assert option_size(count) == text


@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_of_language_models_too(scheme: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_mixture("glm4_moe").bfloat16().save_pretrained(folder / "plain")
    write_plain_tokenizer(folder / "plain")
    if scheme is None:
        (folder / "plain").rename(folder / "glm")
    else:
        quantise(
            folder / "plain", folder / "glm", folder / "decoded", scheme, lambda name: "experts." in name
        )
    with open_model(folder / "glm") as checkpoint:
        free = sum(2 * info.numel for info in checkpoint.unquantised.values()) * 9 // 10
    monkeypatch.setattr(fitting, "multiplies_natively", lambda *_: True)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    made = call(evaluate, "glm", "--task", "lm", "--text", "lines")
    refused(made, "are free", 1)
    found = re.search(r"prune-experts glm --ratio ([\d.]+) first \(", made.err)
    assert found, made.err
    assert "More: prunecli inspect glm --fit" in made.err
    pruned = call(prune_experts, "glm", "--metric", "random", "--ratio", found[1], "-o", "less")
    assert pruned.status == 0, pruned.err
    with open_model(folder / "less") as checkpoint:
        left = sum(2 * info.numel for info in checkpoint.unquantised.values())
    assert left <= 0.9 * free
