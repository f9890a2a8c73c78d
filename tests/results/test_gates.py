import struct
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import StatisticsError
from prunecli.methods.experts.metrics import METRICS, aggregate
from prunecli.model.checkpoint import open_model
from prunecli.results.gates import (
    NLLB_200_LAYERS,
    OUTPUTS_FORMAT,
    TEXT_SUMS,
    GateStatistics,
    read_gates,
    read_outputs,
    write_outputs,
)
from prunecli.results.matching import match_gates
from prunecli.tensors.stream import Output, zeros
from prunecli.tensors.writer import header_bytes
from tests.gates import changed, gate_statistics, random_sums
from tests.reference import released_statistics
from tests.results.tables import setting
from tests.tiny import json_of, tiny_nllb_moe, write_json

LAYERS = tuple(f"model.{side}.layers.{n}.ffn" for side in ("encoder", "decoder") for n in (1, 3))


def statistics(pairs: Sequence[str], **changes: Any) -> GateStatistics:
    entries = {pair: random_sums(sum(map(ord, pair)), 4, 8) for pair in pairs}
    return changed(gate_statistics(LAYERS, entries), **changes)


TEXT_LAYERS = ("model.layers.0.mlp", "model.layers.1.mlp")


def text_statistics(texts: Sequence[str]) -> GateStatistics:
    entries = {text: random_sums(sum(map(ord, text)), 2, 6, TEXT_SUMS) for text in texts}
    return gate_statistics(TEXT_LAYERS, entries, dtype="float32")


@pytest.mark.parametrize(
    ("given", "entry", "counts"),
    [
        (statistics(["a-b", "b-a"], split="dev"), "a-b", "top1"),
        (text_statistics(["code", "web-crawl"]), "code", "routed"),
    ],
)
def test_what_is_written_is_read_back_bit_for_bit(given, entry, counts):
    path = "gates.json"
    given.write(path, force=False)
    read = read_gates(path)
    assert changed(read, entries={}) == changed(given, entries={})
    torch.testing.assert_close(read.entries, given.entries, rtol=0, atol=0)
    assert getattr(read.entries[entry], counts).dtype == np.int64
    payload = json_of(path)
    assert payload["format"] == given.format
    assert payload["entries"][entry][counts] == getattr(given.entries[entry], counts).tolist()
    assert all(type(count) is int for count in payload["entries"][entry][counts][0])


def test_merged_texts_are_added_and_the_largest_norm_stays():
    one, other = text_statistics(["code"]), text_statistics(["web"])
    other = changed(other, entries={"code": other.entries["web"]})
    a, b, merged = (
        one.entries["code"],
        other.entries["code"],
        GateStatistics.merged([one, other], "ab").entries["code"],
    )
    for name in TEXT_SUMS:
        for row in range(2):
            pairs = zip(np.ravel(getattr(a, name)[row]), np.ravel(getattr(b, name)[row]), strict=True)
            expected = [max(x, y) if name == "norm_max" else x + y for x, y in pairs]
            assert np.ravel(getattr(merged, name)[row]).tolist() == expected


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "sha256:1"}, "fingerprint"),
        ({"mode": "beam"}, "mode"),
        ({"num_experts": 16}, "num_experts"),
        ({"layers": LAYERS[:2]}, "layers"),
    ],
)
def test_statistics_of_different_runs_are_not_merged(changes, field):
    with pytest.raises(StatisticsError, match=f"one.json and two.json cannot be merged: {field}"):
        GateStatistics.merged([statistics(["a-b"]), statistics(["a-b"], **changes)], ["one.json", "two.json"])


def test_a_missing_pair_is_named():
    given = statistics(["eng_Latn-fra_Latn", "fra_Latn-deu_Latn"])
    with pytest.raises(StatisticsError, match="lack the pair eng_Latn-deu_Latn"):
        aggregate(given, "pair", ["eng_Latn"], ["deu_Latn"])


OF_PAIR = partial(setting, "entries", "a-b")


TWO_LINES = r"gates\.json[^\n]*\n?[^\n]*$"
DAMAGES = (
    *(OF_PAIR("gate_sum", 1, 2, to=bad) for bad in (float("nan"), 10**400)),
    *(OF_PAIR("top1", 0, 0, to=bad) for bad in (1e308, -1, 0.5)),
    *(OF_PAIR("top2", to=[]), OF_PAIR("top2", 0, to=[]), OF_PAIR(to={})),
    setting("format", to="prunecli.heads/1"),
    *(setting("mode", to="guessed"), setting("model", to="nllb")),
    lambda payload: payload["entries"].update(a=payload["entries"].pop("a-b")),
)
DAMAGES_OF_TEXTS = (
    (lambda payload: payload["entries"].update({"": payload["entries"]["code"]}), "is not a name of a text"),
    (setting("entries", to={}), "entries: Dictionary should have at least 1 item"),
    (setting("mode", to="forced"), "mode is 'forced' in a file of prunecli.gates/2"),
    (lambda payload: payload["entries"]["code"].pop("norm_max"), "code: norm_max is missing"),
    (setting("format", to="prunecli.gates/1"), "mode is 'text'"),
)


@pytest.mark.parametrize(
    ("given", "spoil", "message"),
    [
        *((statistics(["a-b"]), spoil, TWO_LINES) for spoil in DAMAGES),
        *((text_statistics(["code"]), *damage) for damage in DAMAGES_OF_TEXTS),
    ],
)
def test_damaged_statistics_are_refused(given, spoil, message):
    payload = given.to_json()
    spoil(payload)
    path = write_json("gates.json", payload)
    with pytest.raises(StatisticsError, match=message):
        read_gates(path)


def test_statistics_match_the_model_that_was_run():
    checkpoint = open_model(tiny_nllb_moe("model"))
    given = statistics(["a-b"], fingerprint=checkpoint.fingerprint)
    match_gates(given, checkpoint)
    match_gates(changed(given, fingerprint=None), checkpoint)  # published files name no model
    for other, message in (
        (changed(given, fingerprint="sha256:1"), "another model"),
        (changed(given, top_k=8), "picks: 8; that model: 2"),
        (changed(given, num_experts=16), "experts per layer: 16; that model: 8"),
        (changed(given, layers=LAYERS[:3]), "sparse layers: "),
    ):
        with pytest.raises(StatisticsError, match=message):
            match_gates(other, checkpoint)


@pytest.mark.parametrize(
    ("dtype", "data", "shape"),
    [
        *(("C64", bytes(32), (2, 2)), ("BF16", bytes(8), (2, 2)), ("I64", bytes(32), (2, 2))),
        ("F64", bytes(32), (4,)),
        ("F64", struct.pack("<4d", 1, 2, float("nan"), 3), (2, 2)),
    ],
)
def test_other_types_and_shapes_are_refused(dtype, data, shape):
    tensor = Output("a/mlp", dtype, shape, zeros(shape))
    head = header_bytes([tensor], {"format": OUTPUTS_FORMAT, "fingerprint": "x"})
    Path("sums").write_bytes(head + data)
    with pytest.raises(StatisticsError, match="holds no sums of outputs"):
        read_outputs(Path("sums"))


def test_sums_of_outputs_are_always_the_same_bytes():
    sums = {("code", "mlp"): np.arange(6.0).reshape(2, 3), ("chat", "mlp"): np.ones((2, 3))}
    made = set()
    for number in range(8):
        write_outputs(path := Path(f"{number}.safetensors"), "sha256:1", [sums, sums])
        made.add(path.read_bytes())
    assert len(made) == 1
    fingerprint, read = read_outputs(path)
    assert fingerprint == "sha256:1"
    assert read.keys() == sums.keys()
    assert (read["code", "mlp"] == 2 * sums["code", "mlp"]).all()


NAMES = ("model.encoder.layers.1.ffn", "model.decoder.layers.1.ffn")


def ratios(seed: int, size: int = 8) -> dict[str, list[float]]:
    values = np.random.default_rng(seed).random((5, size))
    return dict(zip(("top1", "top2", "mean", "conf1", "conf2"), values.tolist(), strict=True))


def test_a_published_entry_keeps_its_ratios():
    entry = ratios(1, 1536)
    read = read_gates(write_json("stats.json", {"eng_Latn-fra_Latn": entry}))
    assert (read.layers, read.num_experts, read.mode) == (NLLB_200_LAYERS, 128, "published")
    assert read.layers[0] == "model.encoder.layers.3.ffn"
    assert read.layers[-1] == "model.decoder.layers.23.ffn"
    sums = read.entries["eng_Latn-fra_Latn"]
    top1, conf, mean, top2 = (
        np.array(entry[name]).reshape(12, 128) for name in ("top1", "conf1", "mean", "top2")
    )
    np.testing.assert_allclose(METRICS["importance"](sums), top1 * np.exp(conf), rtol=1e-12)
    np.testing.assert_allclose(METRICS["importance-vanilla"](sums), top1 * conf, rtol=1e-12)
    np.testing.assert_allclose(METRICS["load-balance"](sums), top1 * mean, rtol=1e-12)
    np.testing.assert_allclose(METRICS["top2"](sums), top1 + top2, rtol=1e-12)


def test_entries_of_one_side_stand_for_all_pairs_of_a_language():
    content = {"a-X": ratios(1), "b-X": ratios(2), "X-a": ratios(3), "X-b": ratios(4), "a-b": ratios(5)}
    read = read_gates(write_json("stats.json", content), NAMES, 4)
    values = METRICS["top1"](aggregate(read, "language", ["a"], ["b"]))
    np.testing.assert_allclose(values, [content["a-X"]["top1"][:4], content["X-b"]["top1"][4:]])
    everything = METRICS["top1"](aggregate(read, "global"))
    np.testing.assert_allclose(
        everything[0], np.mean([content[p]["top1"][:4] for p in ("a-X", "b-X")], axis=0)
    )
    np.testing.assert_allclose(
        everything[1], np.mean([content[p]["top1"][4:] for p in ("X-a", "X-b")], axis=0)
    )


PAIRS = tuple("-".join(pair) for pair in permutations("abc", 2))


@pytest.mark.parametrize(
    ("granularity", "chosen", "pairs"),
    [
        ("language", (["a", "b"], ["c"]), (["a-b", "a-c", "b-a", "b-c"], ["a-c", "b-c"])),
        ("pair", (["a", "b"], ["c"]), (["a-c", "b-c"], ["a-c", "b-c"])),
        ("global", (), (PAIRS, PAIRS)),
    ],
)
def test_importance_of_several_entries_is_that_of_the_released_code(granularity, chosen, pairs):
    content = {pair: ratios(seed) for seed, pair in enumerate(PAIRS)}
    content["b-a"]["top1"][:2] = [0.0, 0.0]  # experts that a pair never ranks first
    content["b-a"]["conf1"][:2] = [0.0, 0.0]
    read = read_gates(write_json("stats.json", content), NAMES, 4)
    values = METRICS["importance"](aggregate(read, granularity, *chosen))
    for row, names in enumerate(pairs):
        wanted = released_statistics.importance([content[pair] for pair in names])
        np.testing.assert_allclose(values[row], wanted[4 * row : 4 * row + 4], rtol=1e-12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a-b": {"top1": [0.1] * 7}}, "is of the shape"),
        ({"a-b": {"top1": [0.1] * 7 + [-1]}}, "negative"),
        ({"a-b": {"top1": ["x"] * 8}}, "not an array of numbers"),
        ({"a-b": [1, 2]}, "neither"),
        ({"ab": {"top1": [0.1] * 8}}, "neither"),
        ({"a-b": {"rank": [0.1] * 8}}, "neither"),
        ({}, "no language pairs"),
        ([1, 2], "no gate statistics"),
    ],
)
def test_damaged_files_are_refused(content, message):
    with pytest.raises(StatisticsError, match=message):
        read_gates(write_json("stats.json", content), NAMES, 4)
