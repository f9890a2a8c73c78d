"""Options: one class for each command. Its fields are the options of the command line, recipes and the Python API.

A field is written once, with its type, default and help text:

    least: int = option("Number of heads that each layer keeps at least.", 0, flag="--min", ge=0)

Values may be given as Python values or as text, as they are typed. Errors name fields in backticks (`ratio`), or fields
with values (`ratio=2`), which the command line shows as it spells options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from prunecli.errors import PruneError, UsageError
from prunecli.tensors.hub.names import checkpoint_path
from prunecli.tensors.quantities import parse_share, parse_size

COMMON, SELECTION, TEXT, TRAINING, VALIDATION, COMPUTE, ADVANCED = PANELS = (
    "Options",
    "Selection",
    "Text",
    "Training",
    "Validation",
    "Compute and memory",
    "Advanced",
)
"""Panels of a command's help, in their order."""

Role = Literal["value", "input", "output", "checkpoint", "text"]
"""What a value is: a file or directory that is read or written, a checkpoint, text to read, or something else."""

RENAMED = {
    "prune-experts": {"--experts": "--keep", "--round-to": "--multiple-of", "--min-per-layer": "--min"},
    "prune-heads": {"--heads": "--keep", "--min-per-layer": "--min"},
    "prune-ffn": {"--score": "--metric", "--round-to": "--multiple-of", "--per-layer": "--uneven"},
    "prune-layers": {"--layers": "--remove"},
    "compare-languages": {"--min-per-layer": "--min"},
    "share-ffn": {"--config": "--preset"},
    "share-attention": {"--config": "--preset"},
    "collect-gates": {"--dtype": "--compute-dtype"},
    "score-heads": {"--method": "--metric", "--metric": "--measure", "--dtype": "--compute-dtype"},
    "evaluate": {"--dtype": "--compute-dtype"},
    "bench-latency": {
        "--dtype": "--compute-dtype",
        "--new-tokens": "--max-new-tokens",
        "--warm-up": "--warmup",
    },
    "compare-models": {"--dtype": "--compute-dtype"},
    "finetune": {"--dtype-out": "--dtype", "--metric": "--measure"},
}
"""Command -> option of 0.2.0 -> its present name. The command line and recipes take both names for one release."""
ONLY_WITH = {
    ("score-heads", "--metric"): ("chrf++", "bleu", "loss", "accuracy", "cosine"),
}
"""Old name that another option has now -> values that tell the old option from the present one."""


def present_name(command: str, option: str, value: str, say: Callable[[str], None]) -> str:
    """Return an option (`--round-to`) by its present name; `say` is called with a line about it."""
    name = RENAMED.get(command, {}).get(option, option)
    if name == option or value not in ONLY_WITH.get((command, option), (value,)):
        return option
    say(f"{option} is called {name} now.")
    return name


def present_names(command: str, words: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Return the words of a command line with options by their present names; see `present_name`."""
    found = []
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        name = present_name(command, option, value if equals else following, say)
        found.append(name + equals + value)
    return found


def _of_text(parse: Callable[[str], Any], value: Any) -> Any:
    return parse(value) if isinstance(value, str) else value


def _dtype(also: tuple[str, ...], value: Any) -> Any:
    from prunecli.tensors.dtypes import parse_computed  # imports numpy

    return parse_computed(value, also) if isinstance(value, str) else value


Share = Annotated[float, BeforeValidator(partial(_of_text, parse_share))]
"""A fraction: 0.8, "0.8" or "80%"."""
Size = Annotated[int, BeforeValidator(partial(_of_text, parse_size))]
"""Bytes: 8589934592 or "8GiB"."""
StoredDtype = Annotated[str, BeforeValidator(partial(_dtype, ()))]
"""Type of stored weights."""
ComputeDtype = Annotated[str, BeforeValidator(partial(_dtype, ("auto",)))]
"""Type to compute in."""
RunningDtype = Annotated[str, BeforeValidator(partial(_dtype, ("auto", "int8")))]
"""Type to compute in, for a model that is not trained."""
Counts = tuple[Annotated[int, Field(ge=1)], ...]
"""Numbers from 1 on."""
Files = tuple[Path, ...]
"""Files: one path or several."""
Name = Annotated[
    str, BeforeValidator(lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else value)
]
"""A name; a pair as `a-b` or (a, b)."""
CheckpointPath = Annotated[Path, BeforeValidator(partial(_of_text, checkpoint_path))]
"""Directory of a checkpoint, or a model of the hub (`org/name`)."""


@dataclass(frozen=True)
class Option:
    """One option of a class: what `option` says of it, then what its field says.

    Attributes:
        flag, negative: how the command line spells it, and the switch for False, if there is one.
        metavar: name of the value in the help; for a switch, its opposite.
        owner: the class.
        name: name of the field.
        short: its short form, or an empty text.
        type: type of one value.
        default: the default; None if it is required.
    """

    flag: str = ""
    metavar: str = ""
    panel: str = COMMON
    role: Role = "value"
    argument: bool = False
    repeated: bool = False
    hidden: bool = False
    recorded: bool = True
    beside: str = ""
    needs: str = ""
    excludes: str = ""
    owner: Any = None
    name: str = ""
    negative: str = ""
    short: str = ""
    type: Any = None
    default: Any = None
    is_required: bool = False
    help: str = ""

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value."""
        return self.type is bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the option takes; empty if it takes other values too."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def described(self) -> str:
        """The help text with the choices and the default, if the text does not name them."""
        text = self.help
        if self.choices and any(choice not in text for choice in self.choices):
            text += f" One of {', '.join(self.choices)}."
        shown = not isinstance(self.default, bool) and self.default not in (None, (), "")
        return f"{text} Default: {self.default}." if shown and "efault" not in text else text

    @property
    def written(self) -> str:
        """The option as one types it, without dashes, as recipes and results name it."""
        return self.name if self.argument else self.flag.removeprefix("--")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a recipe may give the option; a switch has two."""
        return tuple(dict.fromkeys(filter(None, (self.written, self.negative.removeprefix("--")))))

    def value(self, given: Any) -> Any:
        """Return the value of the field for a switch that is given or not."""
        return not given if self.is_switch and self.flag == self.negative else given


def option(help: str, default: Any = None, **spec: Any) -> Any:  # noqa: A002
    """Return a field of a class of options that is an option of the command.

    Args:
        help: what the option means; `{cls.NAME}` stands for an attribute of the class. Help texts and pages add the
            default and the choices, if the text lacks them.
        default: the default, or `...` if the option is required.
        spec: bounds of a number (`ge`, `gt`, `le`, `lt`), `max_length` of a tuple, and fields of `Option`:
            flag: name of the option, if it is not that of the field; of a switch perhaps `--on/--off`.
            metavar: what help calls a value.
            panel: panel of the help.
            role: what a value is.
            argument: whether the option is a positional argument.
            repeated: whether a tuple is given one value at a time; tuples of paths always are. Others are given as
                text with commas.
            hidden: whether only `--help-all` shows the option.
            recorded: whether a result records the option.
            beside: ending of a directory that the command writes beside its output, if the option is given.
            needs: options, or words such as metric=gradient, one of which the option goes with; spaces between them.
            excludes: options or such words that the option does not go with.
    """
    bounds = {name: spec.pop(name) for name in ("ge", "gt", "le", "lt", "max_length") if name in spec}
    extra: Any = {"option": Option(**spec)}
    return Field(default, description=help, json_schema_extra=extra, **bounds)


def argument(help: str, metavar: str, default: Any = None, **spec: Any) -> Any:  # noqa: A002
    """Return a field that is a positional argument; see `option`."""
    return option(help, default, metavar=metavar, argument=True, recorded=False, **spec)


selection_option = partial(option, panel=SELECTION)
text_option = partial(option, panel=TEXT)
training_option = partial(option, panel=TRAINING)
validation_option = partial(option, panel=VALIDATION)
compute_option = partial(option, panel=COMPUTE)
advanced_option = partial(option, panel=ADVANCED)
hidden_option = partial(advanced_option, hidden=True)
"""Fields of the panels of the help; those of the last one are shown by `--help-all` alone."""


_dtype_option = partial(compute_option, metavar="TYPE")
STORED_DTYPE = _dtype_option("Stored type: float16, bfloat16, float32. Default: as in the checkpoint.")
COMPUTE_DTYPE = _dtype_option(
    "Type to compute in: auto, float32, bfloat16, float16.", "auto", flag="--compute-dtype"
)
RUNNING_DTYPE = _dtype_option(
    "Type to compute in: auto, float32, bfloat16, float16; int8 on a CPU.", "auto", flag="--compute-dtype"
)
"""Fields `dtype` of commands that rewrite, that compute, and that only run models forward."""


class Options(BaseModel):
    """Options of a command, or of a function of the Python API. They do not change; `updated` makes others."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True
    )

    LEFT_OUT: ClassVar[tuple[str, ...]] = ()
    """Fields of the base classes that are no options of the command."""

    def __init__(self, **values: Any) -> None:
        """Check the values.

        Raises:
            UsageError: an unknown option, or a value that the option does not take.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _usage_error(error) from None

    def updated(self, **values: Any) -> Self:
        """Options of these values, which are not checked again, and otherwise the same."""
        return self.model_copy(update=values)

    @field_validator("*", mode="wrap")
    @classmethod
    def _taken(cls, value: Any, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """Take a text with commas, or one value, for a tuple; have pydantic collect errors of prunecli."""
        field = cls.model_fields[str(info.field_name)]
        (kind, several), spec = _type(field.annotation), _spec(field)
        if several and isinstance(value, str) and kind is not Path and not (spec and spec.repeated):
            names = tuple(part.strip() for part in value.split(","))
            if not all(names):
                raise ValueError(UsageError("an empty name", "Separate names by single commas."))
            value = tuple(dict.fromkeys(names)) if kind is str else names
        elif several and isinstance(value, str | Path):
            value = (value,)
        if several and kind is Path and isinstance(value, Sequence):
            value = tuple(Path(one) if isinstance(one, str) else one for one in value)
        try:
            return check(value)
        except UsageError as error:
            raise ValueError(error) from error

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        """Refuse an option without the one that it goes with, and one that excludes another."""
        held = self.changed
        held |= {f"{name}={value}" for name, value in self if isinstance(value, str | bool)}
        for name, one in self._all_options().items():
            needed, excluded = one.needs.split(), held.intersection(one.excludes.split())
            if name in held and needed and held.isdisjoint(needed):
                named = "` or `".join(needed)
                raise ValueError(
                    UsageError(f"`{name}` goes with `{named}`.", f"Give `{named}`, or leave it out.")
                )
            if name in held and excluded:
                named = "` or `".join(sorted(excluded))
                raise ValueError(UsageError(f"`{name}` does not go with `{named}`.", "Give one of them."))
        return self

    @classmethod
    @lru_cache
    def _all_options(cls) -> Mapping[str, Option]:
        """Return the options by the names of their fields; also those that the command leaves out."""
        return {
            name: _option(cls, name, field, spec)
            for name, field in cls.model_fields.items()
            if (spec := _spec(field)) is not None
        }

    @classmethod
    @lru_cache
    def list_options(cls) -> Mapping[str, Option]:
        """Return the options of the command by the names of their fields: those of each panel together."""
        left_out = frozenset().union(*(vars(base).get("LEFT_OUT", ()) for base in cls.__mro__))
        found = [one for name, one in cls._all_options().items() if name not in left_out]
        found.sort(key=lambda one: (not one.argument, PANELS.index(one.panel)))
        return {one.name: one for one in found}

    @classmethod
    def fault(cls, name: str, value: Any) -> str | None:
        """Return what is wrong with the value of one field, as the command line spells it, or None."""
        try:
            cls.__pydantic_validator__.validate_python({name: value}, self_instance=cls.__new__(cls))
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                if fault["loc"][:1] == (name,):
                    reason, remedy = _reason(fault)
                    if fault["type"] == "literal_error" and remedy:
                        reason = f"{reason}: {remedy[0].lower()}{remedy[1:-1]}"
                    return cls.as_typed(reason)
        return None

    @classmethod
    def as_typed(cls, text: str) -> str:
        """Return a message with its fields (`ratio`, `ratio=2`) as the command line spells them."""

        def spelt(match: re.Match[str]) -> str:
            name, equals, value = match[1], match[2], match[3]
            flag = f"--{name.replace('_', '-')}"
            if (own := cls._all_options().get(name)) is not None:
                flag = own.metavar if own.argument else own.flag
                if own.is_switch:
                    return own.negative if value == "False" else flag
            return f"{flag} {value}" if equals else flag

        return re.sub(r"`(\w+)(=?)((?:(?<==)[^`]*)?)`", spelt, text)

    @property
    def changed(self) -> set[str]:
        """Names of the fields whose values differ from the defaults."""
        return {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default
        }

    def refuse(self, names: Iterable[str], why: str, remedy: str = "Leave it out.") -> None:
        """Refuse options that a model or text has no use for; `why` follows the name.

        Raises:
            UsageError: one of them is given.
        """
        for name in names:
            if name in self.changed:
                raise UsageError(f"`{name}` {why}", remedy)

    def values_of(self, kind: type[Options]) -> dict[str, Any]:
        """Return the values of the fields that another class, a base class perhaps, has too."""
        return {name: getattr(self, name) for name in kind.model_fields}

    def recorded(self) -> dict[str, Any]:
        """Return what a result records: changed options, as the command line names them, without paths."""
        found = {}
        for name, own in type(self).list_options().items():
            if own.recorded and own.role == "value" and name in self.changed:
                value = getattr(self, name)
                key = (own.negative if value is False else own.flag).removeprefix("--").replace("-", "_")
                found[key] = True if own.is_switch else [*value] if isinstance(value, tuple) else value
        return found


def _spec(field: FieldInfo) -> Any:
    """The `Option` that `option` gave the field; None for a field that is no option."""
    extra = field.json_schema_extra
    return extra.get("option") if isinstance(extra, dict) else None


def _option(cls: type[Options], name: str, field: FieldInfo, spec: Option) -> Option:
    kind, several = _type(field.annotation)
    names, _, short = (spec.flag or f"--{name.replace('_', '-')}").partition(" ")
    flag, _, negative = names.partition("/")
    if kind is bool and field.default is True and not negative:
        negative = flag
    kinds = {int: "N", float: "X", Path: "FILE"}
    metavar = spec.metavar or ("NAME" if get_origin(kind) is Literal else kinds.get(kind, "TEXT"))
    if kind is bool:
        metavar = negative if flag != negative else ""
    return replace(
        spec,
        flag=flag,
        metavar=metavar,
        repeated=spec.repeated or (several and kind is Path),
        owner=cls,
        name=name,
        negative=negative,
        short=short,
        type=kind,
        default=None if field.is_required() else field.default,
        is_required=field.is_required(),
        help=(field.description or "").format(cls=cls),
    )


def _type(annotation: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there may be several: `tuple[Path, ...] | None` -> (Path, True)."""
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part not in (type(None), Any)]
        several = [part for part in parts if get_origin(part) is tuple]
        return _type((several or parts)[0])
    if get_origin(annotation) is tuple and Ellipsis in get_args(annotation):
        return _type(get_args(annotation)[0])[0], True
    return annotation, False


def _usage_error(error: ValidationError) -> UsageError:
    """Return the first of the faults as an error."""
    fault = error.errors(include_url=False)[0]
    name = next(iter(fault["loc"]), "")
    if fault["type"] == "extra_forbidden":
        return UsageError(f"There is no option `{name}`.")
    if fault["type"] == "missing":
        return UsageError(f"`{name}` is missing.")
    reason, remedy = _reason(fault)
    value = fault["input"]
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return UsageError(reason if not name or reason.startswith("`") else f"`{name}={text}`: {reason}", remedy)


def _reason(fault: ErrorDetails) -> tuple[str, str | None]:
    """Return what is wrong with a value, and what to give instead."""
    context = fault.get("ctx", {})
    own = context.get("error")
    if isinstance(own, ValueError) and own.args and isinstance(own.args[0], PruneError):
        return own.args[0].message, own.args[0].remedy
    if fault["type"] == "path_type":
        return "no path", "Give a Path, or its text."
    if fault["type"] == "literal_error":
        return (
            "no such choice",
            f"Choose one of {str(context['expected']).replace(chr(39), '').replace(' or ', ', ')}.",
        )
    return fault["msg"].replace("Input should be", "must be").split(", unable")[0].removeprefix(
        "Value error, "
    ), None
