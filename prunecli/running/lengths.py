"""How long a text may be that a model reads, and a translation that it writes; and of which tokens."""

from __future__ import annotations

from typing import Any

import torch

from prunecli.errors import CheckpointError, UsageError

LENGTH_FACTOR = 3
LENGTH_MARGIN = 50
"""An output ends at 3 x source tokens + 50 at the latest: generous also where a script costs more tokens."""
DEFAULT_CONTEXT = 2048
"""Tokens of a window at most where none are asked for: one of all of a model's positions may not fit in memory."""


def length_limit(source_tokens: int, max_positions: int | None) -> int:
    """New tokens at most for a source of so many tokens: min(3 x source + 50, positions of the model - 1)."""
    limit = LENGTH_FACTOR * source_tokens + LENGTH_MARGIN
    return limit if max_positions is None else min(limit, max_positions - 1)


def max_positions(config: Any) -> int | None:
    """Tokens that the model of `config` has positions for, or None where it does not say."""
    value = getattr(config, "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 1 else None


def vocabulary_size(config: Any) -> int | None:
    """Rows of the table of the tokens that the model of `config` reads, or None where it does not say."""
    value = getattr(config, "vocab_size", None)
    if value is None and hasattr(config, "get_text_config"):  # of text and images
        value = getattr(config.get_text_config(), "vocab_size", None)
    return value if isinstance(value, int) else None


def position_count(model: Any) -> int | None:
    """Tokens that the model has positions for, or None where nothing bounds them."""
    bound = max_positions(model.config)
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    if isinstance(positions, torch.nn.Embedding) and positions.padding_idx is not None:
        # RoBERTa and its kin count positions from behind the padding's.
        rows = positions.num_embeddings - positions.padding_idx - 1
        return rows if bound is None else min(bound, rows)
    return bound


def context_length(model: Any, tokenizer: Any) -> int | None:
    """Tokens that the model has positions for and its tokenizer allows, or None where nothing bounds them.

    Raises:
        CheckpointError: what the tokenizer allows is no number.
    """
    bound = position_count(model)
    # A tokenizer that knows no bound says so with a number beyond all bounds.
    allowed = getattr(tokenizer, "model_max_length", 1 << 30)
    if not isinstance(allowed, int | float) or not allowed >= 0:
        raise CheckpointError(
            f"{tokenizer.name_or_path}: the tokenizer's model_max_length is {allowed!r}, not a number of tokens",
            "Correct it in tokenizer_config.json.",
        )
    if allowed >= 1 << 30:
        return bound
    return int(allowed) if bound is None else min(bound, int(allowed))


def window_length(model: Any, tokenizer: Any, asked: int | None = None) -> int:
    """Tokens of the longest window of a text: `asked`, or else those that fit, `DEFAULT_CONTEXT` at most.

    Raises:
        UsageError: the model has fewer positions than `asked`.
    """
    if asked is None:
        return min(context_length(model, tokenizer) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    positions = position_count(model)
    if positions is not None and asked > positions:
        raise UsageError(
            f"`context={asked}`: the model has {positions:,} positions", f"Give at most {positions:,}."
        )
    return asked
