"""The command line: a table of plain functions, read from their signatures by cyclopts."""

import errno
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin

from proximetry import __version__
from proximetry._util.errors import UsageError, install_hint, printable, shorten, some
from proximetry.cli.streams import open_streams

if TYPE_CHECKING:
    from cyclopts import App, Argument, CycloptsError, UnknownOptionError


_LONGEST = 2000  # characters of a sentence: it may quote a value that has no end
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def make_app() -> "App":
    """Return the application with all its commands."""
    from cyclopts import App, Parameter

    from proximetry.cli import cache, faces
    from proximetry.cli.commands import COMMANDS

    app = App(
        name="proximetry",
        help="Train embeddings with proxy-based losses, evaluate them, put them to use.",
        version=f"proximetry {__version__}",
        version_flags=["--version", "-V"],
        help_format="plaintext",
        default_parameter=Parameter(negative_iterable=(), show_default=_show_default),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, function in COMMANDS.items():
        app.command(_reflow(function), name=name)
    for module, group in ((faces, App(name="faces")), (cache, App(name="cache"))):
        group.help = module.ABOUT
        for name, function in module.COMMANDS.items():
            group.command(_reflow(function), name=name)
        app.command(group)
    app.register_install_completion_command(help="Install completion for your shell.")
    return app


def _reflow(function: Callable[..., None]) -> Callable[..., None]:
    """Join the lines of each paragraph in a docstring: help has lines of another length."""
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = re.sub(r"(?<=\S)\n(?=\S| {8})\s*", " ", text)
    return function


def _show_default(value: Any) -> str | None:
    """Write a default as one would type it; that an option is off goes without saying."""
    if value is None or value is False or value == ():
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 if it is done, 1 failed, 2 asked wrongly, 130 stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):  # at once, and without the extra
        print(f"proximetry {__version__}")
        return 0
    try:
        from cyclopts import CycloptsError
    except ImportError:
        print(f"the command line needs cyclopts: {install_hint('train')}", file=sys.stderr)
        return 1
    from proximetry.training.callbacks import Stopped

    app = make_app()
    if not words or words in (["faces"], ["cache"]):
        app.help_print(words)
        return 2
    try:
        app(_prepare(app, words))
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except UsageError as error:
        return _complain(error, 2)
    except CycloptsError as error:
        return _complain(_explain(error), 2)
    except Stopped as error:
        return _complain(error, 130)
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except (ValueError, ImportError, OSError) as error:
        # A mistake of the user's is a sentence; anything else is ours and keeps its traceback.
        no_name = getattr(error, "errno", None) == errno.ENAMETOOLONG
        return _complain(error, 2 if no_name else 1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        return _complain("not enough memory; a smaller batch or smaller images need less", 1)
    return 0


def _complain(error: Exception | str, code: int) -> int:
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{os.fsdecode(error.filename)}: {error.strerror}"
    text = f"proximetry: {shorten(' '.join(str(error).split()), _LONGEST)}"
    if sys.stderr.isatty():
        from proximetry.cli.output import wrap

        text = wrap(text)
    print(printable(text), file=sys.stderr)
    return code


def _explain(error: "CycloptsError") -> str:
    """Say what is wrong with the words of a command, in ours where they help more."""
    from cyclopts import (
        CoercionError,
        MissingArgumentError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    see, argument = f"see: proximetry {' '.join(error.command_chain or ())} --help", error.argument
    if isinstance(error, UnknownOptionError):
        return _unknown_option(error)
    if isinstance(error, UnusedCliTokensError):
        more = some(error.unused_tokens or ())
        return f"there is no place for {more}; {see}; options begin with --"
    if isinstance(error, MissingArgumentError) and argument and argument.index is not None:
        return f"{argument.field_info.name.upper()} is missing; {see}"
    if isinstance(error, CoercionError) and argument and get_origin(argument.hint) is dict:
        return f"{argument.name} is given key by key, as {argument.name}.KEY VALUE"
    return str(error)


def _unknown_option(error: "UnknownOptionError") -> str:
    """Name the options with the same last part as the one that is not there.

    Else the one whose last part or help shares most words with it.
    """
    word = error.token.keyword or error.token.value
    section, _, last = word.lstrip("-").partition("=")[0].replace("_", "-").rpartition(".")
    wanted = set(last.split("-"))
    same, best, most = list[str](), "", 0
    for argument in error.argument_collection:
        if argument.index is not None and argument.field_info.name == last:
            return f"Unknown option: {word}. {last.upper()} is a word of its own, without an option"
        name = argument.names[0] if argument.names else ""
        home, _, key = name.lstrip("-").rpartition(".")
        if home and key == last:
            same.append(name)
        shared = wanted & set(re.findall(r"\w+", f"{key} {argument.parameter.help}"))
        if section in ("", home) and len(shared) > most:
            best, most = name, len(shared)
    if not same and most > 1:
        same = [best]
    return f"Unknown option: {word}. Did you mean {' or '.join(same)}?" if same else str(error)


def _prepare(app: "App", words: list[str]) -> list[str]:
    """Write ``help train`` as ``train --help``, and lists as cyclopts reads them."""
    if words[0] == "help":
        return [*words[1:], "--help"]
    command = app
    for word in words:  # also `faces verify`
        if word.startswith("-") or word not in command:
            break
        command = command[word]
    if command.default_command is None:
        return words
    if "" in words:  # which as a path would be the folder one is in
        raise UsageError("one of the words is empty; is a variable of the shell not set?")
    every = command.assemble_argument_collection()
    arguments = {name: argument for argument in every for name in argument.names}
    words = _join_values(arguments, [_first_key(arguments, word) for word in words])
    for option, word in itertools.pairwise([*words, ""]):
        name, _, value = option.replace("_", "-").partition("=")
        # cyclopts would round them.
        if _takes(int, arguments.get(name)) and "." in (value or word):
            raise UsageError(f"{name} takes whole numbers, got {value or word}")
    return words


def _first_key(arguments: "Mapping[str, Argument]", word: str) -> str:
    """Write ``--loss arcface`` as ``--loss.name arcface``; other keys of ``loss`` may follow."""
    name, sign, value = word.partition("=")
    section = arguments.get(name)
    return f"{section.children[0].name}{sign}{value}" if section and section.children else word


def _takes(kind: type, argument: "Argument | None") -> bool:
    return argument is not None and kind in (argument.hint, *get_args(argument.hint))


def _join_values(arguments: "Mapping[str, Argument]", words: Sequence[str]) -> list[str]:
    """Put values to their options, so that none is taken for the first word of a command.

    Write ``--k 1,5`` and ``--k 1 5`` as ``--k 1 --k 5``, and ``--flip true`` as ``--flip=true``. A
    list with commas is one word; one with spaces ends at the next option. A path may look like a
    number, so ``--k 1 5 word`` is an error.
    """
    found: list[str] = []
    current, spaced = "", list[str]()
    for position, word in enumerate(words):
        if word == "--":
            return [*found, *words[position:]]
        if word.startswith("-") and not _numbers(word):
            name, sign, value = word.partition("=")
            argument = arguments.get(name.replace("_", "-"))
            found += [f"{name}={one}" for one in _list_values(argument, value) if sign] or [word]
            current, spaced = "" if sign else name.replace("_", "-"), []
        elif values := _list_values(arguments.get(current), word):
            for value in values:
                if found[-1].replace("_", "-") != current:
                    found.append(current)
                found.append(value)
            spaced.append(word)
            if _numbers(word)[1:]:
                current = ""
        elif word in ("true", "false") and _takes(bool, arguments.get(current)):
            found[-1] += f"={word}"
            current = ""
        else:
            if current and spaced[1:] and _numbers(spaced[-1]):
                raise UsageError(
                    f"it is unclear where the list of {current} ends: {' '.join([*spaced, word])}. "
                    f"Write {current} {','.join(spaced)}, or put it after {word}."
                )
            found.append(word)
            current = ""
    return found


def _list_values(argument: "Argument | None", word: str) -> list[str]:
    """The values that a word gives to an option that takes several; none if it cannot."""
    if argument is None or get_origin(argument.hint) is not tuple:
        return []
    if get_args(argument.hint)[0] is str:
        pairs = "=" in (argument.parameter.metavar or ())
        return [word] if "=" in word or not pairs else []
    return _numbers(word)


def _numbers(word: str) -> list[str]:
    """The numbers in a word, which has commas between them; none if there is anything else."""
    numbers = word.split(",")
    return numbers if all(map(_NUMBER.fullmatch, numbers)) else []


def entry() -> None:
    """Run a command and leave with its exit code; the console script."""
    open_streams()
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:  # standard output is a file on a full disk
        code = _complain(error, 1)
    sys.exit(code)
