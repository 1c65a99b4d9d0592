"""Audit the models of tests/audit_zoo.py beside other libraries, and write docs/audit-zoo.md.

    python benchmarks/audit_zoo.py --seed 1 --n 24 --minutes 8     # the same command goes on
    python benchmarks/audit_zoo.py --seed 1 --n 24 --minutes 8 --processes 12

Every row is kept as it is made, in two parts: the audit, and what other libraries find. The seed
chooses weights, images and random numbers; seed 0 has the nets on which checks were chosen.
"""

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests
sys.path.insert(0, str(Path(__file__).parent))  # for peer_adapters

from demur import AcceptedError, AutoAttack, ModelScore, RejectAutoAttack, audit
from demur.attacks.attack import Criterion, Misclassified
from demur.attacks.attack_model import Model, checked
from demur.attacks.balls import Linf
from demur.attacks.wrappers import ModelWithScore
from demur.calibrate import TPR
from demur.cli.app import main
from demur.errors import BadInput, suggestion
from demur.evaluate.probing import is_random
from demur.output import as_output, prediction
from demur.rejectors.rule import Rejector, Score, as_score
from demur.version import code_version
from peer_adapters import (
    PeerSetup,
    foolbox_pgd,
    in_batches,
    library,
    pyautoattack_standard,
    torchattacks_apgd,
)
from tests import audit_zoo
from tests.audit_zoo import HONEST, Entry
from tests.audit_zoo_odd import ALL, ODD_HONEST

app = typer.Typer(name="audit_zoo", add_completion=False, pretty_exceptions_enable=False)
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]
STORED = Path(__file__).with_name("audit-zoo-digits-cpu.jsonl")
DRAWS = 100  # passes over which the answers of a random model are averaged
PEERS = ("pyautoattack", "torchattacks", "ART", "foolbox")
PARTS = ("audit", "peers")
NO_SIGN, NOT_AUDITED, FAILED = "no known sign of failure", "not audited", "not finished"
CPU = platform.machine()
PAGE = """# Grades of the audit

For an auditor who asks what the three grades of `demur audit` are worth. The models are those of
`tests/audit_zoo.py`: small nets on 8x8 digits. {broken} of them are broken by a mechanism that
makes them look more robust than they are, {honest} are honest; {refused} more are broken so that
the audit rejects them with one sentence and gives no grade.

- Broken models with the grade "no known sign of failure": **{comfort}**.
- Honest models with another grade: **{alarms}**.
- Audits that did not end: **{failed}**.
- Other libraries that break more than one image more than the audit: **{above}**
  ({pairs} pairs of a library and a model, {measured} models).

Each model is audited once with `version="auto"` on {n} test images (Linf, eps = 0.1). *Known* are
the images that an attacker breaks who knows the mechanism: AutoAttack on the differentiable model
behind it, with the examples tested on the model itself. *Ours* are the images that the audit broke.
The peers are pyautoattack (standard), torchattacks (APGD), ART (HopSkipJump, 10 iterations) and
foolbox (PGD-40), each tested on the model in one pass. On random models pyautoattack runs its
version "rand" and torchattacks EOT-PGD (40 x 20), and every figure is the mean of {draws} fresh
passes. "-" is not measured, or a model that a library cannot attack. With a rejector only accepted
errors count, and the peers attack the classifier alone.

The page is made by `python benchmarks/audit_zoo.py --seed {seed} --n {n}`, code {commits};
rows are kept as they are made and may be older than some checks. The seed chooses the weights of
all nets, the images and the random numbers of attacks. Checks and tolerances were chosen on nets
and images of seed 0, so another seed is the fair test. {machines}; pyautoattack 0.2.0, torchattacks
3.5.1, ART 1.20.1, foolbox 3.3.4.

| model | known | ours | pyautoattack | torchattacks | ART | foolbox | grade | signs |
|---|---:|---:|---:|---:|---:|---:|---|---|
{rows}

## Models that changed checks

`tests/audit_zoo_odd.py` has models that were written after the checks. Four of them changed one,
so they are no fair test of it; others of the same kind were written before the change.

- *Gradient of another seed*, broken, raised nothing (the attack found as much as one with the true
  gradient). Now steps in random directions must change the margin as the gradient says.
- *Logits times 100*, honest, raised "gradients are zero". Now a flat cross-entropy is no sign where
  attacks follow the logits, and these have a gradient.
- *Mixture at temperature 0.01*, honest, raised "the decision jumps". Now a jump must outlast a
  search on a millionth of the line.
- *Noise from its own generator*, honest, raised "answers depend on more than the image". Now the
  draws of generators that modules hold are repeated.

*Random threshold* was listed as broken when it was first audited (seed 23) and shows no sign. An
attacker who knows the mechanism finds no more there than the audit, so nothing is hidden, and it is
now listed as honest noise; its row is of the second audit. *3x32x32 convolution* is an honest
model whose training failed with seed 23: it predicts at chance, and its gradient is zero.

"Logits times 10000" was listed as broken (as "saturated") before the second change. Its mechanism
is that of "logits times 100"; "saturated tanh", whose logits are flat, too, has its place.
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
    """Return the successes of the attack on the model behind a broken one.

    Square is left out, since that model has true gradients.
    """
    twin = entry.twin or entry.model
    if threshold is None or not isinstance(entry.rejector, Rejector | Score):
        members = ("apgd-ce", "apgd-t", "fab-t")
        attack: Any = AutoAttack(
            twin, eps=entry.eps, verbose=False, attacks_to_run=members, version="custom"
        )
    else:
        rule = AcceptedError(entry.rejector, threshold)
        attack = RejectAutoAttack(twin, rule, eps=entry.eps, verbose=False, version="fast")
    return broken(entry, threshold, attack.run_standard_evaluation(x, y), y)


def threshold_of(entry: Entry) -> float | None:
    """Return the threshold of the rejector, which accepts 95% of the correct predictions."""
    if entry.rejector is None or entry.threshold is not None:
        return entry.threshold
    x, y = entry.images(100, "cal")
    with checked(entry.model, x, y) as (own, images, labels):
        out = own(images)
        scores, right = as_score(entry.rejector)(out).double(), prediction(out) == labels
    return float(TPR(0.95).threshold(scores.numpy(), right.numpy()))


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


def eot_pgd(setup: PeerSetup) -> Callable[[Tensor, Tensor, int], Tensor]:
    """EOT-PGD of torchattacks, 20 draws a step."""
    eps = setup.ball.eps
    attack = library("torchattacks").EOTPGD
    return in_batches(attack(setup.net, eps=eps, alpha=eps / 4, steps=40, eot_iter=20))


def pyautoattack_rand(setup: PeerSetup) -> Callable[[Tensor, Tensor, int], Tensor]:
    """AutoAttack in its version for randomised models."""
    return pyautoattack_standard(setup, version="rand")


class Plain(nn.Module):
    """Any model as a module that returns logits, as the other libraries want it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        weights = model.parameters() if isinstance(model, nn.Module) else ()
        self.dtype = next((weight.dtype for weight in weights), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; ART asks in float64."""
        return as_output(self.model(x.to(self.dtype))).logits.float()


def peers(entry: Entry, threshold: float | None, x: Tensor, y: Tensor) -> dict[str, float | None]:
    """Return the successes of other libraries; None where one cannot attack the model."""
    with checked(entry.model, x, y) as (own, images, _):
        classes, random = own(images).logits.shape[1], is_random(own, images)
    setup = PeerSetup(Plain(entry.model).eval(), Linf(entry.eps), entry.eps / 4, classes)
    adapters: dict[str, Any] = {
        "pyautoattack": pyautoattack_rand if random else pyautoattack_standard,
        "torchattacks": eot_pgd if random else torchattacks_apgd("ce"),
        "ART": by_art, "foolbox": foolbox_pgd(40),
    }  # fmt: skip
    found: dict[str, float | None] = {}
    for name in PEERS:
        torch.manual_seed(0)
        try:
            x_adv = adapters[name](setup)(x.clone(), y, 64).detach()
            x_adv = setup.ball.project(x, torch.where(x_adv.isfinite(), x_adv, x))
            found[name] = broken(entry, threshold, x_adv, y)
        except Exception as error:  # of the library, on models that it was not made for
            sys.stderr.write(f"{name}: {type(error).__name__}: {str(error)[:100]}\n")
            found[name] = None
    return found


def audited(entry: Entry, threshold: float | None, x: Tensor, y: Tensor, seed: int) -> Row:
    """Return the grade, the signs and the images broken; of a random model the mean of passes."""
    torch.manual_seed(seed)
    try:
        report = audit(
            entry.model, x, y, eps=entry.eps, rejector=entry.rejector, threshold=threshold,
            cal=entry.images(100, "cal") if isinstance(entry.rejector, Rejector) else None,
            seed=seed,
        )  # fmt: skip
    except BadInput as error:
        return {"grade": NOT_AUDITED, "signs": [str(error).split(";")[0]], "ours": None}
    result = report.accepted_errors or report.autoattack
    signs = [*dict.fromkeys(flag.kind for flag in report.flags)]
    fresh = broken(entry, threshold, result.x_adv, y)
    counted = float(len(y) - result.unbroken)
    found = fresh if result.passes > 1 else counted
    return {
        "grade": str(report.grade), "signs": signs, "warnings": report.warnings,
        "ours": found, "fresh pass": fresh, "counted": counted,
    }  # fmt: skip


def part_of(name: str, part: str, n: int, seed: int) -> Row:
    """Return one part of the row of a model."""
    entry, started = ALL[name](), perf_counter()
    (x, y), threshold = entry.images(n), threshold_of(entry)
    torch.manual_seed(seed)
    if part == "audit":
        values = audited(entry, threshold, x, y, seed)
    else:
        try:
            values = dict(peers(entry, threshold, x, y))
            if not entry.honest:
                values["known"] = known(entry, threshold, x, y)
        except BadInput:
            values = dict.fromkeys(("known", *PEERS))
    values["seconds"] = round(perf_counter() - started, 1)
    return header(name, part, n, seed) | {"honest": entry.honest} | values


def header(name: str, part: str, n: int, seed: int) -> Row:
    """Return what a row is about and what made it."""
    made_by = {"commit": code_version(), "machine": f"torch {torch.__version__}, {CPU}"}
    return {"name": name, "part": part, "n": n, "seed": seed} | made_by


def in_process(name: str, part: str, n: int, seed: int, seconds: float) -> Row | None:
    """Return a row that another process makes, of one thread; None if it takes more seconds."""
    with TemporaryDirectory() as folder:
        store = Path(folder) / "row.jsonl"
        command = [
            sys.executable, __file__, "--only", name, "--part", part, "--n", str(n),
            "--seed", str(seed), "--store", str(store), "--out", str(store.with_suffix(".md")),
        ]  # fmt: skip
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            ended = subprocess.run(
                command, env=os.environ | threads, timeout=seconds, check=False,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
        if store.exists():
            sys.stderr.write(ended.stderr)
            return stored(store, n, seed)[name, part]
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return not_made(name, part, n, seed, f"an error: {reason[:200]}")


def not_made(name: str, part: str, n: int, seed: int, reason: str) -> Row:
    """Return the row of an audit or of peers that did not end."""
    honest = {"honest": name in (HONEST | ODD_HONEST)}
    values: Row = {"grade": FAILED, "signs": [reason], "ours": None} if part == "audit" else {}
    return header(name, part, n, seed) | honest | values


def stored(store: Path, n: int, seed: int) -> dict[tuple[str, str], Row]:
    """Return the rows of a file by model and part; later ones count."""
    lines = store.read_text(encoding="utf-8").splitlines() if store.exists() else []
    rows = [row for row in map(json.loads, lines) if (row["n"], row["seed"]) == (n, seed)]
    return {(row["name"], row["part"]): row for row in rows}


def page(rows: list[Row]) -> str:
    """Return the page of all models."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    lines = [
        "| " + " | ".join([
            row["name"], *(number(row.get(key)) for key in ("known", "ours", *PEERS)),
            row["grade"], "; ".join([*row["signs"], *row.get("warnings", ())]) or "none",
        ]) + " |"
        for row in rows
    ]  # fmt: skip
    graded = [row for row in rows if row["grade"] not in (NOT_AUDITED, FAILED)]
    refused = sum(row["grade"] == NOT_AUDITED for row in rows)
    wrong = [row for row in graded if (row["grade"] == NO_SIGN) != row["honest"]]
    honest = sum(row["honest"] for row in graded)
    comfort = sum(not row["honest"] for row in wrong)
    gaps = [
        (row[peer] - row["ours"], f"{peer} on {row['name']}")
        for row in graded for peer in PEERS if row.get(peer) is not None
    ]  # fmt: skip
    above = ", ".join(f"{name} (+{gap:.3g})" for gap, name in sorted(gaps)[::-1] if gap > 1)
    return PAGE.format(
        n=rows[0]["n"], seed=rows[0]["seed"], draws=DRAWS, rows="\n".join(lines),
        broken=len(graded) - honest, honest=honest, refused=refused,
        failed=len(rows) - len(graded) - refused,
        comfort=f"{comfort} of {len(graded) - honest}",
        alarms=f"{len(wrong) - comfort} of {honest}",
        measured=len({name.split(" on ", 1)[1] for _, name in gaps}), pairs=len(gaps),
        above=above or "none", commits=", ".join(sorted({row["commit"] for row in rows})),
        machines=" and ".join(sorted({row.get("machine", "torch 2.13, ARM") for row in rows})),
    )  # fmt: skip


Task = tuple[str, str]  # the name of a model, and the part of its row


def in_order(tasks: list[Task], store: Path) -> list[Task]:
    """Return audits before peers, and the slowest first by the seconds of rows of any seed."""
    lines = store.read_text(encoding="utf-8").splitlines() if store.exists() else []
    seconds = {(row["name"], row["part"]): row.get("seconds", 0) for row in map(json.loads, lines)}
    return sorted(tasks, key=lambda task: (PARTS.index(task[1]), -seconds.get(task, 0)))


def make_rows(
    tasks: list[Task], store: Path, n: int, seed: int, minutes: float, processes: int, limit: float
) -> None:
    """Make rows one by one, or in processes, and store each as it is made."""
    end, writing = perf_counter() + 60 * minutes, Lock()

    def make(task: Task) -> None:
        left = end - perf_counter()
        if left <= 0:
            return
        row = in_process(*task, n, seed, min(limit, left)) if processes else part_of(*task, n, seed)
        if row is None and left <= limit:
            return  # the next run begins it again
        row = row or not_made(*task, n, seed, f"not finished after {limit:g} s")
        line = json.dumps(row, separators=(",", ":"))
        with writing, store.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            typer.echo(line)

    with ThreadPoolExecutor(max(1, processes)) as pool:
        list(pool.map(make, tasks))  # raises what a task raises


@app.command()
def run(
    n: Annotated[int, typer.Option(help="Test images.")] = 24,
    seed: Annotated[int, typer.Option(help="Of weights, images and attacks.")] = 0,
    only: Annotated[str, typer.Option(help="These models, separated by semicolons.")] = "",
    part: Annotated[str, typer.Option(help="audit or peers; both without it.")] = "",
    minutes: Annotated[float, typer.Option(help="No row begins after them.")] = float("inf"),
    processes: Annotated[int, typer.Option(help="Rows made at once, each by one process.")] = 0,
    limit: Annotated[float, typer.Option(help="Most seconds of a process.")] = 600.0,
    again: Annotated[bool, typer.Option("--again", help="Also rows that are stored.")] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = ROOT / "docs" / "audit-zoo.md",
    store: Annotated[Path, typer.Option(help="Where the rows are kept.")] = STORED,
) -> None:
    """Audit the zoo; the exit code is 1 if a broken model shows no sign."""
    warnings.simplefilter("ignore")
    names = only.split(";") if only else list(ALL)
    if unknown := next((name for name in names if name not in ALL), None):
        raise BadInput(f"the zoo has no {unknown!r}; {suggestion(unknown, ALL)}")
    audit_zoo.use_seed(seed)
    done = {} if again else stored(store, n, seed)
    tasks = [(name, one) for one in PARTS if part in ("", one) for name in names]
    missing = [task for task in tasks if task not in done]
    make_rows(in_order(missing, store), store, n, seed, minutes, processes, limit)
    done = stored(store, n, seed)
    rows = [
        done.get((name, "peers"), {}) | done[name, "audit"]
        for name in ALL
        if (name, "audit") in done
    ]
    if rows:
        out.write_text(page(rows), encoding="utf-8")
    if any(not row["honest"] and row["grade"] == NO_SIGN for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    main(app)
