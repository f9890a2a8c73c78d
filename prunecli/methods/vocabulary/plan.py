"""Choose the tokens to keep from text, and make their tokenizer. Nothing is written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from prunecli.errors import CheckpointError, DataError
from prunecli.methods.options import VocabularyOptions
from prunecli.methods.vocabulary.measure import Text, check_same, count_tokens, differs, load_trimmed
from prunecli.methods.vocabulary.renumber import (
    SENTENCEPIECE,
    VOCABULARIES,
    Renumbering,
    named_ids,
    renumbered,
    tokenizer_files,
)
from prunecli.methods.vocabulary.tokenizer import Vocabulary, is_fast, read_vocabulary
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.find_axes import axes_of, vocabulary_size
from prunecli.progress import Progress, silent
from prunecli.selection.selection import Selection, selection_of
from prunecli.tensors.json_files import GENERATION, read_object
from prunecli.text.choice import Lines
from prunecli.text.tokens import load_tokenizer

IN_TEXT = "in the text"
"""Why a token stays: often enough."""


def plan_vocabulary(
    checkpoint: Checkpoint,
    lines: Lines,
    options: VocabularyOptions,
    progress: Progress = silent,
) -> Selection:
    """Count tokens, choose those to keep, make the smaller tokenizer, and compare both tokenizers.

    `details` of the selection: `parts`, why -> number of tokens that stay for it, each counted once, under the first
    reason; `text`, what tokens were counted in, and the share of its tokens that stay; `compared`, how the text falls
    into tokens before and after, see `check_same`.

    Args:
        checkpoint: the source; its weights are not read.
        lines: the text whose tokens stay, and that both tokenizers are compared on.
        options: see there.

    Raises:
        UnsupportedModelError: the family, or the kind of tokenizer, is not known.
        CheckpointError: damaged files, or a trimmed tokenizer that cuts the text otherwise.
        DataError, UsageError: options that the tokenizer cannot meet.
    """
    # A model that cannot be trimmed is refused before anything is counted.
    (axis,) = axes_of(checkpoint, "token")
    where = str(checkpoint.path)
    carried = checkpoint.side_files.carried
    side = {path.name: path.read_bytes() for path in carried if path.parent == checkpoint.path}
    # Without a vocabulary, transformers makes up a tokenizer of nothing.
    if not any(name in VOCABULARIES or name.endswith(SENTENCEPIECE) for name in side):
        raise CheckpointError(
            f"{where}: holds no tokenizer whose vocabulary could be trimmed",
            "Copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, …) into it.",
        )
    tokenizer = load_tokenizer(checkpoint.path)
    text = Text.of(lines, tokenizer)
    vocabulary = read_vocabulary(tokenizer, where)
    config = {**default_ids(checkpoint), **checkpoint.config}
    generation = read_object(checkpoint.path / GENERATION) if GENERATION in side else {}
    counts, template = count_tokens(tokenizer, text, progress)
    needed = [*named_ids(config), *named_ids(generation)]
    plan = select_tokens(checkpoint, vocabulary, lines, counts, options, needed, template)
    change = Renumbering.of(plan.kept["tokens"], vocabulary.ids, len(axis.ids))
    files = tokenizer_files(side, change)
    if is_fast(tokenizer):  # nothing reads the SentencePiece models beside it: they are compared here
        for name, data in files.items():
            if name.endswith(SENTENCEPIECE) and data is not None and differs(side[name], data, text.all):
                files[name] = None
    trimmed = {name: data for name, data in {**side, **files}.items() if data is not None}
    settings = {key: value for key, value in renumbered(config, change).items() if value != config[key]}
    sizes = dict.fromkeys(axis.keys, len(change.new_ids))
    new = load_trimmed(trimmed, {**checkpoint.config, **settings, **sizes}, where)
    compared = check_same((tokenizer, new), change.new_ids, text.all, where, progress)
    return replace(plan, settings=settings, files=files, details={**plan.details, "compared": compared})


def default_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the token ids that transformers assumes if config.json has none (GPT-2: `eos_token_id` 50256)."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(checkpoint.require_architecture().model_type)
    size = vocabulary_size(checkpoint)
    return {
        key: value
        for key, value in defaults.to_dict().items()
        if key.endswith(("_token_id", "_token_index")) and type(value) is int and 0 <= value < size
    }


def select_tokens(
    checkpoint: Checkpoint,
    vocabulary: Vocabulary,
    lines: Lines,
    counts: Mapping[str, int],
    options: VocabularyOptions,
    needed_ids: Iterable[int] = (),
    template: Set[str] = frozenset(),
) -> Selection:
    """Choose the tokens to keep; their tokenizer is not made yet.

    Args:
        checkpoint: the source.
        vocabulary: vocabulary of the tokenizer.
        lines: the text, for the history.
        counts: number of occurrences of each token in the text.
        options: the options of the command.
        needed_ids: ids that its configs name.
        template: tokens that the chat template writes.

    Raises:
        DataError: a token of `keep` that the tokenizer lacks.
        CheckpointError: the tokenizer has tokens that the embeddings lack.
    """
    size = vocabulary_size(checkpoint)
    labels = {number: token for token, number in vocabulary.ids.items()}
    last = max(labels, default=0)
    if last >= size:
        raise CheckpointError(
            f"{checkpoint.path}: its tokenizer gives {labels[last]!r} the id {last}, its embeddings have {size} rows",
            "Resize the embeddings to the tokenizer first.",
        )
    for token in options.keep:
        if token not in vocabulary.ids:
            raise DataError(
                f"`keep`: the tokenizer has no token {token!r}",
                "Write tokens as the tokenizer does, its mark of a space included: ▁house, Ġhouse.",
            )
    needed = {number for number in needed_ids if 0 <= number < size}
    seen = {token for token, count in counts.items() if count >= options.min_count}
    wanted = {
        "special and added": vocabulary.special | {labels[number] for number in needed & labels.keys()},
        "chat template": template,
        IN_TEXT: seen,
        "asked for": set(options.keep),
        "characters and bytes": vocabulary.always,
        "on the way to them": vocabulary.closure({*seen, *template, *options.keep}),
    }
    ids: dict[str, set[int]] = {}
    for name, tokens in wanted.items():
        own = {vocabulary.ids[token] for token in tokens & vocabulary.ids.keys()}
        ids[name] = own.difference(*ids.values())
    # Configs may name rows beyond the tokenizer's.
    rows = needed - labels.keys()
    ids["up to a multiple"] = _filling(set().union(rows, *ids.values()), vocabulary, options.multiple_of)
    ids["no token"] = rows
    kept = tuple(sorted(set().union(*ids.values())))
    parts = {name: len(part) for name, part in ids.items() if part}
    digest = "".join(f"{count} {line}\n" for line, count in Counter(lines.texts).items())
    sha256 = hashlib.sha256(digest.encode()).hexdigest()
    files = () if lines.plain is None else tuple(path.name for path in lines.plain.files)
    arguments = {
        "split": list(lines.splits),
        "langs": list(lines.languages),
        "text": list(files),
        "min_count": options.min_count,
        **options.recorded(),
    }
    note = {
        "before": size,
        "after": len(kept),
        "parts": parts,
        "sentences": len(lines.texts),
        "text_sha256": sha256,
    }
    running = np.array([counts.get(labels.get(number, ""), 0) for number in range(size)])
    share = float(running[[*kept]].sum() / running.sum()) if running.any() else 1.0
    reasons = tuple(name for name in ids if name != IN_TEXT)
    reason = np.zeros(size, np.uint8)
    for place, name in enumerate(reasons, 1):
        reason[list(ids[name])] = place
    texts = tuple(labels.get(number, "") for number in range(size))
    ranked = Ranked.of(
        ("tokens", "", None), range(size), kept, running, reasons=reasons, reason=reason, labels=texts
    )
    often = "" if options.min_count == 1 else f" {options.min_count} times or more"
    decision = Decision(
        "token",
        (ranked,),
        "count",
        f"those stay that occur{often}, and what is needed",
        bound=options.min_count,
        origin=Origin(
            texts=(*lines.languages, *files),
            split=" and ".join(lines.splits) or None,
            sentences=len(lines.texts),
            tokens=sum(counts.values()),
            sha256=sha256,
        ),
    )
    details = {"parts": parts, "text": {"sentences": len(lines.texts), "sha256": sha256, "share_kept": share}}
    return selection_of(
        "trim-vocabulary",
        checkpoint,
        axes_of(checkpoint, "token"),
        decision,
        arguments,
        dtype=options.dtype,
        notes={"vocabulary": note},
        details=details,
    )


def _filling(kept: set[int], vocabulary: Vocabulary, multiple: int) -> set[int]:
    """Return further tokens to keep, the lowest ids first, that fill `kept` up to a multiple."""
    filled = {*kept}
    for token, number in sorted(vocabulary.ids.items(), key=itemgetter(1)):
        room = -len(filled) % multiple
        if room and number not in filled:
            needed = vocabulary.closure([token]) & vocabulary.ids.keys()
            added = {vocabulary.ids[part] for part in needed} - filled
            filled |= added if len(added) <= room else set()
    return filled - kept
