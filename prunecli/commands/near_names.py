"""Suggestions for commands and options that do not exist: names of the same meaning, then names of similar spelling."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

COMMAND_MEANINGS = {
    "bench": ("bench-latency",),
    "benchmark": ("bench-latency",),
    "calibrate": ("collect-gates", "score-heads"),
    "compress": ("prune",),
    "demo": ("run",),
    "describe": ("inspect",),
    "distill": ("finetune",),
    "eval": ("evaluate",),
    "fine-tune": ("finetune",),
    "html": ("report",),
    "importance": ("collect-gates", "score-heads"),
    "info": ("inspect",),
    "perplexity": ("evaluate",),
    "plot": ("report",),
    "quickstart": ("run",),
    "recipe": ("run",),
    "reduce": ("prune",),
    "remove": ("prune",),
    "score": ("score-heads", "evaluate"),
    "show": ("inspect", "explain"),
    "shrink": ("prune", "trim-vocabulary", "factorize-embeddings"),
    "speed": ("bench-latency",),
    "statistics": ("collect-gates",),
    "stats": ("inspect", "collect-gates"),
    "test": ("evaluate",),
    "token": ("trim-vocabulary",),
    "tokenizer": ("trim-vocabulary",),
    "train": ("finetune",),
    "translate": ("evaluate",),
    "vocab": ("trim-vocabulary",),
    "why": ("explain",),
}
"""Word -> commands of this meaning, or a word of their names."""

OPTION_MEANINGS = {
    "amount": ("ratio",),
    "beam-size": ("beam",),
    "calibration": ("text", "data"),
    "calibration-data": ("text", "data"),
    "checkpoint": ("checkpoint",),
    "corpus": ("text", "data"),
    "cpu": ("device",),
    "criterion": ("metric", "score"),
    "cuda": ("device",),
    "dataset": ("text", "data"),
    "epoch": ("steps", "minutes"),
    "file": ("text",),
    "fp16": ("dtype",),
    "fraction": ("ratio",),
    "gpu": ("device",),
    "input": ("checkpoint", "text"),
    "lang": ("langs", "target", "source"),
    "language": ("langs", "target", "source"),
    "limit": ("max-sentences",),
    "lr": ("learning-rate",),
    "max-sample": ("max-sentences",),
    "method": ("metric", "score"),
    "metric": ("metric", "score"),
    "model": ("checkpoint",),
    "num-beam": ("beam",),
    "out": ("output",),
    "overwrite": ("force",),
    "path": ("checkpoint",),
    "percent": ("ratio",),
    "precision": ("dtype",),
    "preview": ("dry-run",),
    "rate": ("ratio", "learning-rate"),
    "sample": ("max-sentences",),
    "save": ("output",),
    "save-dir": ("output",),
    "size": ("fit", "ratio"),
    "sparsity": ("ratio",),
    "src": ("source", "source-file"),
    "tgt": ("target", "target-file"),
    "verbose": ("debug", "explain"),
}
"""Word -> options and arguments of this meaning."""


def near(typed: str, known: Mapping[str, str], meanings: Mapping[str, tuple[str, ...]]) -> str:
    """Return " Did you mean …?" for a name that does not exist, or nothing if no known name is near.

    Args:
        typed: the name, which may begin with dashes.
        known: name -> how the message shows this name.
        meanings: word -> names, or words of names, of this meaning.
    """
    word = typed.lstrip("-").lower().replace("_", "-")
    words = [word, word.removesuffix("s")]
    meant = [name for each in words for name in meanings.get(each, ())]
    found = [name for name in known if name in meant or {*words, *meant} & {*name.split("-")}]
    found = found or get_close_matches(word, known, n=3)
    shown = [known[name] for name in found]
    return f" Did you mean {' or '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))}?" if shown else ""
