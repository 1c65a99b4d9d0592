"""The typer application, shared options, exit codes, and messages of a command that fails.

Exit codes: 0 success; 1 a bug in demur; 2 wrong input, or a file that cannot be read or written;
130 interrupted.
"""

import errno
import math
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from demur.cli.interrupt import INTERRUPTED, ctrl_c
from demur.errors import BadInput, lack, visible
from demur.files.tables import check_format

# Commands that store what they finish, so that the same command resumes.
RESUMABLE = (
    "train", "sweep", "retrofit", "attack", "calibrate", "demo", "leaderboard add",
    "paper table", "paper figure", "paper study adaptive", "paper study distortion",
    "paper study recipes",
)  # fmt: skip
PANELS = {  # of the help: titles and commands in the order of use
    "Train": ("demo", "list", "data", "train", "sweep", "retrofit"),
    "Attack": ("attack", "audit"),
    "Judge": ("score", "compare", "report", "leaderboard", "verify"),
    "Ship": ("calibrate", "export", "predict", "serve", "guard"),
    "Paper": ("paper",),
}
PANEL_OF = {name: title for title, names in PANELS.items() for name in names}
COMMANDS = tuple(PANEL_OF)
MOVED = {  # old spellings of commands
    "table": "paper table",
    "figure": "paper figure",
    "adaptive": "paper study adaptive",
    "distortion": "paper study distortion",
    "theory": "paper study theory",
    "show": "list",
    "explore": "report",
    "archive": "export --archive",
}
ARCHIVE = "export --archive"  # a command of its own, with other options


class OrderedGroup(TyperGroup):
    """The commands in panels, in the order of use; an old spelling is answered by the new one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(set(super().list_commands(ctx)) - {ARCHIVE}, key=COMMANDS.index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found: Any = super().get_command(ctx, cmd_name)
        if found is not None:
            found.rich_help_panel = PANEL_OF[cmd_name.partition(" ")[0]]
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in MOVED:
            words = shlex.join(["demur", *MOVED[args[0]].split(), *args[1:]])
            raise BadInput(f"demur {args[0]} has a new name; write {words}")
        if args[0] == "export" and "--archive" in args:
            args = [ARCHIVE, *(word for word in args[1:] if word != "--archive")]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="demur",
    help="Adversarially robust image classifiers that may reject an input.",
    epilog="For an exported guard: demur guard info, diff and recalibrate.",
    cls=OrderedGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def option(text: str, *names: str, shown: bool | str = True, **more: Any) -> Any:
    """Return an option with its help; `shown` is what the help says about its default."""
    return typer.Option(*names, help=text, show_default=shown, **more)


def unset(text: str, *names: str, **more: Any) -> Any:
    """Return an option that has no value unless it is given."""
    return option(text, *names, shown=False, **more)


def number(text: str, *names: str, **more: Any) -> Any:
    """Return an option of one or several numbers, which must be finite."""
    return option(text, *names, callback=check_finite, **more)


def check_finite(param: typer.CallbackParam, value: Any) -> Any:
    """Return the number or numbers of an option; raise BadInput for infinity or NaN."""
    for one in value if isinstance(value, list) else [value]:
        if one is not None and not math.isfinite(one):
            raise BadInput(f"--{param.name} is {one}; give a finite number")
    return value


Device = Annotated[str, option("auto, cpu, cuda or cuda:N.")]
DataFolder = Annotated[str | None, unset("Folder of the data sets.", "--data")]
Engine = Annotated[str, option("auto, plain (the reference) or fast (compiled, with CUDA graphs).")]
Verify = Annotated[
    bool, option("Hash the files of own images; else their times are compared.", "--verify")
]
FirstN = Annotated[int | None, option("Use the first N images only.", "--n", shown="all")]
TableFormat = Annotated[
    str, option("Of tables: text, markdown, latex, csv or json.", "--format", callback=check_format)
]
AsJson = Annotated[bool, option("Print JSON instead of tables.", "--json")]


def _print_version(asked: bool) -> None:
    if asked:
        import demur
        from demur.version import code_version

        typer.echo(f"demur {demur.__version__}, code {code_version()}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool,
        option("Print the version and exit.", "--version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Options that come before the command."""


def main(program: typer.Typer = app) -> None:
    """Run a command line; wrong input prints one sentence and exits with code 2."""

    def message() -> str:
        return stop_message(sys.argv[1:]) if program is app else "stopped"

    replace_unencodable()
    out: Any = Visible(sys.stdout)
    err: Any = Visible(sys.stderr)
    if (here := str(Path.cwd())) not in sys.path:  # Custom("module:Class") may name a local module
        sys.path.append(here)
    with redirect_stdout(out), redirect_stderr(err), ctrl_c(message) as interrupt:
        try:
            code = program(prog_name=program.info.name, standalone_mode=False)
        except SystemExit as end:
            code = end.code
        except BrokenPipeError:
            sys.stderr.close()  # the reader of the pipe is gone
            code = 1
        except Exception as error:
            code = INTERRUPTED if interrupt.received else _report_error(error)
    if code == INTERRUPTED or interrupt.received:
        sys.stderr.write(visible(f"demur: {message()}\n"))
        code = INTERRUPTED
    if code:
        sys.exit(code)


class Visible:
    """A text stream that spells out control characters; rich writes past it, to the stream."""

    def __init__(self, stream: Any) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def _report_error(error: Exception) -> int:
    """Print why a command failed and return its exit code; raise what is a bug in demur."""
    if type(error).__name__ != "NoArgsIsHelpError":  # typer has printed the help of a group
        if (sentence := error_message(error)) is None:
            raise error
        sys.stderr.write(f"demur: {sentence}\n")
    return 2


def rejectors_option(about: str) -> Any:
    """Option --rejector, given once or several times, each with names separated by commas."""
    text = f"{about}: a name of demur score, a spec, or your own MODULE:CLASS(FIELD=VALUE)."
    return option(text, "--rejector", shown="none")


def split_names(only: str) -> tuple[str, ...]:
    """Split names at commas; raise BadInput where text is given but no name."""
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    if only and not names:
        raise BadInput(f"{only!r} names nothing; write names separated by commas")
    return names


def error_message(error: Exception) -> str | None:
    """Return why a command failed, in one sentence; None for a bug in demur."""
    if isinstance(error, BadInput):
        return str(error)
    if sentence := lack(error):
        return sentence
    if not isinstance(error, OSError):
        return _usage_message(error)
    where = f"{error.filename}: " if error.filename else ""
    remedy = "name another path or change its permissions"
    if error.errno == errno.EIO:
        remedy = "check the disk and run the same command again"
    return f"{where}{(error.strerror or str(error)).lower()}; {remedy}"


def stop_message(words: list[str]) -> str:
    """Return what is stored of a command that the user stopped, and how to resume it.

    `words` are the words after `demur` on the command line.
    """
    if not _resumes(words):
        return "stopped; nothing is stored, and the same command starts from the beginning"
    what = "resumes from what was finished"
    if words[:1] == ["attack"]:
        what = "resumes after the last finished batch, if there is one (--batch-size sets its size)"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun
        return f"stopped; the same torchrun command {what}"
    return f"stopped; the same command {what}: {shlex.join(['demur', *words])}"


def _resumes(words: list[str]) -> bool:
    """Return whether the command stores each part of its work as it finishes it."""
    if "audit" in words[:1]:
        return any(word.startswith("--state") for word in words)
    if any(word.startswith("--from") for word in words):  # reads only
        return False
    return any(words[: len(known)] == known for known in map(str.split, RESUMABLE))


def _usage_message(error: Exception) -> str | None:
    """Return typer's message about a wrong command line as one sentence; None for other errors."""
    if not hasattr(error, "format_message"):
        return None
    message = " ".join(error.format_message().split()).rstrip(".")
    message = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", message)
    message = re.sub(r"\(Possible options: (.*)\)$", r"(did you mean \1?)", message)
    return f"{message[:1].lower()}{message[1:]}; see {_command_of(error)} -h"


def _command_of(error: Exception) -> str:
    """Return the command whose usage is wrong: the words that name it if typer does not say."""
    if context := getattr(error, "ctx", None):
        return str(context.command_path)
    words: list[str] = ["demur"]
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        if (command := getattr(command, "commands", {}).get(word)) is None:
            break
        words.append(word)
    return " ".join(words)


def replace_unencodable() -> None:
    """Print characters that the terminal cannot encode as question marks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
