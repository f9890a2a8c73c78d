"""Options of the commands that measure experts and heads: `collect-gates` and `score-heads`."""

from pathlib import Path
from typing import Literal

from prunecli.errors import UsageError
from prunecli.evaluation.on_text import DecodingOptions, RunOptions
from prunecli.methods.options import EffectMetric
from prunecli.options import (
    COMPUTE_DTYPE,
    ComputeDtype,
    Options,
    advanced_option,
    compute_option,
    hidden_option,
    option,
    selection_option,
    text_option,
)


class CollectOptions(Options):
    """Options of `collect-gates`.

    Attributes:
        context: tokens of a window (language models). If None, see `window_length`.
    """

    mode: Literal["forced", "beam"] = selection_option(
        "forced: run on the reference, fast; beam: search.",
        "forced",
    )
    beam: int = selection_option("Beams per sentence with --mode beam.", 4, ge=2, needs="mode=beam")
    batch_tokens: int = 4096
    context: int | None = None
    max_tokens: int | None = text_option("Read only the first N tokens of each --text name.", ge=1)
    mean_outputs: bool = advanced_option(
        "Language models: also write OUTPUT.outputs.safetensors, for prune-experts --constant-experts.",
        False,
    )


class ScoreOptions(RunOptions):
    """Options of `score-heads`."""

    metric: Literal["gradient", "ablation", "all-but-one"] = option(
        "gradient: one forward and backward pass; ablation: the score without each head; all-but-one: with each head "
        "alone in its layer.",
        "gradient",
    )
    measure: EffectMetric | None = selection_option(
        "Score of ablation and all-but-one. Default: chrf++, accuracy, cosine or loss, by task; loss is fast.",
        needs="metric=ablation metric=all-but-one",
    )
    per: Literal["example", "token"] | None = hidden_option(
        "For gradient: take the absolute value of the sum over the tokens of an example (eq. 2 of the paper), or of "
        "each token (the authors' code). Default: example.",
        flag="--importance",
        needs="metric=gradient",
    )
    beam: int = compute_option("Beams per sentence for chrf++ and bleu.", 4, ge=1)
    select_data: Path | None = hidden_option(
        "all-but-one: choose the best heads on this text (a directory as --data, or a file as --text or --labelled) "
        "and report them on the other.",
        role="text",
        needs="metric=all-but-one",
    )
    select_split: str | None = hidden_option(
        "all-but-one: choose the best heads on this split.",
        needs="metric=all-but-one",
    )
    samples: int = hidden_option(
        "Resamples of the significance test of chrf++ and bleu.",
        1000,
        flag="--bootstrap",
        ge=1,
    )
    seed: int = hidden_option("Seed of the resamples.", 12345, ge=1)
    dtype: ComputeDtype = COMPUTE_DTYPE

    def check_options(self) -> None:
        """Refuse options that the metric does not use.

        Raises:
            UsageError: one is given.
        """
        is_gradient = self.metric == "gradient"
        if is_gradient and self.dtype == "float16":
            raise UsageError(
                "`dtype=float16`: small gradients vanish in it",
                "Choose bfloat16 or float32 for `metric=gradient`.",
            )
        if not is_gradient and self.memory is not None:
            raise UsageError(
                f"`memory` goes with `metric=gradient`: {self.metric} runs parts of the model again and again",
                "Leave out `memory` on a machine that holds the model, or choose `metric=gradient`.",
            )

    @property
    def decoding(self) -> DecodingOptions:
        """Options of the beam search."""
        return DecodingOptions(self.beam, self.batch_tokens)
