"""Entry point of the `demur` command and of `python -m demur`.

The handler of Ctrl-C is installed before the slow imports.
"""

import signal

from demur.interrupt import on_ctrl_c


def main() -> None:
    """Install the handler of Ctrl-C, import the command line and run it."""
    on_ctrl_c(lambda: "stopped before anything was done")
    from demur.cli import main as command

    command()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; nothing is left to stop


if __name__ == "__main__":
    main()
