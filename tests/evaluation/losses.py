"""Losses of texts, without the scores that evaluate computes from them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.running.batches import measure_losses, task_batches
from prunecli.running.layerwise.runner import Runner
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from tests.opening import load


def losses(
    path: Path, texts: Sequence[str], runner: Runner | None = None, task: str = "lm", **data: Any
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`[windows]` each: sum of -log p over the counted tokens, and the number of these tokens."""
    runner = runner or InMemory(load(path))
    text = Dataset(task, PlainText((), tuple(texts)), **data)
    batches = task_batches(load_tokenizer(path), runner.model, text, 40)
    return measure_losses(runner, batches, 1 + max(max(batch.indices) for batch in batches), "reading")
