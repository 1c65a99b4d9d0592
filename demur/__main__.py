"""Entry point of the `demur` command and of `python -m demur`.

Ctrl-C is handled before the slow imports begin.
"""

import signal

from demur.cli.interrupt import ctrl_c


def main() -> None:
    """Import the command line and run it."""
    try:
        with ctrl_c(lambda: "stopped before anything was done"):
            import demur.paper.commands  # noqa: F401, registers its commands
            from demur.cli.commands import main as command

            command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; nothing is left to stop


if __name__ == "__main__":
    main()
