"""The typer application, and the exit code of a command that fails.

Exit codes: 0 done, 1 a bug of demur, 2 a wrong request, 130 interrupted.
"""

import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from demur.cli.messages import after_a_stop, is_help, sentence_for, show_all_letters
from demur.errors import BadInput

VERBS = (
    "demo", "list", "show", "data", "train", "attack", "score", "calibrate", "report", "adaptive",
    "distortion", "theory", "archive", "table", "bench",
)  # fmt: skip


class WorkingOrder(TyperGroup):
    """The commands in the order in which one uses them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=VERBS.index)


app = typer.Typer(
    name="demur",
    help="Adversarially robust image classifiers that may reject an input.",
    cls=WorkingOrder,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
DataFolder = Annotated[
    str | None, typer.Option("--data", help="Where named data sets live.", show_default=False)
]
Engine = Annotated[
    str, typer.Option(help="auto, plain (the reference) or fast (compiled, recorded on a GPU).")
]
FirstN = Annotated[int | None, typer.Option("--n", help="The first N images.", show_default="all")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

INTERRUPTED = 130
_stops: list[int] = []  # signals that came


def _tell_version(asked: bool) -> None:
    """Print the version and the code version that records carry, and leave."""
    if asked:
        import demur
        from demur.version import code_version

        typer.echo(f"demur {demur.__version__}, code {code_version()}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_tell_version, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """What goes before all commands."""


def main() -> None:
    """Run the command; a wrong request is one sentence and exit code 2."""
    _stops.clear()
    signal.signal(signal.SIGINT, _interrupt)
    show_all_letters()
    if (here := str(Path.cwd())) not in sys.path:  # Custom("module:Class") may name a local module
        sys.path.append(here)
    try:
        code = app(prog_name=app.info.name, standalone_mode=False)
    except SystemExit as end:
        code = end.code
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has left
        code = 1
    except Exception as error:
        code = INTERRUPTED if _stops else _told(error)
    if code == INTERRUPTED:
        sys.stderr.write(f"demur: {after_a_stop(sys.argv[1:])}\n")
    if code:
        sys.exit(code)


def _interrupt(number: int, frame: object) -> None:
    """End the command; a module that was being imported may hide that and fail later."""
    _stops.append(number)
    sys.exit(INTERRUPTED)


def _told(error: Exception) -> int:
    """The exit code of a command that could not be carried out, after saying why."""
    if not is_help(error):
        sentence = sentence_for(error)
        if sentence is None:
            raise error
        sys.stderr.write(f"demur: {sentence}\n")
    return 2


def finite(param: typer.CallbackParam, value: Any) -> Any:
    """The number of an option, or its numbers, unless one is infinite or none at all."""
    for each in value if isinstance(value, list) else [value]:
        if each is not None and not math.isfinite(each):
            raise BadInput(f"--{param.name} is {each}; give a finite number")
    return value


def names_in(only: str) -> tuple[str, ...]:
    """The names between commas."""
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    if only and not names:
        raise BadInput(f"{only!r} names nothing; write names with commas between them")
    return names
