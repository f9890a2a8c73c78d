"""From a checkpoint, text and options to a plan: which tokens stay, and their tokenizer. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prunecli.errors import CheckpointError
from prunecli.methods.vocabulary.files import holds_vocabulary, tokenizer_files
from prunecli.methods.vocabulary.ids import Renumbering, named_ids, renumbered, with_defaults
from prunecli.methods.vocabulary.measure import Text, count_tokens
from prunecli.methods.vocabulary.rewrite import default_ids, trimmed_config, vocabulary_axes
from prunecli.methods.vocabulary.select import TokenChoice, VocabularyOptions, select_tokens
from prunecli.methods.vocabulary.verify import Check, check_same, load_trimmed, models_that_differ
from prunecli.methods.vocabulary.vocabulary import read_vocabulary
from prunecli.progress import Progress, silent
from prunecli.tensors.json_files import parsed
from prunecli.text.choice import Lines
from prunecli.text.tokens import load_tokenizer

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class VocabularyPlan:
    """Which tokens stay, and the tokenizer without the others.

    Attributes:
        tokens: which tokens stay, and why.
        text: what they were counted in.
        files: side files that differ, by name; None: it has to be left out, as it would be wrong.
        check: how the text falls into tokens before and after.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …); None: as stored.
    """

    tokens: TokenChoice
    text: Text
    files: Mapping[str, bytes | None]
    check: Check
    dtype: str | None = None

    @property
    def step(self) -> Mapping[str, object]:
        """The entry for `Structure.history`."""
        return self.tokens.step


def plan_vocabulary(
    checkpoint: Checkpoint,
    lines: Lines,
    options: VocabularyOptions,
    progress: Progress = silent,
) -> VocabularyPlan:
    """Count, choose, make the smaller tokenizer, and compare both.

    Args:
        checkpoint: the source; its weights are not read.
        lines: the text whose tokens stay, and that both tokenizers are compared on.
        options: see there.

    Raises:
        UnsupportedModelError: the family, or the kind of tokenizer, is not known.
        CheckpointError: damaged files, or a trimmed tokenizer that cuts the text otherwise.
        DataError, UsageError: options that the tokenizer cannot meet.
    """
    vocabulary_axes(checkpoint)  # which refuses a model that cannot be trimmed before anything is counted
    where = str(checkpoint.path)
    carried = checkpoint.side_files.carried
    side = {path.name: path.read_bytes() for path in carried if path.parent == checkpoint.path}
    if not holds_vocabulary(side):
        raise CheckpointError(
            f"{where}: holds no tokenizer whose vocabulary could be trimmed",
            "Copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, …) into it.",
        )
    tokenizer = load_tokenizer(checkpoint.path)
    text = Text.of(lines, tokenizer)
    vocabulary = read_vocabulary(tokenizer, where)
    documents = with_defaults(checkpoint.config, default_ids(checkpoint)), _generation(side)
    needed = [number for document in documents for number in named_ids(document)]
    counts = count_tokens(tokenizer, text, progress)
    tokens = select_tokens(checkpoint, vocabulary, text, counts, options, needed)
    change = tokens.renumbering
    files = _files(side, documents[1], change, text, is_fast=bool(getattr(tokenizer, "is_fast", False)))
    trimmed = {name: data for name, data in {**side, **files}.items() if data is not None}
    new = load_trimmed(trimmed, trimmed_config(checkpoint, checkpoint.config, tokens), where)
    check = check_same((tokenizer, new), change.new_ids, text, where, progress)
    return VocabularyPlan(tokens, text, files, check, options.dtype)


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
    return files | dict.fromkeys(models_that_differ(side, files, text.all) if is_fast else ())


def _generation(side: Mapping[str, bytes]) -> dict[str, Any]:
    if GENERATION not in side:
        return {}
    try:
        value = parsed(side[GENERATION])
    except ValueError as error:
        raise CheckpointError(f"{GENERATION}: not JSON ({error})", "Copy the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{GENERATION}: holds no JSON object", "Copy the file again.")
    return value
