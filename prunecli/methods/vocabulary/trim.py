"""From a checkpoint and text to everything that the trimmed one holds; nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prunecli.errors import CheckpointError
from prunecli.methods.vocabulary.decide import Decision, Options, decide
from prunecli.methods.vocabulary.files import holds_vocabulary, tokenizer_files
from prunecli.methods.vocabulary.ids import Renumbering, named_ids, renumbered, with_defaults
from prunecli.methods.vocabulary.measure import Text, count_tokens
from prunecli.methods.vocabulary.rewrite import resized, rewrite, vocabulary_axes, vocabulary_size
from prunecli.methods.vocabulary.verify import Check, check_same, load_trimmed, models_that_differ
from prunecli.methods.vocabulary.vocabulary import read_vocabulary
from prunecli.progress import Progress, silent
from prunecli.tensors.stream import Output
from prunecli.text.tokens import load_tokenizer

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Trim:
    """A decision made concrete.

    Attributes:
        decision: which tokens stay.
        outputs: every tensor.
        files: side files that differ, by name; None: it has to be left out, as it would be wrong.
        check: how the text falls into tokens before and after.
        embedding_parameters: elements of the tensors with an axis of tokens, before and after.
        embedding_bytes: theirs.
    """

    decision: Decision
    outputs: tuple[Output, ...]
    files: Mapping[str, bytes | None]
    check: Check
    embedding_parameters: tuple[int, int]
    embedding_bytes: tuple[int, int]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the files that are not carried along."""
        return tuple(name for name, data in self.files.items() if data is None)


def trim(checkpoint: Checkpoint, text: Text, options: Options, progress: Progress = silent) -> Trim:
    """Count, decide, rewrite, and compare the tokenizers.

    Raises:
        UnsupportedModelError: the family, or the kind of tokenizer, is not known.
        CheckpointError: damaged files, or a trimmed tokenizer that cuts the text otherwise.
        DataError, UsageError: options that the tokenizer cannot meet.
    """
    axes, where = vocabulary_axes(checkpoint), str(checkpoint.path)
    carried = checkpoint.side_files.carried
    side = {path.name: path.read_bytes() for path in carried if path.parent == checkpoint.path}
    if not holds_vocabulary(side):
        raise CheckpointError(
            f"{where}: holds no tokenizer whose vocabulary could be trimmed",
            "Copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, …) into it.",
        )
    tokenizer = load_tokenizer(checkpoint.path)
    vocabulary = read_vocabulary(tokenizer, where)
    documents = with_defaults(checkpoint.config, default_ids(checkpoint)), _generation(side)
    needed = [number for document in documents for number in named_ids(document)]
    counts = count_tokens(tokenizer, text, progress)
    decision = decide(checkpoint, vocabulary, text, counts, options, needed)
    change = decision.renumbering
    files = _files(side, documents[1], change, text, is_fast=bool(getattr(tokenizer, "is_fast", False)))
    trimmed = {name: data for name, data in {**side, **files}.items() if data is not None}
    new = load_trimmed(trimmed, trimmed_config(checkpoint, checkpoint.config, decision), where)
    check = check_same((tokenizer, new), change.new_ids, text, where, progress)
    outputs = rewrite(checkpoint, decision.kept, options.dtype)
    parameters, nbytes = (_amounts(checkpoint, outputs, axes, what) for what in ("numel", "nbytes"))
    return Trim(decision, outputs, files, check, parameters, nbytes)


def _files(
    side: Mapping[str, bytes],
    generation: Mapping[str, Any],
    change: Renumbering,
    text: Text,
    *,
    is_fast: bool,
) -> dict[str, bytes | None]:
    """The side files that differ. Of a fast tokenizer nothing reads the SentencePiece model: it is compared here."""
    files = tokenizer_files(side, change)
    patched = renumbered(generation, change)
    if patched != generation:
        files[GENERATION] = (json.dumps(patched, indent=2, ensure_ascii=False) + "\n").encode()
    return files | dict.fromkeys(models_that_differ(side, files, text) if is_fast else ())


def trimmed_config(checkpoint: Checkpoint, config: Mapping[str, Any], decision: Decision) -> dict[str, Any]:
    """A config.json of the checkpoint with the new size and ids; ids that it leaves to its class are written out."""
    full = with_defaults(config, default_ids(checkpoint))
    patched = renumbered(full, decision.renumbering)
    changed = {key: value for key, value in patched.items() if key in config or value != full[key]}
    return resized(checkpoint, changed, len(decision.kept))


def default_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ids that transformers takes where config.json names none (`eos_token_id`: 50256 of GPT-2)."""
    from transformers import AutoConfig

    made = AutoConfig.for_model(checkpoint.require_architecture().model_type)
    size = vocabulary_size(checkpoint)
    return {
        key: value
        for key, value in made.to_dict().items()
        if key.endswith("_token_id") and type(value) is int and 0 <= value < size
    }


def _generation(side: Mapping[str, bytes]) -> dict[str, Any]:
    if GENERATION not in side:
        return {}
    try:
        value = json.loads(side[GENERATION])
    except ValueError as error:
        raise CheckpointError(f"{GENERATION}: not JSON ({error})", "Copy the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{GENERATION}: holds no JSON object", "Copy the file again.")
    return value


def _amounts(
    checkpoint: Checkpoint, outputs: tuple[Output, ...], axes: Mapping[str, int], what: str
) -> tuple[int, int]:
    before = sum(getattr(checkpoint.tensors[name], what) for name in axes)
    return before, sum(getattr(output.info, what) for output in outputs if output.name in axes)
