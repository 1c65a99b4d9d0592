"""A process that runs commands whose k-th file operation fails.

It reads one request per line, {"words", "folder", "operation", "number"}, and forks a child for
each. It is forked from `tests.forked`, which has imported everything and computed nothing, since
torch's threads do not survive a fork.
"""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from demur.cli.commands import main
from demur.data import Digits, Splits

FEW = 120  # images of each split


class Faults:
    """Counts the operations on files under a folder and fails one, or all from it on."""

    def __init__(self, folder: Path, operation: int, number: int) -> None:
        self.folder, self.left, self.number, self.count = str(folder), operation, number, 0

    def check(self, path: object) -> None:
        """Count an operation; raise OSError if it is the one to fail. A full disk stays full."""
        if isinstance(path, int) or str(path).startswith(self.folder):
            self.count += 1
            self.left -= 1
            if self.left == -1 or (self.left < -1 and self.number == errno.ENOSPC):
                raise OSError(self.number, os.strerror(self.number))

    def install(self) -> None:
        """Patch the operations of this process."""
        for name in ("fsync", "replace", "rename", "mkdir"):
            setattr(os, name, self._counted(getattr(os, name)))
        opened, real = Path.open, os.open

        def open_path(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if "r" in mode and "+" not in mode:
                return opened(path, mode, *rest, **named)
            self.check(path.absolute())
            return _Counted(opened(path, mode, *rest, **named), path.absolute(), self)

        def open_handle(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self.check(Path(path).absolute())
            return real(path, flags, *rest, **named)

        Path.open = open_path  # type: ignore[method-assign, assignment]
        os.open = open_handle

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *rest: Any, **named: Any) -> Any:
            self.check(path if isinstance(path, int) else Path(path).absolute())
            return real(path, *rest, **named)

        return counted


class _Counted:
    """An open file whose writes are counted."""

    def __init__(self, file: IO[Any], path: Path, faults: Faults) -> None:
        self.file, self.path, self.faults = file, path, faults

    def write(self, content: Any) -> int:
        self.faults.check(self.path)
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def run_command(words: list[str], folder: Path, operation: int, number: int) -> None:
    """Run a command in the folder; never returns. Writes the count of operations to a file."""
    code, faults = 1, Faults(folder / "run", operation, number)
    try:
        os.chdir(folder)
        sys.stdout = (folder / "stdout").open("w", encoding="utf-8")
        sys.stderr = (folder / "stderr").open("w", encoding="utf-8")
        sys.argv = ["demur", *words]
        faults.install()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            sys.stderr.write(f"Traceback: {error!r}")
        sys.stderr.flush()
        (folder / "operations").write_text(str(faults.count))
    finally:
        os._exit(code)


def _few_digits(load: Callable[..., Splits]) -> Callable[..., Splits]:
    def few(self: Digits, folder: Path | None = None) -> Splits:
        splits = load(self, folder)
        return {name: images.first(min(FEW, len(images))) for name, images in splits.items()}

    return few


def serve() -> None:
    """Answer each request with the exit code of its command."""
    Digits.load = _few_digits(Digits.load)  # type: ignore[method-assign]
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run_command(
                request["words"], Path(request["folder"]), request["operation"], request["number"]
            )
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
