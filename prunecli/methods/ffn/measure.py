"""Measure: text and a model in, how active its hidden units are out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prunecli.errors import UsageError
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText, pair_name

if TYPE_CHECKING:
    import numpy as np

    from prunecli.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class ActivationOptions:
    """How activations are measured.

    Attributes:
        batch_tokens: padded tokens in a batch.
        device: as in `load_model`.
    """

    batch_tokens: int = 4096
    device: str = "auto"


def activation_text(checkpoint: Checkpoint, choice: TextChoice, say: Say = unsaid) -> Dataset:
    """Parallel text for a model with an encoder and a decoder, plain text for others.

    Raises:
        UsageError: text of the other kind, or none.
        DataError: text that cannot be used.
    """
    if len(checkpoint.require_architecture().stacks) > 1:
        if choice.files:
            raise UsageError("--text goes with models that have one side.", "Give parallel text: --data DIR.")
        return choice.read("translation", say)
    other = next((name for name, given in choice.given.items() if given and name != "--text"), None)
    if other is not None:
        raise UsageError(f"{other} goes with models that translate.", "Give --text FILE, one text a line.")
    if not choice.files:
        raise UsageError("--keep-units activations needs text.", "Give --text FILE, one text a line.")
    return choice.read("lm")


def describe(data: Dataset, choice: TextChoice) -> dict[str, Any]:
    """What a history says of the text."""
    if isinstance(data.text, ParallelText):
        names = [pair_name(*pair) for pair in data.pairs]
        return {"split": choice.split or "val", "pairs": names, "sentences": len(data.text)}
    return {"files": [path.name for path in data.text.files], "sha256": data.text.sha256}


def measure_activations(
    checkpoint: Checkpoint,
    data: Dataset,
    options: ActivationOptions,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Mapping[str, np.ndarray]:
    """Mean |activation| of each hidden unit, see `unit_activations`; runs the model.

    Raises:
        PruneError: a model or text that cannot be used.
    """
    from prunecli.evaluation.options import labels_for
    from prunecli.methods.ffn.activations import unit_activations
    from prunecli.modules.loading import choose_device, load_model
    from prunecli.modules.precision import fitting_dtype
    from prunecli.running.encoding import text_examples, translation_examples
    from prunecli.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.path)
    device = choose_device(options.device)
    dtype = fitting_dtype(dict.fromkeys(labels_for([checkpoint.path]), checkpoint), device, say=say)
    model = load_model(checkpoint.path, device=device, dtype=dtype)
    text, size = data.text, options.batch_tokens
    if isinstance(text, ParallelText):
        pairs = data.pairs
        batches = [
            b for pair in pairs for b in translation_examples(tokenizer, model, text, [pair]).batches(size)
        ]
    else:
        batches = text_examples(tokenizer, model, text.texts).batches(size)
    return unit_activations(model, checkpoint.layout.ffns, batches, progress)
