"""Entry point of the `demur` command and of `python -m demur`.

The handler of Ctrl-C is installed before the slow imports, so that an interrupt never prints a
traceback.
"""

import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Install the handler of Ctrl-C, import the command line and run it."""
    signals: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        signals.append(number)
        sys.exit(INTERRUPTED)

    signal.signal(signal.SIGINT, interrupt)
    try:
        from demur.cli import main as command
    except BaseException:
        if not signals:  # a real import error
            raise
        sys.stderr.write("demur: stopped before anything was done\n")
        sys.exit(INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
