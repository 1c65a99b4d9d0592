"""Results of the sanity checks for the terminal, for JSON and for the report page."""

import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from demur.report.text import run_argument, terminal
from demur.runs import Record, Run
from demur.sanity import CheckResult, Flag

NOTHING = "Nothing was flagged"


class SkippedCheck(NamedTuple):
    """A check that lacks a record, and the command that makes that record."""

    kind: str
    missing: str
    command: str


class Sanity(NamedTuple):
    """The results of all sanity checks of a run."""

    flags: list[Flag]
    passed: list[str]
    skipped: list[SkippedCheck]

    @staticmethod
    def of(checks: Iterable[CheckResult], run: Run, records: Iterable[Record]) -> "Sanity":
        """Group check results into flags, passed checks and skipped checks."""
        first = next(iter(records))
        found = Sanity([], [], [])
        for check in checks:
            found.flags.extend(check.flags)
            if check.missing:
                found.skipped.append(
                    SkippedCheck(
                        check.kind, check.missing, _command(check.needed_attack, run, first)
                    )
                )
            elif not check.flags:
                found.passed.append(check.kind)
        return found

    @property
    def title(self) -> str:
        """The number of flags in words."""
        count = len(self.flags)
        return f"{count} flag{'s' if count > 1 else ''}" if count else NOTHING

    def to_json(self) -> dict[str, Any]:
        """Return flags and skipped checks as JSON values."""
        return {
            "sanity": [flag.to_json() for flag in self.flags],
            "unchecked": [skipped._asdict() for skipped in self.skipped],
        }


def show_sanity(found: Sanity) -> None:
    """Print the flags, then the passed and the skipped checks."""
    lines = [f"Sanity: {found.title}"]
    for flag in found.flags:
        lines += [f"! {flag.kind} ({', '.join(flag.attacks)})"]
        lines += [f"  observed: {flag.observed}", f"  remedy: {flag.remedy}"]
    if found.passed:
        lines += [f"checked and not found: {'; '.join(found.passed)}"]
    if found.skipped:
        lines += ["not checked, because records are missing:"]
    for skipped in found.skipped:
        command = f": {skipped.command}" if skipped.command else ""
        lines += [f"  {skipped.kind} (needs {skipped.missing}){command}"]
    console = terminal()
    console.print("\n".join(lines), soft_wrap=not console.is_terminal)


def _command(attack: str, run: Run, like: Record) -> str:
    """Return the command that attacks a split; an archive has no weights, so it names RUN."""
    if not attack:
        return ""
    split = [] if like.metadata["split"] == "test" else ["--split", str(like.metadata["split"])]
    name = run_argument(run) if run.has_weights else "RUN"
    return shlex.join(["demur", "attack", name, attack, *split])
