"""Entry point of the `demur` command and of `python -m demur`.

Ctrl-C is handled before the slow imports begin.
"""

import signal
import sys

from demur.cli.interrupt import ctrl_c
from demur.errors import lack


def main() -> None:
    """Import the command line and run it."""
    try:
        with ctrl_c(lambda: "stopped before anything was done"):
            from demur.cli.commands import app
            from demur.cli.commands import main as run_command
            from demur.paper.commands import add_to

            add_to(app)
            run_command()
    except Exception as error:  # of an import
        if (sentence := lack(error)) is None:
            raise
        sys.stderr.write(f"demur: {sentence}\n")
        sys.exit(2)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; nothing is left to stop


if __name__ == "__main__":
    main()
