"""gates.json: written, read back, merged, summed by granularity, refused where it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import PruneError, StatisticsError, UsageError
from prunecli.methods.experts.metrics import aggregate
from prunecli.model.checkpoint import open_model
from prunecli.results.gates import (
    COUNTS,
    SUMS,
    TEXT_SUMS,
    GateStatistics,
    GateSums,
    merge,
    read_gates,
    side_of,
)
from prunecli.results.matching import match_gates
from prunecli.tensors.documents import write_json
from tests.gates import changed, gate_statistics
from tests.results.tables import setting
from tests.tiny import tiny_nllb_moe

LAYERS = tuple(f"model.{side}.layers.{n}.ffn" for side in ("encoder", "decoder") for n in (1, 3))


def random_sums(seed: int, layers: int = 4, experts: int = 8, names: Sequence[str] = SUMS) -> GateSums:
    generator = np.random.default_rng(seed)

    def draw(name: str) -> np.ndarray:
        shape = (layers,) if name == "tokens" else (layers, experts)
        return generator.integers(1, 50, shape) if name in COUNTS else generator.random(shape)

    return GateSums(**{name: draw(name) for name in names})


def statistics(pairs: Sequence[str], fingerprint: str | None = "sha256:0", **changes: Any) -> GateStatistics:
    entries = {pair: random_sums(sum(map(ord, pair))) for pair in pairs}
    return changed(gate_statistics(fingerprint, "nllb-moe", "forced", LAYERS, 8, 2, entries), **changes)


TEXT_LAYERS = ("model.layers.0.mlp", "model.layers.1.mlp")


def text_statistics(texts: Sequence[str], **changes: Any) -> GateStatistics:
    entries = {text: random_sums(sum(map(ord, text)), 2, 6, TEXT_SUMS) for text in texts}
    return changed(
        gate_statistics("sha256:0", "qwen3_moe", "text", TEXT_LAYERS, 6, 2, entries, dtype="float32"),
        **changes,
    )


def write(path: Path, given: GateStatistics) -> Path:
    write_json(path, {"format": given.format, **given.to_json()}, force=True)
    return path


def same(one: GateSums, other: GateSums) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in one
    )


@pytest.mark.parametrize(
    ("given", "entry", "counts"),
    [
        (statistics(["a-b", "b-a"], split="dev"), "a-b", "top1"),
        (text_statistics(["code", "web-crawl"]), "code", "routed"),
    ],
)
def test_what_is_written_is_read_back_bit_for_bit(
    given: GateStatistics, entry: str, counts: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "gates.json", given)
    read = read_gates(path)
    assert changed(read, entries={}) == changed(given, entries={})
    assert all(same(read.entries[name], given.entries[name]) for name in given.entries)
    assert getattr(read.entries[entry], counts).dtype == np.int64
    payload = json.loads(path.read_text())
    assert payload["format"] == given.format
    assert payload["entries"][entry][counts] == getattr(given.entries[entry], counts).tolist()
    assert all(type(count) is int for count in payload["entries"][entry][counts][0])


def test_statistics_of_translation_are_written_as_before(tmp_path: Path) -> None:
    payload = json.loads(write(tmp_path / "gates.json", statistics(["a-b"])).read_text())
    assert payload["format"] == "prunecli.gates/1"
    assert list(payload["entries"]["a-b"]) == list(SUMS)


def test_merged_texts_are_added_and_the_largest_norm_stays() -> None:
    one, other = text_statistics(["code"]), text_statistics(["web"])
    other = changed(other, entries={"code": other.entries["web"]})
    a, b, merged = one.entries["code"], other.entries["code"], merge([one, other]).entries["code"]
    for name in TEXT_SUMS:
        for row in range(2):
            pairs = zip(np.ravel(getattr(a, name)[row]), np.ravel(getattr(b, name)[row]), strict=True)
            expected = [max(x, y) if name == "norm_max" else x + y for x, y in pairs]
            assert np.ravel(getattr(merged, name)[row]).tolist() == expected
    with pytest.raises(StatisticsError, match="cannot be merged: fingerprint"):
        merge([one, statistics(["a-b"], "sha256:1")])


def test_merging_adds_what_several_hold_and_keeps_the_rest() -> None:
    one, other = statistics(["a-b", "a-c"]), statistics(["a-b", "c-a"])
    merged = merge([one, other])
    assert set(merged.entries) == {"a-b", "a-c", "c-a"}
    assert same(merged.entries["a-b"], one.entries["a-b"] + other.entries["a-b"])
    assert same(merged.entries["c-a"], other.entries["c-a"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"fingerprint": "sha256:1"}, "fingerprint"),
        ({"mode": "beam"}, "mode"),
        ({"num_experts": 16}, "num_experts"),
        ({"layers": LAYERS[:2]}, "layers"),
    ],
)
def test_statistics_of_different_runs_are_not_merged(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(StatisticsError, match=f"one.json and two.json cannot be merged: {field}"):
        merge([statistics(["a-b"]), statistics(["a-b"], **changes)], ["one.json", "two.json"])


def rows(name: str, given: GateStatistics, pairs: Sequence[str], side: str) -> np.ndarray:
    total = sum(getattr(given.entries[pair], name) for pair in pairs)
    return total[[row for row, layer in enumerate(given.layers) if side_of(layer) == side]]


PAIRS = ("a-b", "a-c", "b-a", "b-c", "c-a", "c-b")


@pytest.mark.parametrize(
    ("granularity", "sources", "targets", "encoder", "decoder"),
    [
        ("global", (), (), PAIRS, PAIRS),
        ("pair", ("a",), ("b",), ("a-b",), ("a-b",)),
        ("pair", ("a", "c"), ("b", "a"), ("a-b", "c-a", "c-b"), ("a-b", "c-a", "c-b")),
        ("pair", ("a",), (), ("a-b", "a-c"), ("a-b", "a-c")),
        ("language", ("a",), ("b",), ("a-b", "a-c"), ("a-b", "c-b")),
        ("language", ("a", "b"), ("c",), ("a-b", "a-c", "b-a", "b-c"), ("a-c", "b-c")),
        ("language", ("a",), (), ("a-b", "a-c"), PAIRS),
        ("language", (), ("b",), PAIRS, ("a-b", "c-b")),
    ],
)
def test_granularities_sum_the_entries_of_section_4_2(
    granularity: str,
    sources: Sequence[str],
    targets: Sequence[str],
    encoder: Sequence[str],
    decoder: Sequence[str],
) -> None:
    given = statistics(PAIRS)
    sums = aggregate(given, granularity, sources, targets)
    for name in SUMS:
        np.testing.assert_allclose(getattr(sums, name)[:2], rows(name, given, encoder, "encoder"), rtol=1e-12)
        np.testing.assert_allclose(getattr(sums, name)[2:], rows(name, given, decoder, "decoder"), rtol=1e-12)


@pytest.mark.parametrize(
    ("granularity", "sources", "targets", "kind", "message"),
    [
        ("global", ("a",), (), UsageError, "takes no `sources`"),
        ("language", (), (), UsageError, "needs `sources` or `targets`"),
        ("language", ("d",), (), StatisticsError, "no source language 'd'"),
        ("language", (), ("eng",), StatisticsError, "no target language 'eng'"),
        ("pair", ("a",), ("a",), UsageError, "no translation"),
    ],
)
def test_languages_that_do_not_fit_are_refused(
    granularity: str, sources: Sequence[str], targets: Sequence[str], kind: type[PruneError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        aggregate(statistics(PAIRS), granularity, sources, targets)


def test_an_unknown_language_brings_near_names_and_a_missing_pair_its_name() -> None:
    given = statistics(["eng_Latn-fra_Latn", "fra_Latn-deu_Latn"])
    with pytest.raises(StatisticsError, match="Did you mean eng_Latn"):
        aggregate(given, "language", ["eng_Lat"], ["fra_Latn"])
    with pytest.raises(StatisticsError, match="lack the pair eng_Latn-deu_Latn"):
        aggregate(given, "pair", ["eng_Latn"], ["deu_Latn"])


OF_PAIR = partial(setting, "entries", "a-b")


@pytest.mark.parametrize(
    "spoil",
    [
        OF_PAIR("gate_sum", 1, 2, to=float("nan")),
        OF_PAIR("gate_sum", 1, 2, to=10**400),
        OF_PAIR("top1", 0, 0, to=1e308),
        OF_PAIR("top1", 0, 0, to=-1),
        OF_PAIR("top1", 0, 0, to=0.5),
        OF_PAIR("top2", to=[]),
        OF_PAIR("top2", 0, to=[]),
        OF_PAIR(to={}),
        setting("entries", to={}),
        setting("format", to="prunecli.heads/1"),
        setting("mode", to="guessed"),
        setting("model", to="nllb"),
        lambda payload: payload["entries"].update(a=payload["entries"].pop("a-b")),
    ],
)
def test_damaged_statistics_are_refused_in_two_lines(spoil: Callable[[Any], object], tmp_path: Path) -> None:
    payload = {"format": GateStatistics.FORMAT, **statistics(["a-b"]).to_json()}
    spoil(payload)
    path = tmp_path / "gates.json"
    path.write_text(json.dumps(payload))
    with pytest.raises(StatisticsError, match=r"gates\.json") as refused:
        read_gates(path)
    assert len(str(refused.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda payload: payload["entries"].update({"": payload["entries"]["code"]}),
            "is not a name of a text",
        ),
        (setting("entries", to={}), "entries: Dictionary should have at least 1 item"),
        (setting("mode", to="forced"), "mode is 'forced' in a file of prunecli.gates/2"),
        (lambda payload: payload["entries"]["code"].pop("norm_max"), "code: norm_max is missing"),
        (setting("entries", "code", "routed", 0, 0, to=0.5), "entries.code: routed holds fractions"),
        (setting("format", to="prunecli.gates/1"), "mode is 'text'"),
    ],
)
def test_damaged_statistics_of_texts_are_refused(
    spoil: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    given = text_statistics(["code"])
    payload = {"format": given.format, **given.to_json()}
    spoil(payload)
    path = tmp_path / "gates.json"
    path.write_text(json.dumps(payload))
    with pytest.raises(StatisticsError, match=message):
        read_gates(path)


@pytest.mark.parametrize("text", ["", "[1, 2]"])
def test_what_is_no_statistics_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "gates.json"
    path.write_text(text)
    with pytest.raises(StatisticsError, match=r"gates\.json"):
        read_gates(path)


def test_statistics_match_the_model_that_was_run(tmp_path: Path) -> None:
    with open_model(tiny_nllb_moe(tmp_path / "model")) as checkpoint:
        given = statistics(["a-b"], checkpoint.fingerprint)
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
