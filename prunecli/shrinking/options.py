"""Options of `shrink`."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from prunecli.errors import UsageError
from prunecli.evaluation.on_text import RunOptions
from prunecli.methods.options import UnitOptions
from prunecli.options import Share, Size, hidden_option, option, selection_option, training_option

LeverName = Literal["tokens", "heads", "units", "experts", "channels", "layers"]
"""Kinds of units, in the order of their steps in the history: names of layers are the source's until layers go."""
TARGETS = ("params", "size", "fit", "speed")
"""Options that say how small the result is."""
DEFAULT_SHARE = 0.75


def _minutes(value: Any) -> Any:
    """Minutes of a duration such as "10m", "90s" or "2h"; a bare number counts minutes."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", value)
    if match is None:
        raise UsageError("not a duration", "Write 90s, 10m or 2h.")
    return float(match[1]) * {"s": 1 / 60, "m": 1, "": 1, "h": 60}[match[2]]


Minutes = Annotated[float, BeforeValidator(_minutes)]
"""A duration in minutes: 10, "10m", "90s" or "2h"."""


class ChannelOptions(UnitOptions):
    """How channels of the residual stream are recorded in the history."""

    COMMAND = "shrink"
    UNITS = "channels"


class ShrinkOptions(RunOptions):
    """Options of `shrink`: the target, what may be removed, and how long the search and the healing may take."""

    params: Share | None = option(
        "Fraction of the parameters to keep. Default: 75%, if no target is given.",
        metavar="SHARE",
        gt=0,
        lt=1,
        excludes="size fit speed",
    )
    size: Size | None = option(
        "Bytes of the weights to keep at most (4GiB).", metavar="SIZE", excludes="fit speed"
    )
    fit: Size | None = option(
        "Memory that the weights and decoding have to fit in, with a reserve of 10 %.",
        metavar="SIZE",
        excludes="speed",
    )
    speed: float | None = option(
        "Factor by which the result is faster, measured as bench-latency does it.", gt=1, excludes="memory"
    )
    only: tuple[LeverName, ...] = selection_option(
        "Kinds of units to remove, with commas: layers, heads, units, experts, tokens, channels. Default: all but "
        "channels.",
        (),
        metavar="KINDS",
    )
    uniform: bool = selection_option(
        "--uniform: the result is a stock model. --uneven: layers may keep different numbers of heads and hidden "
        "units. Default: --uniform.",
        True,
        flag="--uniform/--uneven",
    )
    replace: Literal["linear", "none"] = selection_option(
        "linear: removed layers leave a linear map in the FFN before them (ReplaceMe), where the model allows it.",
        "linear",
    )
    heal: Minutes | None = training_option(
        "Train the result for this time (10m), with the original as teacher.",
        metavar="TIME",
        gt=0,
        excludes="heal_steps memory",
    )
    heal_steps: int | None = training_option(
        "Train the result for N updates, with the original as teacher.", ge=1, excludes="memory"
    )
    teacher_logits: Path | None = training_option(
        "With --heal: file of the original's likeliest tokens, written if it is missing. The original is not in memory "
        "then while the result learns.",
        role="output",
        needs="heal heal_steps",
    )
    minutes: Minutes | None = selection_option(
        "Stop the search after this time and take the best result so far. Default: no limit.",
        metavar="TIME",
        recorded=False,
        gt=0,
    )
    trials: int = hidden_option("Whole mixtures to try after the first ones.", 8, recorded=False, ge=0)
    score_tokens: int = hidden_option("Tokens of the text, about, that the units are scored on.", 16384, ge=1)
    trial_tokens: int = hidden_option("Tokens, about, that each trial is measured on.", 4096, ge=1)

    @property
    def target(self) -> str:
        """The target in words, as the command line spells it."""
        name = next((name for name in TARGETS if getattr(self, name) is not None), "params")
        return f"--{name} {getattr(self, name) or DEFAULT_SHARE:.15g}"
