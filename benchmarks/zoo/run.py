"""Audit every defence of the zoo and write its page.

python benchmarks/zoo/run.py --out docs/zoo.md
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder benchmarks

from demur import PGD, Con, Digits, Linf, audit
from demur.attacks.attack_model import NoGradientError
from demur.audits import AuditReport
from demur.cli.app import main
from demur.errors import BadInput, suggestion
from demur.output import as_output, prediction
from zoo.defences import BROKEN, SOUND, Defence, no_defence
from zoo.nets import EPS

app = typer.Typer(name="zoo", add_completion=False, pretty_exceptions_enable=False)
UNDEFENDED = "no defence"
STORED = Path(__file__).with_name("zoo-digits-cpu.json")
PAGE = """# Audits of broken defences

For an auditor who asks whether `demur audit` can tell a robust model from one that only looks
robust. Each defence is written from its published description, reduced to its idea, and trained in
seconds on 8x8 digits. All but the last rows fell to stronger attacks in the literature.
`python benchmarks/zoo/run.py` makes this page.

*Claimed* is what a naive evaluation by PGD-20 on the cross-entropy reports: the share of {n} test
images that are correct under it or, with a detector, that are no accepted error. The blur is
claimed against an attacker who does not know it, label smoothing against one step. *Audited* is the
same share under `demur.audit` (Linf, eps = {eps}, version="{version}", "rand" for random models,
threshold at TPR 95%). A defence is caught if stronger attacks take 20 points away from the claim or
leave no more than without a defence, or if the audit raises a flag or a warning.

| defence | claimed, % | audited, % | caught by |
|---|---:|---:|---|
{rows}

The nets of PGD-AT must raise neither a flag nor a warning: three seeds, as classifiers and with
confidence as rejector.
"""


class Row(NamedTuple):
    """One line of the page."""

    name: str
    claimed: float
    audited: float
    caught_by: list[str]
    seconds: float

    def is_broken(self, undefended: float) -> bool:
        """Whether the audit takes 20 points off the claim, or leaves no more than no defence."""
        return self.audited <= max(undefended, self.claimed - 0.2)

    def is_caught(self, undefended: float) -> bool:
        """Whether the audit breaks or flags the defence."""
        return self.is_broken(undefended) or bool(self.caught_by)

    def markdown(self, undefended: float) -> str:
        """Return the row of the table."""
        by = [*(["stronger attacks"] if self.is_broken(undefended) else []), *self.caught_by]
        return (
            f"| {self.name} | {100 * self.claimed:.0f} | {100 * self.audited:.0f} "
            f"| {'; '.join(by) or 'nothing'} |"
        )


def audited(name: str, defence: Defence, n: int, version: str, rejector: Any = None) -> Row:
    """Return the claim of a naive evaluation, and the result of an audit."""
    torch.manual_seed(0)  # for defences that draw random numbers
    started, splits = perf_counter(), Digits().load()
    cal = splits["cal"].batch(slice(None))
    x, y = splits["test"].batch(slice(0, n))
    detector = defence.detector or rejector
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        version = defence.version or version
        report = audit(
            defence.model, x, y, rejector=detector, eps=EPS, cal=cal, version=version, name=name
        )
    result = report.accepted_errors or report.autoattack
    return Row(
        name, claim(defence, report, x, y), result.unbroken / n,
        caught_by(report), perf_counter() - started,
    )  # fmt: skip


def caught_by(report: AuditReport) -> list[str]:
    """Return the kinds of flags, and the first words of warnings."""
    kinds = dict.fromkeys(flag.kind for flag in report.flags)
    return [*kinds, *(f"warning: {text.split(';')[0].split(':')[0]}" for text in report.warnings)]


def claim(defence: Defence, report: AuditReport, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of images that are correct, or no accepted error, under plain PGD-20."""
    try:
        x_adv = PGD(Linf(EPS), steps=defence.steps)(defence.attacked or defence.model, x, y)
    except NoGradientError:  # an evaluation by gradients changes no image
        x_adv = x
    with torch.no_grad():
        out = as_output(defence.model(x_adv))
        wrong = prediction(out) != y
        if report.threshold is not None:
            score = defence.detector(x_adv) if defence.detector else Con()(out)
            wrong &= score >= report.threshold
    return 1 - float(wrong.float().mean())


def _entries() -> dict[str, tuple[Callable[[], Defence], Any, bool]]:
    """Return what makes each defence, its rejector, and whether it must be caught, by name."""
    entries: dict[str, tuple[Callable[[], Defence], Any, bool]] = {}
    entries |= {UNDEFENDED: (no_defence, None, True)}
    entries |= {name: (make, None, True) for name, make in BROKEN.items()}
    for name, make in SOUND.items():
        entries |= {name: (make, None, False), f"{name} with Con": (make, Con(), False)}
    return entries


def _stored() -> dict[str, Row]:
    if not STORED.exists():
        return {}
    return {row["name"]: Row(**row) for row in json.loads(STORED.read_text())}


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/zoo.md"),
    n: Annotated[int, typer.Option(help="Test images.")] = 200,
    version: Annotated[str, typer.Option(help="Of the audit.")] = "auto",
    only: Annotated[str, typer.Option(help="Audit these only, by commas; others are kept.")] = "",
) -> None:
    """Audit the zoo; the exit code is 1 if a defence is not caught or a sound net is."""
    entries, rows = _entries(), _stored()
    for name in only.split(",") if only else entries:
        if name not in entries:
            raise BadInput(f"the zoo has no {name!r}; {suggestion(name, entries)}")
        make, rejector, _ = entries[name]
        rows[name] = audited(name, make(), n, version, rejector)
        typer.echo(f"{rows[name].markdown(-1)} {rows[name].seconds:.0f} s")
        STORED.write_text(json.dumps([row._asdict() for row in rows.values()], indent=1) + "\n")
    known = [rows[name] for name in entries if name in rows]
    undefended = rows[UNDEFENDED].audited if UNDEFENDED in rows else 0.0
    table = "\n".join(row.markdown(undefended) for row in known)
    page = PAGE.format(n=n, eps=EPS, version=version, rows=table)
    out.write_text(page, encoding="utf-8")
    wrong = [
        row.name
        for row in known
        if (row.is_caught(undefended) if entries[row.name][2] else not row.caught_by) is False
    ]
    if wrong:
        typer.echo(f"not as expected: {', '.join(wrong)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
