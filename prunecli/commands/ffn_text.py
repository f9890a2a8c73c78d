"""The text that `share-ffn` measures activations on, and the measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from prunecli.model.checkpoint import Checkpoint
    from prunecli.progress import Progress
    from prunecli.text.parallel import ParallelText
    from prunecli.text.plain import PlainText


@dataclass(frozen=True)
class TextOptions:
    """The options that name text, and how it is run."""

    data: Path | None = None
    split: str = "val"
    langs: str | None = None
    pairs: str | None = None
    text: tuple[Path, ...] = ()
    max_sentences: int | None = None
    batch_tokens: int = 4096
    device: str = "auto"

    @property
    def given(self) -> str | None:
        """The first option that names text."""
        named = {
            "--data": self.data,
            "--langs": self.langs,
            "--pairs": self.pairs,
            "--text": self.text or None,
        }
        return next((name for name, value in named.items() if value is not None), None)


@dataclass(frozen=True)
class Material:
    """Text, the directions of translation, and what the history says of them."""

    text: ParallelText | PlainText
    pairs: tuple[tuple[str, str], ...]
    described: Mapping[str, Any]


def read_material(checkpoint: Checkpoint, options: TextOptions) -> Material:
    """Parallel text for a model with an encoder and a decoder, plain text for others.

    Raises:
        UsageError: text of the other kind, or none.
        DataError: text that cannot be used.
    """
    if len(checkpoint.require_architecture().stacks) > 1:
        from prunecli.commands.found import chosen_text
        from prunecli.text.parallel import pair_name

        if options.text:
            raise UsageError("--text goes with models that have one side.", "Give parallel text: --data DIR.")
        parallel, pairs = chosen_text(options.data, options.split, None, None, options.pairs, options.langs)
        parallel = parallel.first(options.max_sentences)
        names = [pair_name(*pair) for pair in pairs]
        return Material(parallel, pairs, {"split": options.split, "pairs": names, "sentences": len(parallel)})
    from prunecli.text.plain import read_plain

    if options.given not in (None, "--text"):
        raise UsageError(
            f"{options.given} goes with models that translate.", "Give --text FILE, one text a line."
        )
    if not options.text:
        raise UsageError("--keep-units activations needs text.", "Give --text FILE, one text a line.")
    plain = read_plain(options.text).first(options.max_sentences)
    return Material(plain, (), {"files": [path.name for path in plain.files], "sha256": plain.sha256})


def measure(
    checkpoint: Checkpoint, material: Material, options: TextOptions, progress: Progress
) -> Mapping[str, np.ndarray]:
    """Mean |activation| of each hidden unit; runs the model.

    Raises:
        PruneError: a model or text that cannot be used.
    """
    from prunecli.evaluation.evaluate import labels_for
    from prunecli.evaluation.objective import translation_batches
    from prunecli.methods.ffn.activations import plain_batches, unit_activations
    from prunecli.modules.fitting import fitting_dtype
    from prunecli.modules.loading import choose_device, load_model
    from prunecli.text.plain import PlainText
    from prunecli.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.path)
    device = choose_device(options.device)
    labels = labels_for([checkpoint.path])
    dtype = fitting_dtype(dict.fromkeys(labels, checkpoint), device, say=console.note)
    model = load_model(checkpoint.path, device=device, dtype=dtype)
    text, size = material.text, options.batch_tokens
    if isinstance(text, PlainText):
        batches = plain_batches(tokenizer, model, text.texts, size)
    else:
        batches = [
            batch
            for pair in material.pairs
            for batch in translation_batches(tokenizer, model, text, pair, size)
        ]
    return unit_activations(model, checkpoint.layout.ffns, batches, progress)
