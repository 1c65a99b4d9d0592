"""Sanity flags in words, the same for the terminal, for a program and for the page."""

import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from demur.report.commands import run_argument
from demur.report.text import terminal
from demur.runs import Record, Run
from demur.sanity import CheckResult, Flag

NOTHING = "Nothing was flagged"


class SkippedCheck(NamedTuple):
    """A check that could not be made, and the command whose record would allow it."""

    kind: str
    lacks: str
    command: str


class Sanity(NamedTuple):
    """All that the checks say of a run."""

    flags: list[Flag]
    passed: list[str]
    lacking: list[SkippedCheck]

    @staticmethod
    def of(checks: Iterable[CheckResult], run: Run, records: Iterable[Record]) -> "Sanity":
        """What was flagged, what was looked for in vain, and what could not be looked for."""
        first = next(iter(records))
        found = Sanity([], [], [])
        for check in checks:
            found.flags.extend(check.flags)
            if check.lacks:
                found.lacking.append(
                    SkippedCheck(check.kind, check.lacks, _command(check.wants, run, first))
                )
            elif not check.flags:
                found.passed.append(check.kind)
        return found

    @property
    def title(self) -> str:
        """The whole in a few words."""
        count = len(self.flags)
        return f"{count} flag{'s' if count > 1 else ''}" if count else NOTHING

    def plain(self) -> dict[str, Any]:
        """As JSON values: flags, and what could not be looked for."""
        return {
            "sanity": [flag.plain() for flag in self.flags],
            "unchecked": [each._asdict() for each in self.lacking],
        }


def show_sanity(found: Sanity) -> None:
    """Print what was flagged and what was not."""
    lines = [f"Sanity: {found.title}"]
    for flag in found.flags:
        lines += [f"! {flag.kind} ({', '.join(flag.attacks)})"]
        lines += [f"  seen: {flag.seen}", f"  remedy: {flag.remedy}"]
    if found.passed:
        lines += [f"looked for and not found: {'; '.join(found.passed)}"]
    if found.lacking:
        lines += ["not looked for, for lack of records:"]
    for each in found.lacking:
        command = f": {each.command}" if each.command else ""
        lines += [f"  {each.kind} (needs {each.lacks}){command}"]
    console = terminal()
    console.print("\n".join(lines), soft_wrap=not console.is_terminal)


def _command(attack: str, run: Run, like: Record) -> str:
    """The command that attacks the images of a split; an archive is not what can be attacked."""
    if not attack:
        return ""
    split = [] if like.metadata["split"] == "test" else ["--split", str(like.metadata["split"])]
    name = run_argument(run) if run.finished else "RUN"
    return shlex.join(["demur", "attack", name, attack, *split])
