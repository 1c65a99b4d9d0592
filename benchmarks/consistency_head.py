"""Rejectors of one net under worst-score attacks on themselves: confidence, R-Con, consistency.

    python benchmarks/consistency_head.py --run cifar10-best --n 1000 -o consistency-h200.json

Two heads are trained on the frozen net's features of training images, clean and attacked through
the head of that moment: one predicts the consistency of the image, so that one forward pass gives
it, the other is R-Con with T-Con as target. Every rejector is then attacked by `WorstScore` on its
own score, and gets the examples found for confidence too; of each image the highest exact score of
a wrong prediction counts. Thresholds are those of the attacked images when clean.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import torch._functorch.config
import typer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from demur import Con, Consistency, Linf, RCon, WorstScore
from demur.cli.app import Device, main
from demur.methods.heads import DenseAux
from demur.metrics.rejection import WorstCase
from demur.numerics import device_by_name, tf32
from demur.output import Output, as_output, log_probabilities, mask_label, prediction
from demur.rejectors.image_scores import ImageRejector
from demur.rejectors.output_scores import Rectifier
from demur.rejectors.rule import Rejector, Score, as_score
from demur.runs import Run, provenance

app = typer.Typer(name="consistency_head", add_completion=False, pretty_exceptions_enable=False)
LEVELS = (0.95, 0.9, 0.8, 0.6)
EPS = 8 / 255
SMALL = Consistency(radius=1.4 / 255, step_size=0.001)
LARGE = Consistency(radius=4 / 255, step_size=1 / 255)
Net = Callable[[Tensor], Output]
torch._functorch.config.donated_buffer = False  # attacks call backward twice on one output


class WithHead(nn.Module):
    """The net with another head on its last feature."""

    def __init__(self, net: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, head

    def forward(self, x: Tensor) -> Output:
        out = as_output(self.net(x))
        return Output(out.logits, out.feature, self.head([out.feature]))


class LowPrecision(nn.Module):
    """The net in bf16 and channels-last on a GPU, compiled if asked for; outputs in fp32."""

    def __init__(self, net: nn.Module, compiled: bool = True) -> None:
        super().__init__()
        self.on_gpu = next(net.parameters()).device.type == "cuda"
        self.net = torch.compile(net) if compiled and self.on_gpu else net

    def forward(self, x: Tensor) -> Output:
        if not self.on_gpu:
            return as_output(self.net(x))
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            out = self.net(x.to(memory_format=torch.channels_last))
        return Output(*(part.float() for part in out))


def exact_scores(
    rejector: Rejector | Score, net: Net, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scores in fp32, N, and whether the prediction is wrong, N."""
    scores, wrong = [], []
    for rows in torch.arange(len(x), device=x.device).split(500):
        out = as_output(net(x[rows]))
        if isinstance(rejector, ImageRejector):
            with torch.enable_grad():
                score = rejector.score(net, x[rows], out).detach()
        else:
            score = as_score(rejector)(out).detach()
        scores.append(score)
        wrong.append(prediction(out) != y[rows])
    return torch.cat(scores), torch.cat(wrong)


def attacked_through_head(net: Net, x: Tensor, y: Tensor, steps: int) -> Tensor:
    """Return images moved towards one of the three likeliest wrong classes with a high A."""
    with torch.no_grad():
        likeliest = mask_label(net(x).logits, y).topk(3, 1).indices
    choice = torch.randint(3, (len(x), 1), device=x.device)
    target = likeliest.gather(1, choice)
    x_adv = (x + torch.empty_like(x).uniform_(-EPS, EPS)).clamp(0, 1)
    for _ in range(steps):
        at = x_adv.detach().requires_grad_()
        out = net(at)
        value = log_probabilities(out).gather(1, target).sum()
        value = value + nn.functional.logsigmoid(out.aux[:, 0]).sum()
        (grad,) = torch.autograd.grad(value, at)
        moved = x_adv + 2 / 255 * grad.sign()
        x_adv = torch.minimum(torch.maximum(moved, x - EPS), x + EPS).clamp(0, 1)
    return x_adv.detach()


def trained_head(
    net: nn.Module, x: Tensor, y: Tensor, target: str, epochs: int, batch: int, compiled: bool
) -> WithHead:
    """Train a head of the frozen net on clean images and on images attacked through the head."""
    torch.manual_seed(0)
    with torch.no_grad():
        width = as_output(net(x[:2])).feature.shape[1]
    head = DenseAux(width).to(x.device)
    both = WithHead(net, head)
    fast = LowPrecision(both, compiled)
    adam = torch.optim.Adam(head.parameters(), 1e-3)
    total = epochs * (len(x) // batch)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, total_steps=total)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), device=x.device).split(batch)[: len(x) // batch]:
            clean = x[rows]
            clean = clean.flip(-1) if torch.rand(()) < 0.5 else clean
            head.eval()
            shown = torch.cat((clean, attacked_through_head(fast, clean, y[rows], 10)))
            labels = y[rows].repeat(2)
            parts = [fast(part).detached() for part in shown.split(batch)]
            out = Output(*(torch.cat(part) for part in zip(*parts, strict=True)))
            if target == "consistency":
                likely = [
                    LARGE.score(fast, image, part).detach().sigmoid()
                    for image, part in zip(shown.split(batch), parts, strict=True)
                ]
            head.train()
            logit = head([out.feature])[:, 0]
            if target == "consistency":
                loss = binary_cross_entropy_with_logits(logit, torch.cat(likely))
            else:
                probability = out.logits.softmax(1)
                con = probability.amax(1)
                tcon = probability.gather(1, labels[:, None])[:, 0]
                loss = binary_cross_entropy((con * logit.sigmoid()).clamp(1e-6, 1 - 1e-6), tcon)
            adam.zero_grad()
            loss.backward()
            adam.step()
            rate.step()
        sys.stdout.write(f"head for {target}: loss {loss.item():.4f}\n")
        sys.stdout.flush()
    return both.eval().requires_grad_(False)


class Study:
    """Attacks on the rejectors of one net, and the highest exact scores that they find."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, compiled: bool) -> None:
        self.net, self.x, self.y, self.compiled = net, x, y, compiled
        self.con_examples: Tensor | None = None
        self.rows: dict[str, dict[str, Any]] = {}
        self.scores: dict[str, np.ndarray[Any, Any]] = {}

    def measure(
        self,
        name: str,
        rejector: Rejector | Score,
        attacks: dict[str, WorstScore],
        net: nn.Module | None = None,
        unrolled: int = 0,
    ) -> None:
        """Attack one rejector and add its row; `unrolled` images also get the unrolled attack."""
        net, begin = net or self.net, perf_counter()
        clean, wrong_clean = exact_scores(rejector, net, self.x, self.y)
        worst = clean.masked_fill(~wrong_clean, -torch.inf)
        fast, found = LowPrecision(net, self.compiled), {}
        examples = {}
        if self.con_examples is not None:
            examples["examples for confidence"] = self.con_examples
        for title, attack in attacks.items():
            examples[title] = attack(fast, self.x, self.y)
            if name == "confidence":
                self.con_examples = examples[title]
        threshold = torch.quantile(clean[~wrong_clean], 0.05)
        for title, x_adv in examples.items():
            score, wrong = exact_scores(rejector, net, x_adv, self.y)
            score = score.masked_fill(~wrong, -torch.inf)
            found[title] = int((score >= threshold).sum())
            worst = torch.maximum(worst, score)
        row: dict[str, Any] = {"accepted errors at TPR-95 by attack": found}
        if unrolled:
            row["unrolled"] = self._unrolled(rejector, net, unrolled, worst, threshold)
        seconds = perf_counter() - begin
        self._add(name, clean, wrong_clean, worst, row | {"seconds": round(seconds, 1)})

    def _unrolled(
        self, rejector: Any, net: nn.Module, n: int, worst: Tensor, threshold: Tensor
    ) -> dict[str, int]:
        """Attack the first n images through the steps of the rejector; raises `worst` there."""
        through = Consistency(rejector.radius, rejector.steps, rejector.step_size, "unrolled")
        attack = WorstScore(Linf(EPS), through, steps=20, targets=3)
        eager = LowPrecision(net, compiled=False)
        x_adv = attack(eager, self.x[:n], self.y[:n])
        score, wrong = exact_scores(rejector, net, x_adv, self.y[:n])
        score = score.masked_fill(~wrong, -torch.inf)
        before = int((worst[:n] >= threshold).sum())
        worst[:n] = torch.maximum(worst[:n], score)
        return {
            "images": n,
            "alone": int((score >= threshold).sum()),
            "others": before,
            "together": int((worst[:n] >= threshold).sum()),
        }

    def _add(
        self, name: str, clean: Tensor, wrong: Tensor, worst: Tensor, row: dict[str, Any]
    ) -> None:
        case = WorstCase.of(clean.cpu().numpy(), worst.cpu().numpy())
        self.scores[f"{name}, clean"], self.scores[f"{name}, worst"] = case.clean, case.worst
        row["accuracy"] = float((~wrong).double().mean())
        for level in LEVELS:
            at = float(torch.quantile(clean[~wrong].double(), 1 - level))
            row[f"accepted errors at TPR-{100 * level:g}"] = case.count(at)
        lo, hi = case.augrc_interval()
        row["worst-case AUGRC"] = [case.augrc, lo, hi]
        base = WorstCase.of(self.scores["confidence, clean"], self.scores["confidence, worst"])
        gap = case.augrc_difference(base)
        row["AUGRC minus confidence"] = [gap.value, gap.lo, gap.hi]
        self.rows[name] = row
        sys.stdout.write(f"{name}: {json.dumps(row)}\n")
        sys.stdout.flush()


@app.command()
def consistency_head(
    out: Annotated[Path, typer.Option("-o", help="JSON report; scores go beside it as .npz.")],
    run: Annotated[str, typer.Option(help="Run or net of the zoo.")] = "cifar10-best",
    n: Annotated[int, typer.Option(help="Test images.")] = 1000,
    unrolled: Annotated[int, typer.Option(help="Images for the unrolled attack.")] = 200,
    fit: Annotated[int, typer.Option(help="Training images for the heads.")] = 50_000,
    epochs: Annotated[int, typer.Option(help="Epochs of the heads.")] = 4,
    batch: Annotated[int, typer.Option(help="Batch size of the heads' training.")] = 1000,
    steps: Annotated[int, typer.Option(help="Steps of attacks on scores of the output.")] = 100,
    image_steps: Annotated[int, typer.Option(help="Steps of attacks through queries.")] = 50,
    compiled: Annotated[bool, typer.Option(help="Compile the net on a GPU.")] = True,
    data: Annotated[str | None, typer.Option(help="Folder of the data set.")] = None,
    device: Device = "auto",
) -> None:
    """Measure every rejector and write the report."""
    opened, on = Run.open(run), device_by_name(device)
    net = opened.net(on)
    splits = opened.recipe.data.load(None if data is None else Path(data))
    x, y = (part.to(on) for part in splits["test"].batch(slice(0, n)))
    ball = Linf(EPS)

    def attack(rejector: Rejector | Score, steps: int = steps) -> dict[str, WorstScore]:
        return {"its own score": WorstScore(ball, rejector, steps=steps)}

    with tf32("fp32"):
        study = Study(net, x, y, compiled)
        study.measure("confidence", Con(), attack(Con()))
        study.measure("R-Con", RCon(), attack(RCon()))
        for name, one in (("consistency 1.4/255", SMALL), ("consistency 4/255", LARGE)):
            study.measure(name, one, attack(one, image_steps), unrolled=unrolled)
        x_fit, y_fit = (part.to(on) for part in splits["fit"].batch(slice(0, fit)))
        for target in ("consistency", "T-Con"):
            begin = perf_counter()
            both = trained_head(net, x_fit, y_fit, target, epochs, batch, compiled)
            sys.stdout.write(f"trained in {perf_counter() - begin:.0f} s\n")
            if target == "consistency":
                study.measure("head for consistency, A", Rectifier(), attack(Rectifier()), both)
            study.measure(f"head for {target}, R-Con", RCon(), attack(RCon()), both)
    report = {
        "run": run, "weights": opened.checkpoint["weights"], "n": n, "eps": "8/255",
        "epochs of the heads": epochs, "training images": len(y_fit), "steps": steps,
        "steps through queries": image_steps, "rejectors": study.rows,
    } | provenance(on)  # fmt: skip
    out.write_text(json.dumps(report, indent=1) + "\n")
    arrays: dict[str, Any] = dict(study.scores)
    np.savez_compressed(out.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
    main(app)
