"""The name by which a checkpoint is known, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunecli.model.checkpoint import open_model
from prunecli.model.history import named
from prunecli.tensors.origin import origin
from tests.tiny import tiny_nllb_moe

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"hub/models--org--na-me_1.5/snapshots/{HASH}", {"path": "org/na-me_1.5", "revision": HASH}),
        (f"models--gpt2/snapshots/{HASH}", {"path": "gpt2", "revision": HASH}),
        (
            f"models--org--name/snapshots/{HASH}/0_Transformer",
            {"path": "org/name", "revision": HASH, "subfolder": "0_Transformer"},
        ),
        ("models--org--name", {"path": "models--org--name"}),
        ("other/snapshots/mine", {"path": "mine"}),
        ("snapshots/mine", {"path": "mine"}),
        ("mine/../yours", {"path": "yours"}),
    ],
)
def test_origin(tmp_path: Path, path: str, expected: dict[str, str]) -> None:
    assert origin(tmp_path / path) == expected


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / HASH
    tiny_nllb_moe(snapshot)
    (tmp_path / "short").symlink_to(snapshot)
    monkeypatch.chdir(snapshot)
    for path in (tmp_path / "short", Path()):
        with open_model(path) as checkpoint:
            assert named(checkpoint) == {
                "path": "org/name",
                "revision": HASH,
                "fingerprint": checkpoint.fingerprint,
            }
