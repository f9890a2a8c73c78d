"""Suggestions for commands and options that do not exist: names of the same meaning, then names of similar spelling."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

MEANINGS = {
    "bench": "benchmark speed time",
    "checkpoint": "input model model-path path",
    "data": "calibration-data corpus dataset",
    "debug": "traceback verbose",
    "device": "cpu cuda gpu",
    "dry-run": "preview",
    "dtype": "bf16 fp16 precision",
    "evaluate": "eval perplexity score test translate",
    "explain": "why",
    "finetune": "distill fine-tune heal train",
    "force": "overwrite",
    "gates": "calibrate statistics",
    "inspect": "describe info list show stats",
    "langs": "lang language",
    "learning-rate": "lr",
    "max-sentences": "limit max-sample sample",
    "metric": "criterion method",
    "output": "out output-dir save save-dir",
    "prune": "compress reduce remove shrink",
    "ratio": "amount fraction percent prune-ratio rate size sparsity",
    "report": "html plot table",
    "run": "demo quickstart recipe",
    "score": "criterion metric method",
    "source": "src src-lang",
    "steps": "epoch",
    "target": "tgt tgt-lang",
    "text": "calibration-data corpus dataset file",
    "vocabulary": "token tokenizer vocab",
}
"""Name, or part of a name, of a command or an option -> other words for it."""


def near(typed: str, known: Mapping[str, str]) -> str:
    """Return " Did you mean …?" for a name that does not exist, or nothing if no known name is near.

    Args:
        typed: the name, which may begin with dashes.
        known: name -> how the message shows this name.
    """
    word = typed.lstrip("-").lower().replace("_", "-")
    words = {word, word.removesuffix("s")}
    found = [
        name
        for name in known
        if any(words & {part, *MEANINGS.get(part, "").split()} for part in (name, *name.split("-")))
    ]
    shown = [known[name] for name in found or get_close_matches(word, known, n=3)]
    return f" Did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?" if shown else ""
