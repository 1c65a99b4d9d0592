"""python -m demur, and where the command begins.

Ctrl-C is taken before anything large is imported, so that it is a sentence from the start.
"""

import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Import the command and run it."""
    stops: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        stops.append(number)
        sys.exit(INTERRUPTED)

    signal.signal(signal.SIGINT, interrupt)
    try:
        from demur.cli import main as command
    except BaseException:
        if not stops:
            raise
        sys.stderr.write("demur: stopped before anything was done\n")
        sys.exit(INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
