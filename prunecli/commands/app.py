"""The `prunecli` command: its subcommands, and how it ends."""

import errno
import gc
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from prunecli import __version__, processes
from prunecli.commands import console, failures
from prunecli.commands.command import COMMANDS, function_of, options_of
from prunecli.commands.failures import INTERRUPTED
from prunecli.errors import TextWarning
from prunecli.options import present_names
from prunecli.tensors.hub.names import expanded

STOPPED = {130: INTERRUPTED} | {
    128 + number: f"Ended by {number.name}: no output is half-written." for number in processes.TERMINATIONS
}
"""Exit status -> what is said where a signal ended the command."""

PIPE_CLOSED = 141
"""128 + SIGPIPE: the status of a program that writes to a pipe without a reader, as `| head -1` leaves it."""

COLLECT_AFTER = 50_000
"""Objects between two runs of Python's garbage collector: a million that stay come with torch and transformers."""


class _Help:
    """Help whose texts rich does not take for markup, such as `[ids]`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help text."""
        from rich.markup import escape

        for part in (self, *self.get_params(ctx), *getattr(self, "commands", {}).values()):
            part.help = escape(part.help or "")
            part.secondary_opts = []  # their column would narrow all texts
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters as typer does; help names no type of a value, only what a value stands for."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            param.metavar = param.metavar or ""
            if param.param_type_name == "argument":  # CHECKPOINT <str>
                param.display_type_rich = lambda ctx: None  # noqa: ARG005
        return params


class _Command(_Help, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments as typer does; take old names of options, suggest options that exist."""
        end = args.index("--") if "--" in args else len(args)
        if "--help-all" in args[:end]:
            args = ["--help" if word == "--help-all" else word for word in args]
            self.epilog = None
            for param in self.get_params(ctx):
                param.hidden = False
        options = present_names(self.name or "", args[:end], console.warn)
        try:
            return super().parse_args(ctx, options + args[end:])
        except Exception as error:
            if hasattr(error, "possibilities"):
                names = {"debug": "--debug", "help-all": "--help-all"}
                for param in self.get_params(ctx):
                    usage = f"the argument {param.metavar} ({ctx.command_path} {param.metavar})"
                    is_option = param.param_type_name == "option"
                    names |= {name.lstrip("-"): name if is_option else usage for name in param.opts}
                suggested = near(getattr(error, "option_name", ""), names)
                vars(error).update(
                    possibilities=None, message=".".join(filter(None, [str(error), suggested]))
                )
            raise


class _Group(_Help, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command as typer does; suggest commands that exist."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            known = {command: repr(command) for command in self.commands}
            ctx.fail(f"No such command {name!r}.{near(name, known)}")
        return super().resolve_command(ctx, args)


DESCRIPTION = (
    "Make pretrained transformers smaller and faster: checkpoint directory in, checkpoint directory out.\n\n"
    "Order of work: inspect; shrink, or collect-gates or score-heads and prune-… or share-…; evaluate, finetune, "
    "evaluate, report."
)
app = typer.Typer(
    name="prunecli",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help=DESCRIPTION,
    epilog="Without a checkpoint and text, commands take the bundled ones: in an empty folder, type "
    "[bold]prunecli collect-gates[/bold], [bold]prunecli prune-experts --ratio 0.8[/bold], "
    "[bold]prunecli bench-latency --beam 5[/bold]. [bold]prunecli help COMMAND[/bold] shows the options of a command.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"prunecli {__version__}")
        raise typer.Exit


@app.callback()
def prunecli(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Make pretrained transformers smaller and faster."""
    # `main` heeds --debug, wherever it stands; the callback of --version does the work.


def _register(asked: Sequence[str]) -> None:
    """Make the command that the arguments name known to `app`; all of them where they name none, as for help."""
    known = {name for names in COMMANDS.values() for name in names}
    alone = next((argument for argument in asked if not argument.startswith("-")), None)
    wanted = {alone} & known or known
    for panel, names in COMMANDS.items():
        for name in filter(wanted.__contains__, names):
            function = function_of(name)
            # A terminal's lines end elsewhere than the source's.
            described = "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
            hidden = any(one.hidden for one in options_of(function).list_options().values())
            app.command(
                name,
                cls=_Command,
                help=described,
                rich_help_panel=panel,
                epilog="--help-all shows all options." if hidden else None,
            )(function)


_SHOW_WARNING = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    if issubclass(category, TextWarning):
        console.warn(f"Warning: {message}")
    else:
        _SHOW_WARNING(message, category, *where, **options)


_CAME: list[int] = []
"""Signals that asked this process to end."""


def _again_if_lost(lost: Any) -> None:
    """A signal that arrives inside of a finaliser ends nothing: Python drops its exception. It comes once more."""
    if _CAME and issubclass(lost.exc_type, (KeyboardInterrupt, SystemExit)):
        _once_more(_CAME[-1])
    else:
        sys.__unraisablehook__(lost)


def _once_more(number: int) -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), number)).start()


def _heed_signals() -> None:
    """Ctrl-C and a polite kill unwind the stack, so that nothing half-written stays behind."""

    def heed(number: int, frame: Any) -> None:
        numpy = getattr(sys.modules.get("numpy"), "__spec__", None)
        # numpy's C code makes an ImportError of whatever is raised; at the ends of a `with` a lock would stay taken.
        if getattr(numpy, "_initializing", False) or frame.f_code.co_name in ("__enter__", "__exit__"):
            _once_more(number)
            return
        _CAME.append(number)
        raise _ending(number)

    _CAME.clear()
    for number in (signal.SIGINT, *processes.TERMINATIONS):
        if signal.getsignal(number) in (
            signal.SIG_DFL,
            signal.default_int_handler,
        ):  # else nohup's, or a caller's
            signal.signal(number, heed)


def _ending(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exits with 0; 1 for what the user can mend; 2 for bad usage; 70 for a bug; 130 for Ctrl-C, 143 for SIGTERM,
    129 for SIGHUP, 141 where nobody reads the output any longer.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in arguments:
        os.environ["PRUNECLI_DEBUG"] = "1"  # which the steps of a recipe see too
    debug = bool(os.environ.get("PRUNECLI_DEBUG"))
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold what no text can
            stream.reconfigure(errors="backslashreplace")
    sys.unraisablehook, warnings.showwarning = _again_if_lost, _show_warning
    _heed_signals()
    processes.end_with_parent()
    gc.set_threshold(COLLECT_AFTER)
    try:
        arguments = [expanded(argument) for argument in arguments if argument != "--debug"]
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        _register(arguments)
        called = processes.COMMAND.set(["prunecli", *arguments])
        try:
            app(args=arguments, prog_name="prunecli", standalone_mode=True)
        finally:  # a BrokenPipeError, if nobody reads what Python still holds back
            processes.COMMAND.reset(called)
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException as error:
        try:
            _end(error, debug, "--json" in arguments)
        except BrokenPipeError:
            _discard_output()
            sys.exit(PIPE_CLOSED)


def _end(error: BaseException, debug: bool, as_json: bool) -> NoReturn:
    """Say what ended the command: on stderr in words, with --json on stdout too."""
    # rich and typer make an exit with status 1 of a pipe without a reader.
    asked = _causes(error) if isinstance(error, SystemExit) else (error,)
    if any(isinstance(each, OSError) and each.errno == errno.EPIPE for each in asked):
        _discard_output()
        sys.exit(PIPE_CLOSED)
    if _CAME and not isinstance(
        error, SystemExit | processes.StoppedError
    ):  # which other imports in C make errors of, too
        error = _ending(_CAME[-1])
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1 if error.code else 0
        # What typer said of bad usage before it ended the process.
        usage = [
            f"Error: {each.format_message()}" for each in _causes(error) if hasattr(each, "format_message")
        ]
        text = next(iter(usage), STOPPED.get(status, f"Error: exit status {status}"))
    else:
        try:
            text, status = failures.describe(error)
        except Exception as bug:
            text, status = failures.unforeseen(bug)
    if as_json and status != 0:
        _print_error(console.plain(text), status)
    if any(isinstance(each.__cause__, KeyboardInterrupt) for each in _causes(error)):
        console.warn(INTERRUPTED)  # of which typer makes an exit and says nothing
    if debug or isinstance(error, SystemExit):  # of which a line has been said
        raise error
    console.say(text if processes.rank() == 0 else f"process {processes.rank()}: {text}")
    sys.exit(status)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _discard_output() -> None:
    """Send to nowhere what Python still holds back, or it would fail once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())


def _print_error(text: str, status: int) -> None:
    """A failure on stdout, for --json: `text` is that of stderr, its first line the message, the rest the remedy."""
    message, _, remedy = text.removeprefix("Error: ").partition("\n")
    said = {"message": message, "remedy": remedy.replace("\n", " ") or None, "status": status}
    payload = {"format": "prunecli.error/1", "prunecli": __version__, "error": said}
    try:
        console.print_json(payload)
    except BrokenPipeError:
        raise
    except OSError:  # of a full disk, say, which may be the failure itself
        _discard_output()


MEANINGS = {
    "bench": "benchmark speed time",
    "checkpoint": "input model model-path path",
    "data": "calibration-data corpus dataset",
    "debug": "traceback verbose",
    "device": "cpu cuda gpu",
    "dry-run": "preview",
    "dtype": "bf16 fp16 precision",
    "evaluate": "eval perplexity score test translate",
    "explain": "why",
    "finetune": "distill fine-tune heal train",
    "force": "overwrite",
    "gates": "calibrate statistics",
    "inspect": "describe info list show stats",
    "langs": "lang language",
    "learning-rate": "lr",
    "max-sentences": "limit max-sample sample",
    "metric": "criterion method",
    "output": "out output-dir save save-dir",
    "prune": "compress reduce remove",
    "shrink": "compress distill reduce smaller",
    "ratio": "amount fraction percent prune-ratio rate size sparsity",
    "report": "html plot table",
    "run": "demo quickstart recipe",
    "score": "criterion metric method",
    "source": "src src-lang",
    "steps": "epoch",
    "target": "tgt tgt-lang",
    "text": "calibration-data corpus dataset file",
    "vocabulary": "token tokenizer vocab",
}
"""Name, or part of a name, of a command or an option -> other words for it."""


def near(typed: str, known: Mapping[str, str]) -> str:
    """Return " Did you mean …?" for a name that does not exist, or nothing if no known name is near.

    Args:
        typed: the name, which may begin with dashes.
        known: name -> how the message shows this name.
    """
    word = typed.lstrip("-").lower().replace("_", "-")
    words = {word, word.removesuffix("s")}
    found = [
        name
        for name in known
        if any(words & {part, *MEANINGS.get(part, "").split()} for part in (name, *name.split("-")))
    ]
    shown = [known[name] for name in found or get_close_matches(word, known, n=3)]
    return f" Did you mean {console.listed(shown, 'or')}?" if shown else ""
