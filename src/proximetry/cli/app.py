"""The application: commands, errors, exit codes and output streams."""

import errno
import gc
import inspect
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO, get_origin

from proximetry import __version__
from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first, printable, shorten
from proximetry._util.imports import defer_compiler, install_hint

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

MAX_MESSAGE = 2000  # characters: a message may quote a long value
# Each is a module with a function of the same name.
_COMMANDS = (
    *("calibrate", "check", "compare", "demo", "distill", "duplicates", "embed", "evaluate"),
    *("explain", "export", "extend", "index", "outliers", "push", "report", "reproduce", "same"),
    *("search", "serve", "train"),
)
# The groups of `proximetry --help`; other commands are advanced.
_GROUPS = {
    "Train": ("train", "extend", "distill", "demo", "recipes", "losses", "backbones"),
    "Evaluate": ("evaluate", "calibrate", "report", "compare", "metrics"),
    "Search": ("index", "search", "serve", "same", "explain", "gallery", "embed"),
    "Data": ("check", "duplicates", "outliers", "datasets", "cache"),
    "Faces": ("faces",),
    "Advanced": (),
}
_LIST = re.compile(r"[\d.e+-]+(,[\d.e+-]+)+", re.IGNORECASE)
# Short options of these commands, and their keys: --loss arcface.
_WITH_SECTIONS = ("train", "compare", "distill")
_SECTIONS = {
    "--data": "--data.dataset",
    "--model": "--model.backbone",
    "--backbone": "--model.backbone",
    "--labels-from-name": "--data.labels-from-name",
    **{f"--{section}": f"--{section}.name" for section in ("loss", "optimizer", "schedule")},
}


def make_app() -> "App":
    """Return the application with all its commands."""
    from cyclopts import App, Group, Parameter

    from proximetry.cli import cache, faces, gallery, listings

    app = App(
        name="proximetry",
        help="Train embeddings with proxy-based losses, evaluate them, and search with them.",
        version=f"proximetry {__version__}",
        version_flags=["--version", "-V"],
        help_format="plaintext",
        default_parameter=Parameter(
            negative_iterable=(), show_default=_show_default, consume_multiple=(1, None)
        ),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    commands = {name: getattr(import_module(f"proximetry.cli.{name}"), name) for name in _COMMANDS}
    groups = {title: Group(title, sort_key=number) for number, title in enumerate(_GROUPS)}
    advanced = groups["Advanced"]
    group_of = {name: groups[title] for title, names in _GROUPS.items() for name in names}
    parents = [(app, commands | listings.COMMANDS)]
    for module, name in ((faces, "faces"), (gallery, "gallery"), (cache, "cache")):
        parent = App(name=name, help=module.ABOUT, group=group_of[name])
        app.command(parent)
        parents.append((parent, module.COMMANDS))
    for parent, functions in parents:
        for name, function in functions.items():
            # Join the lines of each paragraph, since help is wrapped to another width.
            text = inspect.cleandoc(function.__doc__ or "")
            function.__doc__ = re.sub(r"(?<=\S)\n(?=\S| {8})\s*", " ", text)
            group = group_of.get(name, advanced) if parent is app else None
            parent.command(function, name=name, group=group)
    app.register_install_completion_command(
        help="Install completion for your shell.", group=advanced
    )
    for flag in ("--help", "--version"):
        app[flag].group = advanced
    return app


def _show_default(value: Any) -> str | None:
    """Return a default as it is typed, or None for an option that is off by default."""
    if value is None or value is False or value == ():
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 1 for a failure, 2 for a usage error, 130 if stopped."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if tokens in (["--version"], ["-V"]):  # works without cyclopts
        print(f"proximetry {__version__}")
        return 0
    try:
        from cyclopts import CycloptsError
    except ImportError:
        print(f"the command line needs cyclopts: {install_hint('train')}", file=sys.stderr)
        return 1
    app = make_app()
    if not tokens or tokens in (["faces"], ["gallery"], ["cache"]):
        app.help_print(tokens)
        return 2
    try:
        app(_prepare(tokens))
    except SystemExit as error:
        return int(error.code or 0)
    except UsageError as error:
        return _fail(error, 2)
    except CycloptsError as error:
        return _fail(_explain(error), 2)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except (ValueError, ImportError, OSError) as error:
        return _fail(error, 2 if getattr(error, "errno", None) == errno.ENAMETOOLONG else 1)
    except Exception as error:
        from proximetry.training import Stopped

        if isinstance(error, Stopped):
            return _fail(error, 130)
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return _fail("not enough memory. Use a smaller batch or smaller images.", 1)
        raise  # a bug: show the traceback
    return 0


def _prepare(tokens: list[str]) -> list[str]:
    """Rewrite a command line for cyclopts.

    ``help train`` becomes ``train --help``, ``--loss arcface`` becomes ``--loss.name arcface``,
    ``--flip true`` becomes ``--flip=true`` and ``--k 1,5`` becomes ``--k 1 5``.
    """
    if tokens[0] == "help":
        return [*tokens[1:], "--help"]
    if "" in tokens:  # as a path, it would be the current folder
        raise UsageError("an argument is empty. Check the variables of your shell.")
    prepared, lists = list[str](), list[str]()
    for word in tokens:
        name, _, value = word.partition("=")
        if tokens[0] in _WITH_SECTIONS and name in _SECTIONS:
            word = word.replace(name, _SECTIONS[name], 1)
        option = prepared[-1] if prepared and re.fullmatch("--[^=]+", prepared[-1]) else ""
        if option and word in ("true", "false"):
            prepared[-1] += f"={word}"
        elif option and _LIST.fullmatch(word):  # moved to the end, so that it takes no arguments
            lists += [prepared.pop(), *word.split(",")]
        elif name.startswith("--") and _LIST.fullmatch(value):
            lists += [name, *value.split(",")]
        else:
            prepared.append(word)
    return prepared + lists


def _explain(error: "CycloptsError") -> str:
    """Return the message of a command-line error, by default that of cyclopts."""
    import cyclopts

    see, argument = f"See proximetry {' '.join(error.command_chain or ())} --help.", error.argument
    if isinstance(error, cyclopts.UnknownOptionError):
        word = error.token.keyword or error.token.value
        last = word.lstrip("-").partition("=")[0].replace("_", "-")
        options = error.argument_collection
        keys = [name for option in options for name in option.names if name.endswith(f".{last}")]
        if keys:
            return f"Unknown option: {word}. Did you mean {' or '.join(keys)}?"
        if any(option.index is not None and option.field_info.name == last for option in options):
            return f"Unknown option: {word}. {last.upper()} is a positional argument. {see}"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"unexpected arguments: {join_first(error.unused_tokens or ())}. {see}"
    if isinstance(error, cyclopts.MissingArgumentError) and argument and argument.index is not None:
        return f"{argument.field_info.name.upper()} is missing. {see}"
    if isinstance(error, cyclopts.CoercionError) and argument and get_origin(argument.hint) is dict:
        return f"{argument.name} takes one key at a time. Write {argument.name}.KEY VALUE."
    return str(error)


def _fail(error: Exception | str, code: int) -> int:
    """Print a message in one line; return the exit code."""
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{os.fsdecode(error.filename)}: {error.strerror}"
    text = shorten(" ".join(str(error).split()), MAX_MESSAGE)
    print(printable(f"proximetry: {text}"), file=sys.stderr)
    return code


class _Output(io.FileIO):
    """A standard stream that discards output after its reader has closed the pipe."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if error.errno in (errno.EPIPE, errno.EIO):
                return len(content)
            raise OSError(error.errno, error.strerror, "standard output") from error


def _open_stream(stream: Any, number: int) -> TextIO:
    """Return a stream that escapes characters its encoding lacks."""
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8")
    buffer = io.BufferedWriter(_Output(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True)


def entry() -> None:
    """Run a command and exit with its code; the console script."""
    sys.stdout = _open_stream(sys.stdout, 1)
    sys.stderr = _open_stream(sys.stderr, 2)
    defer_compiler()
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:  # standard output is a file on a full disk
        code = _fail(error, 1)
    gc.freeze()  # else collecting garbage among all modules takes about a second at exit
    sys.exit(code)
