"""Text and batches for methods that run a model over text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.errors import UsageError
from prunecli.options import Options, Size, compute_option
from prunecli.progress import Say, unsaid
from prunecli.text.choice import Dataset, TaskName, TextChoice, described, task_of
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import PlainText

if TYPE_CHECKING:
    import torch

    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.cost import Load
    from prunecli.modules.pooling import Pooling
    from prunecli.running.examples import Batch
    from prunecli.running.layerwise.runner import Runner


DEVICE = compute_option(
    "auto (a GPU, or all if one is too small), cpu, cuda, cuda:1, …", "auto", metavar="NAME", recorded=False
)
"""Field `device` of commands that run models."""


class BatchOptions(Options):
    """Size of the batches, and where they run."""

    batch_tokens: int = compute_option(
        "Padded tokens in a batch; fewer take less memory.", 4096, recorded=False, ge=1
    )
    device: str = DEVICE


class RunOptions(BatchOptions):
    """How a model runs on text."""

    memory: Size | None = compute_option("Run layer by layer within this memory (8GiB).", metavar="SIZE")
    spill_directory: Path | None = compute_option(
        "With --memory: directory for hidden states that do not fit. Default: that of temporary files.",
        flag="--spill-dir",
        metavar="DIR",
        hidden=True,
        needs="memory",
    )


USUAL_LENGTH = 64
"""Assumed tokens of a sentence, to estimate the memory of a search before its text is known."""


@dataclass(frozen=True)
class DecodingOptions:
    """Options of beam search.

    Attributes:
        beam: hypotheses kept per sentence; 1 is greedy search.
        batch_tokens: padded source tokens in a batch (the beams come on top).
        max_new_tokens: longest output, or None for `length_limit`.
    """

    beam: int = 4
    batch_tokens: int = 2048
    max_new_tokens: int | None = None

    @property
    def load(self) -> Load:
        """The load of one batch: sentences and outputs of the usual length."""
        from prunecli.model.cost import Load  # imports numpy

        return Load(max(1, self.batch_tokens // USUAL_LENGTH), self.beam, USUAL_LENGTH)


def measured_text(
    checkpoint: Checkpoint,
    choice: TextChoice,
    what: str,
    say: Say = unsaid,
    *,
    task: TaskName | None = None,
    without: str | None = None,
) -> Dataset:
    """Parallel text for a model with an encoder and a decoder, plain text for others (see `TextChoice.whole_files`).

    Args:
        what: the option that asks for it, for messages.
        task: that plain text is for. If None, `lm` for causal language models, `mlm` for all others.
        without: an option that needs no text, for messages.

    Raises:
        UsageError: text of the other kind, or none.
        DataError: text that cannot be used.
    """
    other_way = "" if without is None else f" Or choose without text: {without}."
    if len(checkpoint.require_architecture().stacks) > 1:
        if not (choice.given or choice.demo):
            raise UsageError(f"{what} needs text.", f"Give parallel text: `data=DIR`.{other_way}")
        why = "goes with models that have one stack."
        choice.refuse(("files", "context"), why, "Give parallel text: `data=DIR`.")
        return choice.read("translation", say)
    others = {*choice.given} - {"files", "whole_files", "context"}
    choice.refuse(sorted(others), "goes with models that translate.", "Give `files=FILE`.")
    if not choice.files:
        raise UsageError(f"{what} needs text.", f"Give `files=FILE`.{other_way}")
    return choice.read(task or ("lm" if task_of(checkpoint) == "lm" else "mlm"), say)


def describe(data: Dataset, choice: TextChoice) -> dict[str, Any]:
    """The fields of a history that describe the text."""
    if isinstance(data.text, ParallelText):
        names = [pair_name(*pair) for pair in data.pairs]
        return {"split": choice.split or "val", "pairs": names, "sentences": len(data.text)}
    return described(data.text)


def text_fields(data: Dataset, choice: TextChoice) -> dict[str, Any]:
    """The fields of `Scores` that describe the text."""
    return {
        "task": data.task,
        "texts": [*choice.texts],
        "split": choice.split_read,
        "whole_files": data.text.whole_files if isinstance(data.text, PlainText) else None,
    }


def runner_of(
    checkpoint: Checkpoint,
    options: RunOptions,
    say: Say = unsaid,
    *,
    dtype: str = "auto",
    load: Load | None = None,
    gradients: bool = False,
    by_layer: str = "",
) -> tuple[Runner, torch.dtype]:
    """The model, ready to run forwards, with `gradients` also back, and the type that it computes in.

    Args:
        dtype, load, by_layer: as `asked`, `load` and `by_layer` of `fitting_dtype`.

    Raises:
        PruneError: a model that cannot be used, or that does not fit.
    """
    from prunecli.evaluation.options import labels_for
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import fitting_dtype
    from prunecli.running.layerwise.runner import make_runner

    devices, memory = choose_devices(options.device), options.memory
    named = dict.fromkeys(labels_for([checkpoint.path]), checkpoint)
    kind = fitting_dtype(
        named, devices, dtype, load=load, gradients=gradients, memory=memory, by_layer=by_layer, say=say
    )
    place = options.spill_directory
    return make_runner(checkpoint, devices, kind, memory, place, load=load), kind


def runner_and_batches(
    checkpoint: Checkpoint,
    data: Dataset,
    options: RunOptions,
    say: Say = unsaid,
    *,
    predicting: bool = False,
    pooling: Pooling | None = None,
    whole: bool,
) -> tuple[Runner, list[Batch]]:
    """The model, ready to run, and the text in batches of like lengths.

    Args:
        predicting: whether the labels are what the model predicts: the tokens of references, the next token, or in a
            masked language model the hidden ones (drawn with seed 0); else the tokens themselves.
        pooling: of an embedding model, which says how plain texts are cut; every one is kept.
        whole: whether more is measured than what single layers are given.

    Raises:
        UsageError: it is, and the model is run layer by layer.
        PruneError: a model or text that cannot be used.
    """
    from prunecli.running.batches import task_batches
    from prunecli.running.encoding import text_examples
    from prunecli.text.tokens import load_tokenizer

    if whole and options.memory is not None:
        raise UsageError(
            "`memory`: this metric needs a model that is held whole.",
            "Leave it out, choose another metric, or use prunecli shrink.",
        )
    tokenizer, text = load_tokenizer(checkpoint.path), data.text
    runner, _ = runner_of(checkpoint, options, say)
    if predicting or pooling is not None or not isinstance(text, PlainText):
        return runner, task_batches(tokenizer, runner.model, data, options.batch_tokens, pooling)
    examples = text_examples(tokenizer, runner.model, text.texts, data.context, whole=data.task == "lm")
    return runner, examples.batches(options.batch_tokens)
