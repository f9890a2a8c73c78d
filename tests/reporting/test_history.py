"""Steps of histories as they are shown: options as typed, everything else in words."""

from __future__ import annotations

from typing import Any

import pytest

from prunecli.reporting.history import step_text

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("prune-experts", {"ratio": 0.8, "keep": 51}, "prune-experts --ratio 0.8 (51 experts kept)"),
        ("prune-experts", {"fit_bytes": 3 << 30}, "prune-experts (to fit in 3,221,225,472 bytes)"),
        (
            "prune-heads",
            {"removed": 10, "attention": ["cross", "encoder"], "method": "gradient"},
            "prune-heads --attention cross,encoder (10 heads removed, scores by gradient)",
        ),
        (
            "finetune",
            {"train": DIGEST, "valid": None, "betas": [0.9, 0.98], "hidden": 0.5, "beam": 1, "best": 3},
            "finetune --hidden-weight 0.5 --beam 1 (text 01234567…, betas 0.9,0.98, best at step 3)",
        ),
        (
            "finetune",
            {"valid": DIGEST, "from_scratch": "bart"},
            "finetune --from-scratch bart (validated on 01234567…)",
        ),
        (
            "trim-vocabulary",
            {"keep": ["a", "b"], "cache": True, "no": False},
            "trim-vocabulary --keep a,b --cache",
        ),
        ("finetune", {"teacher": {"path": "big", "fingerprint": "sha256:1"}}, "finetune --teacher big"),
        ("odd", {"sum": f"sha256:{DIGEST}"}, "odd --sum sha256:01234567…"),
        ("odd", {"ids": list(range(99))}, "odd --ids " + ",".join(map(str, range(99)))[:159] + "…"),
        ("odd", None, "odd"),
    ],
)
def test_a_step_is_shown_as_it_was_typed(
    command: str, arguments: dict[str, Any] | None, expected: str
) -> None:
    assert step_text({"command": command, "arguments": arguments}) == expected


def test_what_it_was_made_from_may_follow() -> None:
    step = {"command": "prune-experts", "arguments": {"keep": 51}}
    assert step_text(step, "from demo") == "prune-experts (51 experts kept, from demo)"
    assert step_text({}, "from demo") == "? (from demo)"
