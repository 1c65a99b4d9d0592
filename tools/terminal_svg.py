"""Write what a command prints at 80 columns as an SVG picture: docs/score-80.svg and others.

python tools/terminal_svg.py docs/score-80.svg demur score demo --protocol deploy
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 80


def main(target: str, *command: str) -> None:
    """Run a command with 80 columns and write its output."""
    done = subprocess.run(
        command,
        env=os.environ | {"COLUMNS": str(WIDTH)},
        capture_output=True,
        text=True,
        check=True,
    )
    console = Console(width=WIDTH, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(Text("$ " + " ".join(command)), Text(done.stdout), sep="\n")
    picture = re.sub(
        r"@font-face \{.*?\}|<!--.*?-->", "", console.export_svg(title="demur"), flags=re.S
    )
    Path(target).write_text(picture, encoding="utf-8")  # fonts of the viewer: no request is made


if __name__ == "__main__":
    main(*sys.argv[1:])
