"""Build hooks of the documentation site: write reference lists from the code.

The page docs/reference/cli.md holds the line `<!-- commands -->`; the build replaces it with one
section per command, so that the page always matches `demur --help`. The line
`<!-- list rejectors -->` becomes a table of what `demur list rejectors` prints.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "<!-- commands -->"
LIST = re.compile(r"<!-- list (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholders by the sections of all commands and by the lists of classes."""
    sys.path.insert(0, str(ROOT))
    try:
        markdown = LIST.sub(lambda found: class_table(found[1]), markdown)
        return (
            markdown.replace(PLACEHOLDER, cli_sections()) if PLACEHOLDER in markdown else markdown
        )
    finally:
        sys.path.remove(str(ROOT))


def class_table(kind: str) -> str:
    """What `demur list KIND` prints, as a Markdown table."""
    from demur.cli.listing import listings

    rows = [f"| `{name}` | {_cell(text)} |" for name, text in listings(Path())[kind]().items()]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def cli_sections() -> str:
    """One Markdown section for each command and subcommand, in alphabetical order."""
    from typer.main import get_command

    from demur.cli.commands import app
    from demur.paper.commands import add_to

    add_to(app)
    return "\n\n".join(_sections(get_command(app), "demur"))


def _sections(command: Any, path: str) -> Iterator[str]:
    """The sections of the commands below a group."""
    for name in sorted(command.commands):
        child = command.commands[name]
        yield _section(child, f"{path} {name}")
        if hasattr(child, "commands"):
            yield from _sections(child, f"{path} {name}")


def _section(command: Any, path: str) -> str:
    """Heading, help text, example and table of parameters of one command."""
    context = click.Context(command, info_name=path)
    help_text = " ".join((command.help or "").split())
    text, _, example = help_text.partition("Example: ")
    parts = [f"## {path}", text.strip()]
    if example:
        parts.append(f"```text\n{example}\n```")
    rows = [row for parameter in command.get_params(context) if (row := _row(parameter))]
    if rows:
        parts.append(
            "| argument or option | default | meaning |\n|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)


def _row(parameter: Any) -> str | None:
    """The table row of an argument or option; None for --help."""
    if "--help" in parameter.opts:
        return None
    is_argument = parameter.param_type_name == "argument"
    placeholder = str(parameter.metavar or parameter.name)
    names = [placeholder] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = parameter.show_default if isinstance(parameter.show_default, str) else None
    if default is None and parameter.required:
        default = "required"
    elif default is None and parameter.default not in (None, False, True, (), []):
        default = str(parameter.default)
    elif default is None and not is_argument and parameter.secondary_opts:
        default = (parameter.opts if parameter.default else parameter.secondary_opts)[0]
    meaning = " ".join((getattr(parameter, "help", "") or "").split())
    cells = (" ".join(f"`{name}`" for name in names), default or "", meaning)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"
