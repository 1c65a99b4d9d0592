"""The typer application, shared options, and exit codes.

Exit codes: 0 success; 1 a bug in demur; 2 wrong input, or a file that cannot be read or written;
130 interrupted.
"""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from demur.cli.messages import error_message, is_help, replace_unencodable, stop_message
from demur.errors import BadInput
from demur.interrupt import INTERRUPTED, ctrl_c

COMMANDS = (  # in the order of use
    "demo", "list", "show", "data", "train", "retrofit", "attack", "score", "calibrate", "export",
    "predict", "serve", "report", "explore", "audit", "adaptive", "distortion", "theory", "archive",
    "table", "figure", "bench",
)  # fmt: skip


class OrderedGroup(TyperGroup):
    """A command group whose help lists the commands in the order of use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=COMMANDS.index)


app = typer.Typer(
    name="demur",
    help="Adversarially robust image classifiers that may reject an input.",
    cls=OrderedGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DataFolder = Annotated[
    str | None, typer.Option("--data", help="Folder of the data sets.", show_default=False)
]
Engine = Annotated[
    str, typer.Option(help="auto, plain (the reference) or fast (compiled, with CUDA graphs).")
]
FirstN = Annotated[
    int | None, typer.Option("--n", help="Use the first N images only.", show_default="all")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _print_version(asked: bool) -> None:
    """Print the version and the code version stored in records, then exit."""
    if asked:
        import demur
        from demur.version import code_version

        typer.echo(f"demur {demur.__version__}, code {code_version()}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options that come before the command."""


def main(program: typer.Typer = app) -> None:
    """Run a command line; wrong input prints one sentence and exits with code 2."""
    message = _stop_message if program is app else lambda: "stopped"
    replace_unencodable()
    if (here := str(Path.cwd())) not in sys.path:  # Custom("module:Class") may name a local module
        sys.path.append(here)
    with ctrl_c(message) as interrupt:
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
        sys.stderr.write(f"demur: {message()}\n")
        code = INTERRUPTED
    if code:
        sys.exit(code)


def _stop_message() -> str:
    return stop_message(sys.argv[1:])


def _report_error(error: Exception) -> int:
    """Print why a command failed and return its exit code; raise what is a bug in demur."""
    if not is_help(error):
        sentence = error_message(error)
        if sentence is None:
            raise error
        sys.stderr.write(f"demur: {sentence}\n")
    return 2


def check_finite(param: typer.CallbackParam, value: Any) -> Any:
    """Return the number or numbers of an option; raise BadInput for infinity or NaN."""
    for number in value if isinstance(value, list) else [value]:
        if number is not None and not math.isfinite(number):
            raise BadInput(f"--{param.name} is {number}; give a finite number")
    return value


def split_names(only: str) -> tuple[str, ...]:
    """Split names at commas; raise BadInput where text is given but no name."""
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    if only and not names:
        raise BadInput(f"{only!r} names nothing; write names separated by commas")
    return names
