"""Options of `finetune` that say how a model is trained and what is written of it, and what their values mean."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from prunecli.commands.options import computed_dtype
from prunecli.errors import UsageError
from prunecli.tensors.quantities import whole_numbers

TrainedPart = Literal["all", "routers", "embeddings", "experts"]
"""Values of --train."""


def dtype_out(text: str) -> str:
    """Type of written weights."""
    from prunecli.tensors.dtypes import parse_computed

    return parse_computed(text, "--dtype-out")


DropoutOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=0.99,
        metavar="P",
        help="Rate of all dropouts, in training alone. Default: config.json's.",
    ),
]
TrainOption = Annotated[TrainedPart, typer.Option(help="What learns; all else stays as it is.")]
LoraOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="R",
        help="Learn updates of rank R of attentions' and FFNs' linear layers instead, or with --train experts of "
        "experts, merged in the result; needs peft.",
    ),
]
CheckpointingOption = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Compute activations again on the way back: less memory, more time.",
    ),
]
SaveEveryOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Also write the model after each N updates, as OUTPUT.steps/step-N.",
    ),
]
KeepAtOption = Annotated[
    str | None,
    typer.Option(metavar="N,M", help="Also write it after these updates."),
]
DtypeOutOption = Annotated[
    str | None,
    typer.Option(
        parser=dtype_out,
        metavar="TYPE",
        help="Type of the written weights: float16, bfloat16, float32; default: as stored.",
    ),
]
TrainingDtypeOption = Annotated[
    str,
    typer.Option(
        parser=computed_dtype,
        metavar="TYPE",
        help="Type to compute in; weights are kept in float32; float16, on a GPU, scales the loss. "
        "auto: bfloat16 on a GPU that multiplies it (compute capability 8.0 on), "
        "float32 elsewhere.",
    ),
]


def step_numbers(text: str | None) -> tuple[int, ...]:
    """Value of --keep-at.

    Raises:
        UsageError: no numbers.
    """
    numbers = () if text is None else whole_numbers(text)
    if text is not None and min(numbers, default=0) < 1:
        raise UsageError(f"--keep-at {text}: no numbers of updates", "Give them as 100,200.")
    return numbers


def chosen_dtype(asked: str, device: str) -> str:
    """The type that `auto` stands for on a device, or the one that was asked for."""
    if asked != "auto":
        return asked
    import torch

    from prunecli.modules.fitting import multiplies_natively

    on_gpu = device != "cpu" and torch.cuda.is_available()
    return "bfloat16" if on_gpu and multiplies_natively(torch.bfloat16, torch.device("cuda")) else "float32"
