"""Choose the tokens to keep from text, and make their tokenizer. Nothing is written."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, groupby, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prunecli.errors import CheckpointError, DataError, UnsupportedModelError, located
from prunecli.methods.options import VocabularyOptions
from prunecli.methods.vocabulary.tokenizer import (
    Renumbering,
    Vocabulary,
    is_fast,
    named_ids,
    read_vocabulary,
    renumbered,
    token_ids,
    tokenizer_files,
)
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.model.find_axes import axes_of, vocabulary_size
from prunecli.modules.pooling import model_settings, modules_of
from prunecli.private import switch_language_side
from prunecli.progress import Progress, silent
from prunecli.selection.cut import Selection, selection_of
from prunecli.tensors.json_files import GENERATION, lenient, parsed, read_object
from prunecli.tensors.side_files import folders_of
from prunecli.text.choice import Lines
from prunecli.text.files import lines_sha256
from prunecli.text.tokens import load_tokenizer, tokenized

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
    with located(checkpoint.path):
        # A model that cannot be trimmed is refused before anything is counted.
        (axis,) = axes_of(checkpoint, "token")
        home, modules = lenient(modules_of)(checkpoint.path) or (checkpoint.path, ())
        if any("WordWeights" in str(module["type"]) for module in modules):
            raise UnsupportedModelError(
                "WordWeights of modules.json has a weight for each token, by the old ids",
                "Remove the module, or train it anew for the result.",
            )
        configs = [f"{folder}/config.json" for folder in folders_of(checkpoint.path)]
        names = {path.relative_to(checkpoint.path).as_posix(): path for path in checkpoint.side_files.carried}
        side = {name: path.read_bytes() for name, path in names.items() if "/" not in name or name in configs}
        tokenizer = load_tokenizer(checkpoint.path)
        processor = lenient(lambda: str(parsed(side["chat_template.json"])["chat_template"]))
        tokenizer.chat_template = tokenizer.chat_template or processor()
        text = Text.of(lines, tokenizer, prompts_of(home, checkpoint.config) or ())
        vocabulary = read_vocabulary(tokenizer)
        config = {**default_ids(checkpoint), **checkpoint.config}
        generation = read_object(checkpoint.path / GENERATION) if GENERATION in side else {}
        counts, template = count_tokens(tokenizer, text, progress)
        needed = named_ids(config, side).union(ids_before_positions(checkpoint))
        first = generation.get("no_timestamps_token_id")
        if isinstance(first, int):  # Whisper counts timestamps from it on
            needed.update(range(first, axis.count))
        plan = select_tokens(checkpoint, vocabulary, lines, counts, options, needed, template)
        new_ids = {old: new for new, old in enumerate(plan.kept["tokens"])}
        change = Renumbering(new_ids, vocabulary.ids, axis.count)
        files = tokenizer_files(side, change, beside=is_fast(tokenizer))
        trimmed = {
            name: data for name, data in {**side, **files}.items() if data is not None and "/" not in name
        }
        settings = {key: value for key, value in renumbered(config, change).items() if value != config[key]}
        new = load_trimmed(trimmed, checkpoint.config)
        compared = check_same((tokenizer, new), change.new_ids, text.all, progress)
        return replace(plan, settings=settings, files=files, details={**plan.details, "compared": compared})


def ids_before_positions(checkpoint: Checkpoint) -> range:
    """The ids up to the padding token's, from which some classes count the positions of a text (RoBERTa, M2M-100)."""
    modules = checkpoint.probed.whole.model.named_modules()
    paddings = (getattr(module, "padding_idx", None) for name, module in modules if "position" in name)
    return range(1 + max(filter(None, paddings), default=-1))


@lenient  # a damaged file has no prompts
def prompts_of(home: Path, config: Mapping[str, Any]) -> list[str]:
    """The texts that are put before others: prompts of sentence-transformers, prefixes of T5's tasks."""
    stated = lenient(model_settings)(home) or {}
    tasks = config.get("task_specific_params") or {}
    texts = (*stated.get("prompts", {}).values(), *(task.get("prefix") for task in tasks.values()))
    return [text for text in texts if text and isinstance(text, str)]


def default_ids(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the token ids that transformers assumes if config.json has none (GPT-2: `eos_token_id` 50256)."""
    from transformers import AutoConfig

    defaults = AutoConfig.for_model(checkpoint.require_architecture().model_type).to_dict()
    return {key: value for key, value in defaults.items() if key.endswith(("_token_id", "_token_index"))}


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
    why: dict[int, str] = {}
    for name, tokens in wanted.items():
        for token in tokens & vocabulary.ids.keys():
            why.setdefault(vocabulary.ids[token], name)
    rows = needed - labels.keys()  # configs may name rows beyond the tokenizer's
    filling = _filling({*rows, *why}, vocabulary, options.multiple_of)
    why |= dict.fromkeys(filling, "up to a multiple") | dict.fromkeys(rows, "no token")
    kept, parts = tuple(sorted(why)), dict(Counter(why.values()))
    sha256 = lines_sha256(lines.texts)
    files = () if lines.plain is None else tuple(path.name for path in lines.plain.files)
    texts = tuple(labels.get(number, "") for number in range(size))
    running = np.array([counts.get(text, 0) for text in texts])
    share = float(running[[*kept]].sum() / running.sum()) if running.any() else 1.0
    reasons = tuple(name for name in parts if name != IN_TEXT)
    codes = {name: place for place, name in enumerate(reasons, 1)}
    reason = np.array([codes.get(why.get(number, ""), 0) for number in range(size)], np.uint8)
    ranked = Ranked.of(
        ("tokens", "", None), range(size), kept, running, reasons=reasons, reason=reason, labels=texts
    )
    often = "" if options.min_count == 1 else f" {options.min_count} times or more"
    return selection_of(
        options,
        checkpoint,
        axes_of(checkpoint, "token"),
        Decision(
            "token",
            (ranked,),
            "count",
            f"kept are those that occur{often}, and what is needed",
            bound=options.min_count,
            origin=Origin(
                texts=(*lines.languages, *files),
                split=" and ".join(lines.splits) or None,
                sentences=len(lines.texts),
                tokens=sum(counts.values()),
                sha256=sha256,
            ),
        ),
        {
            "split": list(lines.splits),
            "langs": list(lines.languages),
            "text": list(files),
            "min_count": options.min_count,
            **options.recorded(),
        },
        notes={
            "vocabulary": {
                "before": size,
                "after": len(kept),
                "parts": parts,
                "sentences": len(lines.texts),
                "text_sha256": sha256,
            }
        },
        details={
            "parts": parts,
            "text": {"sentences": len(lines.texts), "sha256": sha256, "share_kept": share},
        },
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


MESSAGE = "\ue000"
"""Stands for the content of every message: a character that no template writes."""

_CHATS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "call", "tool"),
)
"""Roles of the messages; "call": an assistant that calls a tool. A template may refuse some of these."""
_CALL = {"type": "function", "id": "0", "function": {"name": "a", "arguments": {"b": "c"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "a",
        "description": "d",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
    },
}

BATCH = 4_000_000
"""Characters that are tokenised at once, about; a longer line is tokenised alone, a longer document is cut."""
REACH = 64
"""Characters of a message that the tokens at its ends may depend on."""


class Text(NamedTuple):
    """The text that the vocabulary has to serve.

    Attributes:
        lines: line -> occurrences; none is blank.
        documents: the files of more than one line, in pieces.
        messages: the beginnings and ends of lines and documents, inside of what the chat template writes around them,
            and behind prompts.
        template: texts that the chat template writes, and prompts.
    """

    lines: Mapping[str, int]
    documents: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    template: tuple[str, ...] = ()

    @classmethod
    def of(cls, lines: Lines, tokenizer: Any, prompts: Sequence[str] = ()) -> Text:
        """Collect `lines`, their documents, and both as messages to a chat model and behind `prompts`.

        Tokens depend on what stands around a line: line ends and blank lines in a document, roles in a chat.
        """
        documents = [] if lines.plain is None else [text for text in lines.plain.texts if "\n" in text]
        template, frames = chat_texts(tokenizer)
        frames += tuple((prompt, "") for prompt in prompts)
        messages = {*lines.texts, *documents, *(line for text in documents for line in text.split("\n"))}
        ends = {end for text in messages for end in (_ends(text), _ends(text.strip()))}
        return cls(
            Counter(lines.texts),
            tuple(
                "".join(piece)
                for document in documents
                for piece in batches(f"{document}\n".splitlines(keepends=True))
            ),
            tuple(sorted(f"{before}{text}{after}" for before, after in frames for text in ends)),
            (*template, *prompts),
        )

    @property
    def all(self) -> tuple[str, ...]:
        """Every text that has to fall into the same tokens as before."""
        return tuple(chain(*self))


def _ends(text: str) -> str:
    """Return `text` without the words in its middle, if it is long."""
    first, last = text.find(" ", REACH), text.rfind(" ", 0, max(len(text) - REACH, 0))
    return text[:first] + text[last:] if -1 < first < last else text


def count_tokens(
    tokenizer: Any, text: Text, progress: Progress = silent
) -> tuple[Mapping[str, int], Set[str]]:
    """Count tokens; special tokens around the sentences are left out.

    Text is tokenised as source and, if target text has a model of its own (Marian), as target.

    Returns:
        Token -> occurrences, in the lines, the documents or the messages, where there are most; and the tokens that
        the chat template writes.
    """
    with progress("counting tokens", len(text.all), "texts") as advance:
        lines, documents, messages, template = (
            _counted(tokenizer, Counter(texts), advance) for texts in text
        )
    for token in template:
        del messages[token]
    return lines | documents | messages, template.keys()


def _counted(tokenizer: Any, texts: Mapping[str, int], advance: Callable[[int], None]) -> Counter[str]:
    """Tokens as strings; those of a slow tokenizer may be pieces outside of its vocabulary."""
    counts: Counter[Any] = Counter()
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    for part in batches(texts):
        for is_target in sides(tokenizer):
            if is_fast(tokenizer):
                rows = tokenized(tokenizer, part, **options)["input_ids"]
            else:
                switch_language_side(tokenizer, is_target=is_target)
                rows = map(tokenizer.tokenize, part)
            for text, tokens in zip(part, rows, strict=True):
                for token in tokens:
                    counts[token] += texts[text]
        advance(len(part))
    if is_fast(tokenizer):
        return Counter({str(tokenizer.convert_ids_to_tokens(key)): n for key, n in counts.items()})
    return counts


def sides(tokenizer: Any) -> tuple[bool, ...]:
    """The values of `is_target` to tokenise text with: both, if source and target have models of their own (Marian)."""
    return (True, False) if hasattr(tokenizer, "spm_target") else (False,)


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts in order, many short ones or few long ones at a time."""
    texts = list(texts)
    ends = accumulate(map(len, texts))
    for _, run in groupby(zip(ends, texts, strict=True), key=lambda pair: pair[0] // BATCH):
        yield [text for _, text in run]


def chat_texts(tokenizer: Any) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The texts that the chat templates write, and the pairs of texts that stand right before and after a message.

    The text before a message begins with the last special token there, the text after it ends with the next one, since
    tokenizers cut text at special tokens first. Both are empty for a tokenizer without a chat template.
    """
    from jinja2 import Environment, TemplateSyntaxError

    templates = getattr(tokenizer, "chat_template", None) or {}
    special = "|".join(sorted(map(re.escape, tokenizer.get_added_vocab()), key=len, reverse=True)) or "(?!)"
    texts = set[str]()
    frames = set()
    for template in (templates,) if isinstance(templates, str) else templates.values():
        # For settings that no chat above has, such as tools and reasoning.
        with suppress(TemplateSyntaxError):  # no text could be made with such a template
            tokens = [*Environment(trim_blocks=True, lstrip_blocks=True).lexer.tokenize(template)]
            texts.update(str(token.value) for token in tokens if token.type in ("data", "string"))
        for roles, tools, prompt in product(_CHATS, (None, [_TOOL]), (False, True)):
            chat = [
                {"role": "assistant", "content": "", "tool_calls": [_CALL]}
                if role == "call"
                else {"role": role, "content": MESSAGE}
                for role in roles
            ]
            options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
            try:
                made = tokenizer.apply_chat_template(chat, chat_template=template, **options)
            except Exception:  # templates refuse roles and tools by any error; their literals are kept
                continue
            parts = str(made).split(MESSAGE)
            texts.update(parts)
            for before, after in pairwise(parts):
                last = max((found.start() for found in re.finditer(special, before)), default=0)
                ends = re.search(special, after)
                frames.add((before[last:], after if ends is None else after[: ends.end()]))
    return tuple(sorted(texts - {""})), tuple(sorted(frames))


_REMEDY = "Nothing was written; please report it with the name of the model."


def load_trimmed(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Any:
    """Load the tokenizer that `files` and config.json describe, before they are written anywhere else.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    with tempfile.TemporaryDirectory() as directory:
        for name, data in {**files, "config.json": json.dumps(config).encode()}.items():
            (Path(directory) / name).write_bytes(data)
        try:
            return load_tokenizer(Path(directory))
        except CheckpointError as error:
            reason = error.message.replace(directory, "it")
            raise CheckpointError(f"the trimmed tokenizer cannot be read: {reason}", _REMEDY) from error


def check_same(
    tokenizers: tuple[Any, Any],
    new_ids: Mapping[int, int],
    texts: Sequence[str],
    progress: Progress = silent,
) -> dict[str, int]:
    """Compare the original tokenizer with the trimmed one, token by token.

    Every token that stays must have its new id, and every text whose tokens all stay must fall into these tokens.

    Args:
        tokenizers: the original and the trimmed one.
        new_ids: id -> new id.
        texts: texts to compare the tokenizers on: lines, documents, messages to a chat model, each once.

    Returns:
        `sentences`: number of texts that were compared; `changed`: number of these that hold removed tokens, and so
        fall into others; `running_before`, `running_after`: tokens of all texts by each tokenizer, special ones
        included.

    Raises:
        CheckpointError: they differ.
    """
    original, trimmed = (token_ids(tokenizer) for tokenizer in tokenizers)
    expected = {token: new_ids[number] for token, number in original.items() if number in new_ids}
    if trimmed != expected:
        odd = min(token for token in {*trimmed, *expected} if trimmed.get(token) != expected.get(token))
        raise CheckpointError(
            f"the trimmed tokenizer would give {odd!r} the id {trimmed.get(odd)}, not {expected.get(odd)}",
            _REMEDY,
        )
    targets = sides(tokenizers[0])
    found = {"sentences": len(texts) * len(targets), "changed": 0, "running_before": 0, "running_after": 0}
    with progress("comparing tokens", found["sentences"], "texts") as advance:
        for is_target, part in product(targets, batches(texts)):
            options = {"text_target" if is_target else "text": part, "truncation": False, "verbose": False}
            rows = [tokenized(tokenizer, **options)["input_ids"] for tokenizer in tokenizers]
            for line, before, after in zip(part, *rows, strict=True):
                ids = [new_ids.get(number) for number in before]
                if None in ids:
                    found["changed"] += 1
                elif ids != list(after):
                    shown = line if len(line) <= 60 else f"{line[:60]}…"
                    raise CheckpointError(
                        f"the trimmed tokenizer would cut {shown!r} into other tokens", _REMEDY
                    )
                found["running_before"] += len(before)
                found["running_after"] += len(after)
            advance(len(part))
    return found
