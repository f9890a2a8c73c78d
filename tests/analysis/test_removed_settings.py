"""Which checkpoints were reduced in the same way, and what tells the others apart."""

from __future__ import annotations

from typing import Any

import pytest

from prunecli.analysis.removed import Value, kinds_of, names, setting
from prunecli.model.attention import KINDS

ORIGIN = {"path": "full", "fingerprint": "sha256:aaaaaaaaaa"}


def step(command: str = "prune-experts", *, gates: str | None = "1" * 64, **arguments: Any) -> dict[str, Any]:
    made = {"command": command, "arguments": arguments, "source": ORIGIN}
    return made if gates is None else {**made, "statistics": {"file": "gates.json", "sha256": gates}}


def called(*histories: list[dict[str, Any]]) -> list[str]:
    return names([setting(history) for history in histories])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ratio": 0.5, "keep": 128}, {"ratio": 0.8, "keep": 51}),
        ({"fit_bytes": 5, "ratio": 0.1}, {"ratio": 0.3}),
        ({"experts_per_layer": {"encoder": 36, "decoder": 12}}, {"ratio": 0.8, "balance": "3:1"}),
        ({"experts_per_layer": {"encoder": 4, "decoder": 4}, "balance": "3:1"}, {"balance": "1:1"}),
    ],
)
def test_amounts_are_one_line(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert called([step(**first)], [step(**second)]) == ["", ""]


@pytest.mark.parametrize(
    ("histories", "wanted"),
    [
        (
            [[step(balance="1:1", metric="top1")], [step(balance="3:1", metric="top1")]],
            ["balance 1:1", "balance 3:1"],
        ),
        (
            [[step(metric="top1", strategy="a")], [step(metric="importance", strategy="b")]],
            ["metric top1, strategy a", "metric importance, strategy b"],
        ),
        (
            [
                [step(metric="importance", granularity="language", source=["a"], target=["b"])],
                [step(metric="importance", granularity="global")],
                [step(metric="random", seed=0, gates=None)],
            ],
            [
                "metric importance, granularity language",
                "metric importance, granularity global",
                "metric random",
            ],
        ),
        (
            [[step(gates="1" * 64)], [step(gates="2" * 64)]],
            ["statistics gates.json (11111111)", "statistics gates.json (22222222)"],
        ),
        (
            [[step(gates="1" * 64, seed=0)], [step(gates="2" * 64, seed=1)]],
            ["seed 0", "seed 1"],
        ),
        (
            [[step("prune-heads", method="gradient")], [step("prune-heads", method="ablation")]],
            ["method gradient", "method ablation"],
        ),
        ([[step(seed=0)], [step(seed=1)]], ["seed 0", "seed 1"]),
        ([[step(min_per_layer=4)], [step()]], ["min per layer 4", "no min per layer"]),
        ([[step(), step(ratio=0.5)], [step(ratio=0.9)]], ["", ""]),
        ([[step(), step(gates="2" * 64)], [step()]], ["statistics of each step", "statistics gates.json"]),
        ([[step()], [step(), step("finetune", steps=5)]], ["prune-experts", "prune-experts, finetune"]),
        ([[step()], [step()], [step(dtype="float16")]], ["no dtype", "no dtype", "dtype float16"]),
        (
            [
                [step("prune-ffn", gates=None, text={"files": [name], "sha256": name * 64})]
                for name in ("a", "b")
            ],
            ["text a", "text b"],
        ),
        (
            [[step("prune-layers", removed={"decoder": [number]})] for number in (3, 5)],
            ['removed {"decoder": [3]}', 'removed {"decoder": [5]}'],
        ),
        (
            [[step("prune-layers", encoder=1)], [step("prune-layers", decoder=2, removed={"decoder": [1]})]],
            ["side encoder", "side decoder"],
        ),
        (
            [[step(ratio=ratio), step("finetune"), step("prune-heads", ratio=0.5)] for ratio in (0.1, 0.2)],
            ["ratio 0.1", "ratio 0.2"],
        ),
    ],
)
def test_lines_are_named_by_what_differs(histories: list[list[dict[str, Any]]], wanted: list[str]) -> None:
    assert called(*histories) == wanted


def test_origins_are_told_apart_by_name_and_by_fingerprint() -> None:
    other = {**step(), "source": {"path": "other", "fingerprint": "sha256:bbbbbbbbbb"}}
    same = {**step(), "source": {"path": "full", "fingerprint": "sha256:bbbbbbbbbb"}}
    assert called([step()], [other]) == ["of full", "of other"]
    assert called([step()], [same]) == ["of full (aaaaaaaa)", "of full (bbbbbbbb)"]
    stock = setting([], Value("stock", "sha256:c"))
    assert names([stock, setting([step()])]) == ["of stock", "of full"]


def test_values_of_anything_are_read() -> None:
    odd = [
        {
            "command": "prune-heads",
            "arguments": {"ratio": [None], "attention": 7},
            "source": {},
            "statistics": [{"file": 1}],
        },
        {},
    ]
    assert called(odd, [{"arguments": {"experts_per_layer": {"encoder": 1, "decoder": 0}}}])[0]


@pytest.mark.parametrize(
    ("stated", "kinds"),
    [({}, KINDS), ("cross", ("cross",)), (["decoder", "cross"], ("decoder", "cross")), (7, ("7",))],
)
def test_kinds_of_attention(stated: Any, kinds: tuple[str, ...]) -> None:
    assert kinds_of({"attention": stated}) == kinds
