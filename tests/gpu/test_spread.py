"""A model that one GPU does not hold: its layers over two, and what each command makes of it, as on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from prunecli.commands.evaluate import bench_latency, evaluate
from prunecli.commands.measure import collect_gates, score_heads
from prunecli.commands.prune import prune_ffn, prune_layers
from prunecli.commands.share import share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.modules.devices import devices_of
from prunecli.modules.fitting import FREE_SHARE
from prunecli.modules.loading import load_model
from prunecli.modules.logits import Logits
from tests.commands.calls import call, done, refused
from tests.families import tiny_family
from tests.gpu.conftest import REAL, TOKENS
from tests.gpu.pretend import Pretend
from tests.opening import load
from tests.stock_mixtures import save_mixture
from tests.tiny import json_of, tiny_nllb_moe, write_files

LINES = "the hen\na hat\nno\nthe inn is on the tin\nhat and hen\n" * 4
PAIR = "--data text --pairs eng_Latn-fra_Latn --batch-tokens 64 --max-sentences 3"
CARDS = [torch.device("cuda", number) for number in range(2)]
MARGIN = 4096
"""Bytes of each pretended card beside 0.7 of the weights: batches and beams of tiny models."""

COMMANDS = {
    "collect-gates": (collect_gates, f"moe {PAIR}"),
    "collect-gates text": (collect_gates, "mixtral --text a=lines"),
    "score-heads": (score_heads, f"m2m_100 {PAIR}"),
    "evaluate": (evaluate, f"moe {PAIR} --beam 2 --max-new-tokens 3"),
    "evaluate lm": (evaluate, "mixtral --task lm --text lines"),
    "prune-layers": (prune_layers, "llama --text lines --metric cka --decoder 1"),
    "prune-ffn": (prune_ffn, "llama --width 64 --metric activation --text lines"),
}
REWRITING = ("prune-layers", "prune-ffn")


@pytest.fixture(scope="module")
def models(shared_path):
    tiny_nllb_moe(shared_path / "moe", experts=4, d_model=32, ffn=256, layers=4)
    sizes = {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "encoder_layers": 4, "decoder_layers": 4}
    tiny_family(shared_path / "m2m_100", "m2m_100", d_model=32, **sizes)
    done(share_ffn, shared_path / "m2m_100", "--preset SharedEncNoDec -o", shared_path / "shared")
    tiny_family(shared_path / "llama", "llama", num_hidden_layers=6, hidden_size=64, intermediate_size=256)
    save_mixture(shared_path / "mixtral", "mixtral", num_hidden_layers=4)
    names = (f"{split}.{end}" for split in ("val", "test", "train") for end in ("eng_Latn", "fra_Latn"))
    write_files(shared_path / "text", dict.fromkeys(names, LINES))
    (shared_path / "lines").write_text(LINES)
    return shared_path


@contextmanager
def two_cards(path: Path, share: float = 0.7, capability: tuple[int, int] = (8, 0)) -> Iterator[Pretend]:
    """Each of which holds this share of the model's weights in float32."""
    weights = sum(4 * info.numel for info in open_model(path).tensors.values())
    pretend = Pretend(capability, int((share * weights + MARGIN) / FREE_SHARE), 2)
    # What passes of tiny models take is much beside their weights.
    pretend.limits = dict.fromkeys((0, 1), 10 * pretend.total)
    with pytest.MonkeyPatch.context() as patch:
        pretend.patch(patch)
        with pretend:
            yield pretend


@pytest.mark.parametrize("name", ["moe", "shared", "mixtral"])
def test_what_two_cards_compute_is_what_a_cpu_does(name, models):
    inputs = {"input_ids": TOKENS, "attention_mask": REAL}
    search = {"num_beams": 2, "max_new_tokens": 5, "min_new_tokens": 5}
    whole = load(models / name)
    decoded = {"decoder_input_ids": TOKENS} if whole.config.is_encoder_decoder else {}
    with two_cards(models / name) as cards:
        model = load_model(models / name, device="auto", dtype="float32")
        assert list(devices_of(model)) == CARDS
        assert all(0 < cards.peaks[number] <= cards.total for number in (0, 1))
        there = {key: tensor.to(CARDS[0]) for key, tensor in {**inputs, **decoded}.items()}
        logits = model(**there).logits
        assert logits.device == CARDS[0]
        found = logits.detach().cpu()
        again = Logits(model, there, there["input_ids"] > 0, by_states=True)
        assert again.has_states
        again.block(0)
        torch.testing.assert_close(again.block(0).detach().cpu().view_as(found), found)
        made = model.generate(**{key: there[key] for key in inputs}, **search).cpu()
    torch.testing.assert_close(found, whole(**inputs, **decoded).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(made, whole.generate(**inputs, **search))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_say_so_and_find_the_same(name, models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    command, line = COMMANDS[name]
    found = []
    for device in ("auto", "cpu"):
        output = tmp_path / f"{device}.json"
        # Below 8.0 float32 never becomes bfloat16, in which one card would hold it.
        capability = (7, 0) if name in REWRITING else (8, 0)
        cards = two_cards(models / line.split()[0], capability=capability)
        dtype = "" if name in REWRITING else "--compute-dtype float32"
        with cards if device == "auto" else nullcontext():
            made = done(command, line, dtype, "--device", device, "-o", output)
        assert ("its layers are spread over cuda:0 and cuda:1." in made.err) is (device == "auto")
        found.append(json_of(output / "config.json" if name in REWRITING else output))
    assert_alike(*found)


def assert_alike(one: Any, other: Any) -> None:
    """Numbers but for rounding; what names the device may differ."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"device", "seconds", "created"}:
            assert_alike(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    else:
        assert one == other


def test_speed_names_all_cards(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    text = "--data=text --pairs=eng_Latn-fra_Latn --sentences=1 --max-new-tokens=2"
    options = "--beam=1 --runs=1 --compute-dtype=fp32 --no-memory"
    with two_cards(models / "moe"):
        done(bench_latency, "moe", text, options, "-o", tmp_path / "speed.json")
    result = json_of(tmp_path / "speed.json")
    names = ["cuda:0 (pretended GPU)", "cuda:1 (pretended GPU)"]
    assert result["device"] == ", ".join(names)
    assert result["results"][0]["devices"] == names


def test_what_they_do_not_hold_together_is_refused(models, monkeypatch):
    monkeypatch.chdir(models)
    with two_cards(models / "llama", 0.4):
        made = call(evaluate, "llama --text lines --device auto --compute-dtype fp32")
    refused(made, " on cuda:0 and cuda:1 in float32 (weights ", 1)
