"""Audit the models of tests/audit_zoo.py and write docs/audit-zoo.md.

python benchmarks/audit_zoo.py --n 24 --peers
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests
sys.path.insert(0, str(Path(__file__).parent))  # for peer_adapters

from demur import AcceptedError, AutoAttack, ModelScore, RejectAutoAttack, audit
from demur.attacks.attack_model import Model, checked
from demur.attacks.balls import Linf
from demur.attacks.criteria import Criterion, Misclassified
from demur.attacks.wrappers import ModelWithScore
from demur.cli.app import main
from demur.errors import BadInput, suggestion
from demur.output import as_output
from demur.rejectors.rule import Rejector, Score
from peer_adapters import PeerSetup, foolbox_pgd, library, pyautoattack_standard, torchattacks_apgd
from tests.audit_zoo import ZOO, Entry

app = typer.Typer(name="audit_zoo", add_completion=False, pretty_exceptions_enable=False)
ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_name("audit-zoo-digits-cpu.json")
DRAWS = 20  # passes over which the answers of a random model are averaged
PEERS = ("pyautoattack", "torchattacks", "ART", "foolbox")
PAGE = """# Grades of the audit

For an auditor who asks what the three grades of `demur audit` are worth. The models are those of
`tests/audit_zoo.py`: small nets on 8x8 digits. {broken} of them are broken by a mechanism that
makes them look more robust than they are, {honest} are honest. The page is made by
`python benchmarks/audit_zoo.py --peers`.

Each model is audited once with `version="auto"` on {n} test images (Linf, eps = 0.1). *Known* are
the images that an attacker breaks who knows the mechanism: AutoAttack on the differentiable model
behind it, with the examples tested on the model itself. *Ours* are the images that the audit broke.
The peers are pyautoattack (standard), torchattacks (APGD), ART (HopSkipJump, 10 iterations) and
foolbox (PGD-40), each tested on the model in one pass (a random one: the mean of {draws}); "-" is
not measured, or a model that a library cannot attack. With a rejector only accepted errors count,
and the peers attack the classifier alone.

Broken models with the grade "no known sign of failure": **{comfort}**. Honest models with another
grade: **{alarms}**.

| model | known | ours | pyautoattack | torchattacks | ART | foolbox | grade | signs |
|---|---:|---:|---:|---:|---:|---:|---|---|
{rows}
"""


def criterion_of(entry: Entry, threshold: float | None) -> tuple[Model, Criterion]:
    """Return the model with its score, and what counts as a success."""
    if entry.rejector is None or threshold is None:
        return entry.model, Misclassified()
    if isinstance(entry.rejector, Rejector | Score):
        return entry.model, AcceptedError(entry.rejector, threshold)
    return ModelWithScore(entry.model, entry.rejector), AcceptedError(ModelScore(), threshold)


def broken(entry: Entry, threshold: float | None, x_adv: Tensor, y: Tensor) -> float:
    """Return the successes among adversarial examples; of a random model the mean over draws."""
    model, criterion = criterion_of(entry, threshold)
    with checked(model, x_adv, y) as (own, images, labels):
        first, second = (own(images).logits for _ in range(2))
        draws = 1 if torch.equal(first, second) else DRAWS
        found = [criterion(own(images), labels).sum() for _ in range(draws)]
    return float(torch.stack(found).double().mean())


def known(entry: Entry, threshold: float | None, x: Tensor, y: Tensor) -> float:
    """Return the successes of the attack on the model behind a broken one."""
    twin = entry.twin or entry.model
    if threshold is None or not isinstance(entry.rejector, Rejector | Score):
        attack: Any = AutoAttack(twin, eps=entry.eps, verbose=False)
    else:
        rule = AcceptedError(entry.rejector, threshold)
        attack = RejectAutoAttack(twin, rule, eps=entry.eps, verbose=False)
    return broken(entry, threshold, attack.run_standard_evaluation(x, y), y)


def by_art(setup: PeerSetup) -> Callable[[Tensor, Tensor, int], Tensor]:
    """HopSkipJump of ART, ten iterations."""
    library("art")
    from art.attacks.evasion import HopSkipJump
    from art.estimators.classification import PyTorchClassifier

    def craft(x: Tensor, y: Tensor, size: int) -> Tensor:
        net = PyTorchClassifier(
            setup.net, nn.CrossEntropyLoss(), tuple(x.shape[1:]), setup.classes,
            clip_values=(0.0, 1.0), device_type="cpu",
        )  # fmt: skip
        attack = HopSkipJump(net, batch_size=size, norm="inf", max_iter=10, verbose=False)
        x_adv = torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
        return setup.ball.project(x, x_adv)

    return craft


class Plain(nn.Module):
    """Any model as a module that returns logits, as the other libraries want it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; ART asks in float64."""
        return as_output(self.model(x.float())).logits


def peers(
    entry: Entry, threshold: float | None, x: Tensor, y: Tensor, names: tuple[str, ...]
) -> dict[str, float | None]:
    """Return the successes of other libraries; None where one cannot attack the model."""
    with checked(entry.model, x, y) as (own, images, _):
        classes = own(images).logits.shape[1]
    setup = PeerSetup(Plain(entry.model).eval(), Linf(entry.eps), entry.eps / 4, classes)
    adapters: dict[str, Any] = {
        "pyautoattack": pyautoattack_standard, "torchattacks": torchattacks_apgd("ce"),
        "ART": by_art, "foolbox": foolbox_pgd(40),
    }  # fmt: skip
    found: dict[str, float | None] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            x_adv = adapters[name](setup)(x.clone(), y, 64).detach()
            x_adv = setup.ball.project(x, torch.where(x_adv.isfinite(), x_adv, x))
            found[name] = broken(entry, threshold, x_adv, y)
        except Exception as error:  # of the library, on models that it was not made for
            sys.stderr.write(f"{name}: {type(error).__name__}: {str(error)[:100]}\n")
            found[name] = None
    return found


def row(name: str, n: int, with_peers: tuple[str, ...]) -> dict[str, Any]:
    """Return what is known and found about one model."""
    entry, started = ZOO[name](), perf_counter()
    x, y = entry.images(n)
    needs_cal = entry.rejector is not None and entry.threshold is None
    torch.manual_seed(0)
    values: dict[str, Any] = {"name": name, "honest": entry.honest, "n": n, "threshold": None}
    try:
        report = audit(
            entry.model, x, y, eps=entry.eps, rejector=entry.rejector, threshold=entry.threshold,
            cal=entry.images(100, "cal") if needs_cal else None, name=name,
        )  # fmt: skip
    except BadInput as error:
        values |= {"grade": "not audited", "signs": [str(error).split(";")[0]], "ours": None}
    else:
        result = report.accepted_errors or report.autoattack
        signs = [*dict.fromkeys(flag.kind for flag in report.flags)]
        values |= {
            "grade": str(report.grade), "signs": signs, "ours": n - result.unbroken,
            "threshold": report.threshold,
        }  # fmt: skip
    threshold = values["threshold"]
    try:
        values["known"] = known(entry, threshold, x, y)
    except BadInput:
        values["known"] = None
    values["seconds"] = perf_counter() - started
    return values | (peers(entry, threshold, x, y, with_peers) if with_peers else {})


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page of all rows."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    lines = [
        "| " + " | ".join([
            row["name"], *(number(row.get(key)) for key in ("known", "ours", *PEERS)),
            row["grade"], "; ".join(row["signs"]) or "none",
        ]) + " |"
        for row in sorted(rows, key=lambda row: (row["honest"], list(ZOO).index(row["name"])))
    ]  # fmt: skip
    wrong = [row for row in rows if (row["grade"] == "no known sign of failure") != row["honest"]]
    honest = sum(row["honest"] for row in rows)
    comfort = sum(not row["honest"] for row in wrong)
    return PAGE.format(
        broken=len(rows) - honest, honest=honest, n=rows[0]["n"], draws=DRAWS,
        rows="\n".join(lines),
        comfort=f"{comfort} of {len(rows) - honest}",
        alarms=f"{len(wrong) - comfort} of {honest}",
    )  # fmt: skip


@app.command()
def run(
    n: Annotated[int, typer.Option(help="Test images.")] = 24,
    only: Annotated[str, typer.Option(help="These models, separated by semicolons.")] = "",
    with_peers: Annotated[bool, typer.Option("--peers", help="Other libraries, too.")] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = ROOT / "docs" / "audit-zoo.md",
    store: Annotated[Path, typer.Option(help="Where the numbers are kept.")] = STORED,
) -> None:
    """Audit the zoo; the exit code is 1 if a broken model shows no sign."""
    warnings.simplefilter("ignore")
    rows = {one["name"]: one for one in json.loads(store.read_text())} if store.exists() else {}
    for name in only.split(";") if only else ZOO:
        if name not in ZOO:
            raise BadInput(f"the zoo has no {name!r}; {suggestion(name, ZOO)}")
        rows[name] = row(name, n, PEERS if with_peers else ())
        typer.echo(json.dumps(rows[name]))
        store.write_text(json.dumps(list(rows.values()), separators=(",", ":")) + "\n")
    out.write_text(page([rows[name] for name in ZOO if name in rows]), encoding="utf-8")
    if any(
        not one["honest"] and one["grade"] == "no known sign of failure" for one in rows.values()
    ):
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
