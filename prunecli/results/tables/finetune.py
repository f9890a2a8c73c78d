"""OUTPUT.finetune.json: the training's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunecli.results.tables.rows import Tables, scalars


def tables(payload: Mapping[str, Any]) -> Tables:
    """`training` and `validation`: a row for each step that was logged."""
    return {key: [scalars(step) for step in payload.get(key, ())] for key in ("training", "validation")}
