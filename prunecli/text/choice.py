"""A model's task; and which text a run takes: parallel, plain or labelled, by its task and by what is named."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from prunecli.errors import DataError, UsageError
from prunecli.options import Files, Name, Options, option, text_option
from prunecli.progress import Say, unsaid
from prunecli.text.files import TextFile, parse_text_file
from prunecli.text.parallel import (
    Pairs,
    ParallelText,
    has_split,
    languages_of,
    parse_pairs,
    read_pair,
    read_parallel,
)
from prunecli.text.plain import LabelledText, PlainText, read_labelled, read_plain, say_convention

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

TaskName = Literal["translation", "classification", "mlm", "lm", "embedding"]
"""What a model can be measured at: `embedding`, the vectors of texts, needs no head."""
TASKS = get_args(TaskName)
TrainingTask = Literal[TaskName, "feature-extraction"]
"""What a model can be trained for."""
HEADLESS = ("embedding", "feature-extraction")
"""Tasks of models without a head, which learn from a teacher alone."""

_ENDINGS: Mapping[str, TrainingTask] = {
    **dict.fromkeys(
        ("Model", "TokenClassification", "QuestionAnswering", "MultipleChoice", "Prediction", "PreTraining"),
        "feature-extraction",
    ),
    "LMHeadModel": "lm",
    "WithLMHeadModel": "mlm",
    "ForSequenceClassification": "classification",
    "ForMaskedLM": "mlm",
}
"""Of a class -> what it is for; the longer of two endings last. An encoder with a decoder translates without a head."""


def has_decoder(name: str, *, is_pair: bool) -> bool:
    """Whether a class of transformers has an encoder with a decoder; some have the encoder alone of such a config.

    Args:
        is_pair: what config.json says.
    """
    return is_pair and not name.endswith("EncoderModel")


def sees_ahead(config: Any) -> bool:
    """Whether a class for language models sees the tokens that it predicts: XLNet, and a BERT that is no decoder.

    Other configs may say that they are no decoder, and their classes do not read it; those of BART's kin set it.
    """
    kind = type(config)
    if getattr(kind, "is_decoder", None) is not False or kind.is_encoder_decoder:
        return config.model_type in ("cpmant", "xlnet")
    return not (config.is_decoder or config.model_type.startswith(("gpt_neox", "trocr")))


def scores_texts(config: Any) -> bool:
    """Whether a classification head scores texts, or has several labels at once, and does not choose one class."""
    return config.num_labels < 2 or config.problem_type not in (None, "single_label_classification")


def task_of_class(name: str, *, is_pair: bool) -> TrainingTask:
    """The task of a class of transformers.

    Args:
        is_pair: whether it is an encoder with a decoder.
    """
    is_pair = has_decoder(name, is_pair=is_pair)
    task: TrainingTask = "translation" if is_pair else "lm"
    for ending, own in _ENDINGS.items():
        if name.endswith(ending) and not (is_pair and own == "feature-extraction"):
            task = own
    return task


def training_task_of(checkpoint: Checkpoint) -> TrainingTask:
    """The task of a checkpoint's model."""
    from prunecli.modules.classes import own_config, stock_class

    is_pair = not checkpoint.runs_stock or checkpoint.config.get("is_encoder_decoder") is True
    stock = stock_class(checkpoint)
    task = task_of_class(stock.__name__, is_pair=is_pair)
    unmeasured = {"lm": sees_ahead, "classification": scores_texts}.get(task)
    is_unmeasured = unmeasured is not None and unmeasured(own_config(checkpoint, stock))
    return "feature-extraction" if is_unmeasured else task


def task_of(checkpoint: Checkpoint) -> TaskName:
    """The task that a checkpoint's model is measured at: without a head, the vectors of texts."""
    task = training_task_of(checkpoint)
    return "embedding" if task == "feature-extraction" else task


def task_of_all(checkpoints: Sequence[Path]) -> TaskName:
    """The task that several checkpoints' models have in common.

    Raises:
        UsageError: not all for the same.
        CheckpointError: one of them is no checkpoint.
    """
    from prunecli.model.checkpoint import open_model

    paths: dict[TaskName, Path] = {}
    for path in checkpoints:
        paths.setdefault(task_of(open_model(path)), path)
    if len(paths) > 1:
        (first, path), (second, other), *_ = paths.items()
        raise UsageError(f"{path} is for {first}, {other} for {second}", "Say with `task` what is measured.")
    return next(iter(paths))


Text = ParallelText | PlainText | LabelledText
WHOLE_SPLITS = ("train", "val", "dev")
"""Where the lines of whole splits are read and none is named."""

_PLAIN: tuple[TaskName, ...] = ("mlm", "lm")
_TASKS: Mapping[str, tuple[TaskName, ...]] = {
    **dict.fromkeys(
        ("data", "source_file", "target_file", "langs", "pairs", "valid_split"), ("translation", "embedding")
    ),
    **dict.fromkeys(("spm", "hypotheses", "groups", "beam", "beams", "comet"), ("translation",)),
    **dict.fromkeys(("labelled", "valid_labelled"), ("classification", "embedding")),
    **dict.fromkeys(("files", "valid_text", "whole_files", "context"), (*_PLAIN, "embedding")),
    "memory": _PLAIN,
    **dict.fromkeys(("stride", "continuations"), ("lm",)),
}
"""Option -> the tasks that it goes with."""
_NEEDS: Mapping[TrainingTask, str] = {
    "translation": "Give `data=DIR`, or `source_file`, `target_file` and `pairs`.",
    "classification": "Give `labelled=FILE`: label<TAB>text on every line, or JSON lines.",
    "lm": "Give `files=FILE`.",
    **dict.fromkeys(("mlm", "feature-extraction"), "Give `files=FILE`, one text a line."),
    "embedding": "Give `files=FILE`, one text a line; `labelled=FILE` of scored pairs; or `data=DIR` of aligned text.",
}
"""Task -> the text that it needs."""


NamedText = Annotated[
    TextFile, BeforeValidator(lambda value: parse_text_file(value) if isinstance(value, str) else value)
]
"""A file of text with a name, perhaps."""
NAMED_TEXT = option(
    "Plain text, or hf://ORG/NAME:SPLIT[:1000]:COLUMN; may be given again. NAME: name in the result.",
    (),
    metavar="[NAME=]FILE",
    role="text",
    repeated=True,
)
"""Field `text` of commands that tell texts apart by name."""


_text_option = partial(text_option, recorded=False)
split_option = partial(text_option, excludes="text files labelled source_file")
"""Field `split`: other text than that of `data` has no splits."""


@dataclass(frozen=True)
class Dataset:
    """The text of a task.

    Attributes:
        task: that it is for.
        text: parallel for translation, labelled for classification, plain for language models, any of them for
            embedding.
        pairs: the directions of parallel text.
        context: tokens of a window of plain text; None: see `window_length`.
    """

    task: TaskName
    text: Text
    pairs: Pairs = ()
    context: int | None = None


@dataclass(frozen=True)
class Lines:
    """The lines of whole splits and files, blank ones left out.

    Attributes:
        texts: in the order in which they were read; some may be there several times.
        splits: of a directory; empty: of none.
        asked: languages that were chosen; empty: all.
        languages: of the splits.
        plain: the files, each a whole document; their lines are among `texts`.
    """

    texts: tuple[str, ...]
    splits: tuple[str, ...]
    asked: tuple[str, ...]
    languages: tuple[str, ...]
    plain: PlainText | None


class TextChoice(Options):
    """Options that name text. The task decides which of them is read.

    Attributes:
        names: name of each of `files`, by which measurements are told apart; empty: none.
        demo: directory of the demo's text, which is read if `data` is None. If None, a text must be named.
    """

    data: Path | None = option(
        "Aligned text: files SPLIT.LANG (val.eng_Latn) or SPLIT/LANG.SPLIT, also .gz. Default: the demo's text.",
        metavar="DIR",
        role="text",
    )
    files: Files = option(
        "Plain text, or hf://ORG/NAME:SPLIT[:1000]:COLUMN; may be given again.",
        (),
        flag="--text",
        role="text",
    )
    langs: tuple[Name, ...] | None = _text_option("Languages of --data, in all pairs.", metavar="A,B,C")
    pairs: tuple[Name, ...] | None = _text_option("Language pairs.", metavar="A-B,C-D", excludes="langs")
    split: str | None = split_option("Split of --data. Default: val.", recorded=False)
    source_file: Path | None = _text_option(
        "Sentences of one pair, with --pairs.",
        role="text",
        excludes="data langs",
    )
    target_file: Path | None = _text_option(
        "Translations of --source-file.",
        role="text",
    )
    labelled: Path | None = _text_option(
        "Lines of label, tab, text, perhaps a tab and a second text; or JSON lines.",
        role="text",
    )
    whole_files: bool | None = _text_option(
        "Each --text file is one document, or each of its lines is a text. Default: documents for causal language "
        "models, lines for others.",
        flag="--whole-files/--lines",
        hidden=True,
    )
    context: int | None = _text_option(
        "Tokens in a window of plain text. Default: the model's limit, at most 2,048.",
        ge=2,
    )
    max_sentences: int | None = _text_option(
        "Read only the first N sentences or lines.",
        ge=1,
    )
    names: tuple[str, ...] = ()
    demo: Path | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The pairs, languages or files that are named."""
        labelled = () if self.labelled is None else (self.labelled,)
        return self.pairs or self.langs or tuple(map(str, self.files or labelled))

    @property
    def split_read(self) -> str | None:
        """The split of a directory of parallel text; None for other text."""
        return None if self.files or self.labelled or self.source_file else self.split or "val"

    @property
    def given(self) -> list[str]:
        """Names of the options that name text and were given."""
        return [name for name in _TASKS if name in TextChoice.model_fields and name in self.changed]

    def check_task(
        self,
        task: TrainingTask,
        more: Collection[str] = (),
        *,
        also_plain: tuple[TrainingTask, ...] = (),
    ) -> None:
        """Refuse text of other tasks, and a language model without text. `read` refuses other tasks without text.

        Args:
            more: names of further options that were given.
            also_plain: tasks that take plain text beside those of language models.

        Raises:
            UsageError: text of another task is given, or that of this one is missing.
        """
        if task not in _NEEDS:
            raise UsageError(f"task={task!r}: no such choice", f"Choose one of {', '.join(_NEEDS)}.")
        given = self.given
        for name, own in _TASKS.items():
            tasks = (*own, *(also_plain if "mlm" in own else ()))
            if (name in given or name in more) and task not in tasks:
                remedy = _NEEDS[task] if name in given else "Leave it out."
                raise UsageError(f"`{name}` goes with `task={' or '.join(tasks)}`, not {task}", remedy)
        if task in (*_PLAIN, *also_plain) and not self.files:
            raise UsageError(f"A model for the task {task} needs text", _NEEDS[task])

    def read(self, task: TaskName, say: Say = unsaid) -> Dataset:
        """The text of `task`.

        Args:
            say: hears that the demo's text is read, or whether each file or each line is a text.

        Raises:
            UsageError: options that contradict each other, or no text for the task.
            DataError: text that cannot be used.
        """
        return Dataset(task, *self.text_of(task, say), self.context)

    def text_of(self, task: TrainingTask, say: Say = unsaid) -> tuple[Text, Pairs]:
        """The text of `task` and, of translation, its directions.

        Raises:
            UsageError, DataError: as `read`.
        """
        whole_files = task == "lm" if self.whole_files is None else self.whole_files
        if task == "embedding":
            given = [name for name in ("files", "labelled", "data", "source_file") if name in self.given]
            if len(given) != 1:
                raise UsageError(
                    "embedding: text of several kinds" if given else "embedding needs text", _NEEDS[task]
                )
            task = _TASKS[given[0]][0]
        if task == "translation":
            return self.parallel(say)
        if task != "classification":
            files = self.files
            plain = read_plain(
                files, whole_files=whole_files, names=self.names, max_sentences=self.max_sentences
            )
            say_convention(files, say, whole_files=whole_files)
            return plain, ()
        if self.labelled is None:
            raise UsageError("classification needs labels", _NEEDS[task])
        return read_labelled(self.labelled).first(self.max_sentences), ()

    def parallel(self, say: Say = unsaid) -> tuple[ParallelText, Pairs]:
        """Aligned text and its directions.

        Raises:
            UsageError, DataError: as `read`.
        """
        files, count = (self.source_file, self.target_file), self.max_sentences
        if any(path is not None for path in files):
            if self.source_file is None or self.target_file is None or self.pairs is None:
                raise UsageError(
                    "`source_file`, `target_file` and `pairs` go together",
                    "Give all three, such as `pairs=eng_Latn-fra_Latn`.",
                )
            text = read_pair(self.source_file, self.target_file, self.pairs)
            return text.first(count), ((text.languages[0], text.languages[1]),)
        split = self.split_read or "val"
        data = self._directory(say)
        pairs = parse_pairs(self.pairs, self.langs, languages_of(data, split))
        needed = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        return read_parallel(data, split, needed).first(count), pairs

    def _directory(self, say: Say) -> Path:
        if self.data is not None:
            return self.data
        if self.demo is None:
            raise UsageError("no text is given", _NEEDS["translation"])
        # In which languages: a model of the user's own knows others.
        names = ", ".join(languages_of(self.demo, "val"))
        say(f"No `data` given: using the demo's text, in {names}; give yours with `data`.")
        return self.demo

    def selecting(self, task: TrainingTask, data: Path | None, split: str | None) -> TextChoice | None:
        """The text that something is chosen on, where it is another than that which it is reported on.

        Args:
            data: a directory for translation, else a file.
            split: of the directory.

        Raises:
            UsageError: a split of text that has none.
        """
        if data is None and split is None:
            return None
        if task == "translation":
            if self.source_file is not None and data is None:
                raise UsageError(
                    "`select_split`: the text has no splits", "Name a directory with `select_data`."
                )
            data, split = data or self.data or self.demo, split or self.split
            return self.updated(data=data, split=split, source_file=None, target_file=None)
        if split is not None or data is None:
            raise UsageError("`select_split`: the text has no splits", "Name a file with `select_data`.")
        changed = {"labelled": data} if task == "classification" else {"files": (data,), "names": ()}
        return self.updated(**changed)

    def lines(self, say: Say = unsaid) -> Lines:
        """All lines of `split` (else of those of `WHOLE_SPLITS` that there are) and of `files`, in `langs`.

        Raises:
            UsageError: options that go with a directory, without one.
            DataError: no such directory, split, language or file; an empty one, or one that is not UTF-8.
        """
        if self.data is None and self.demo is None and (self.split is not None or self.langs is not None):
            raise UsageError("`split` and `langs` go with `data`.", "Name a directory of text with `data`.")
        texts = []
        splits: tuple[str, ...] = ()
        asked, languages = self.langs or (), dict[str, None]()
        if self.data is not None or self.demo is not None:
            data = self._directory(say)
            present = tuple(name for name in WHOLE_SPLITS if has_split(data, name))
            named = () if self.split is None else tuple(filter(None, map(str.strip, self.split.split(","))))
            splits = named or present or WHOLE_SPLITS[:1]
            for split in splits:
                text = read_parallel(data, split, asked or languages_of(data, split))
                texts += [line for lines in text.sentences.values() for line in lines if line.strip()]
                languages |= dict.fromkeys(text.languages)
        plain = read_plain(self.files, whole_files=True) if self.files else None
        for document in () if plain is None else plain.texts:
            texts += [line for line in document.split("\n") if line.strip()]
        return Lines(tuple(texts), splits, asked, tuple(languages), plain)


def columns(text: Text, pairs: Pairs = ()) -> dict[str, list[str]]:
    """Name of a column -> its texts, row by row; plain text is one column without a name.

    Args:
        pairs: of aligned text, whose languages alone are taken; none: all. Rows that are blank in one of them are left
            out.

    Raises:
        DataError: labelled text with one text a line.
    """
    if isinstance(text, ParallelText):
        names = dict.fromkeys(name for pair in pairs for name in pair) or dict.fromkeys(text.languages)
        whole = [row for row in range(len(text)) if all(text.sentences[name][row].strip() for name in names)]
        return {name: [text.sentences[name][row] for row in whole] for name in names}
    if isinstance(text, LabelledText):
        if text.seconds is None:
            raise DataError(
                f"{text.path}: one text a line, where pairs of texts have a similarity",
                "A line is similarity<TAB>text<TAB>second text, or JSON with the keys label, text, text_b.",
            )
        return {"first texts": list(text.texts), "second texts": list(text.seconds)}
    return {"": list(text.texts)}


def all_texts(text: Text, pairs: Pairs) -> list[str]:
    """The texts of all `columns`, one column after another."""
    return [one for column in columns(text, pairs).values() for one in column]


def described(text: Text) -> dict[str, Any]:
    """The fields of a result that tell which text was read: `files`, `sha256`, and `whole_files` of plain text."""
    if isinstance(text, ParallelText):
        files = [f"{text.split}.{language}" for language in text.languages]
    else:
        files = [path.name for path in text.files]
    whole = {"whole_files": text.whole_files} if isinstance(text, PlainText) else {}
    return {"files": files, "sha256": text.sha256, **whole}
