"""AutoAttack on models of somebody else's code: demur beside pyautoattack, with their verdicts.

    python benchmarks/foreign_models.py --images test.npz --only preact --weights rr.safetensors
    python benchmarks/foreign_models.py --tiny                  # a minute on a CPU, random images

The models are those of `foreign_nets.py`. --images holds uint8
pixels `x` (N, 3, 32, 32) and labels `y`. A model without --weights is trained first for --epochs
epochs on --train against FGSM. The report is written after each measurement, and
the same call continues it. With --nets the trained weights are kept in a folder. `foreign_gpu.sh`
has the calls for a GPU.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demur import AcceptedError, AutoAttack, Con, RejectAutoAttack
from demur.attacks.attack_model import checked
from demur.attacks.objectives.classification import CE
from demur.engine import FrozenModule, accelerated, graphs
from demur.output import as_output
from demur.rejectors.certainty import con
from demur.version import code_version
from foreign_nets import build, fit, load_demur_weights

EPS = 8 / 255
TINY = {"count": 24, "batch": 12, "queries": 60, "steps": 6}


def read_images(file: Path, count: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return pixels in [0, 1] and labels."""
    stored = np.load(file)
    x, y = torch.from_numpy(stored["x"][:count]), torch.from_numpy(stored["y"][:count])
    return (x.float() / 255).to(device), y.long().to(device)


class Bench:
    """Measurements of one model, with a report in JSON."""

    def __init__(
        self, options: argparse.Namespace, name: str, model: nn.Module, x: Tensor, y: Tensor
    ) -> None:
        self.options, self.model, self.x, self.y = options, model, x, y
        self.cost = len(x) / 1000  # expected seconds are those of 1,000 images
        self.rows: dict[str, Any] = stored(options.output).get(name, {})
        self.verdicts: dict[str, Tensor] = {
            key: unpacked(row["verdicts"], len(x)).to(x.device)
            for key, row in self.rows.items()
            if isinstance(row, dict) and "verdicts" in row
        }

    def measure(self, name: str, seconds: float, work: Callable[[], Tensor | None]) -> None:
        """Run one measurement unless less than its expected seconds are left."""
        left = self.options.until - time.perf_counter()
        if name in self.rows:
            return
        if left < seconds * self.cost * (not self.options.tiny):
            say(f"{name}: skipped, {left:.0f} s left")
            return
        captures: list[float] = []
        synchronise(self.x)
        with timed_captures(captures):
            start = time.perf_counter()
            x_adv = work()
            synchronise(self.x)
            spent = time.perf_counter() - start
        row: dict[str, Any] = {"seconds": round(spent, 2)}
        if captures:
            row |= {"start_up": round(sum(captures), 2), "captures": len(captures)}
            row["without_start_up"] = round(spent - sum(captures), 2)
        if x_adv is not None:
            self.verdicts[name] = self.correct(x_adv)
            row["correct"] = round(self.verdicts[name].float().mean().item(), 4)
            inside = (x_adv - self.x).abs().amax().item() <= EPS + 1e-6
            row |= {"inside": inside, "verdicts": packed(self.verdicts[name])}
        self.rows[name] = row
        say(f"{name}: {row}")

    @torch.no_grad()
    def correct(self, x: Tensor) -> Tensor:
        parts = zip(x.split(250), self.y.split(250), strict=True)
        return torch.cat([self.model(part).argmax(1) == label for part, label in parts])

    def ours(self, benchmark: bool, engine: str = "auto") -> Tensor:
        with cudnn_benchmark(benchmark):
            ensemble = AutoAttack(self.model, eps=EPS, engine=engine)
            if self.options.tiny:
                ensemble.chain = shortened(ensemble.chain)
            found = ensemble.run_standard_evaluation(self.x, self.y, bs=self.options.batch)
        assert isinstance(found, Tensor)
        return found

    def pyautoattack(self, benchmark: bool) -> Tensor:
        from pyautoattack import AutoAttack as Theirs  # type: ignore[import-untyped]

        with cudnn_benchmark(benchmark):
            ensemble = Theirs(
                self.model, norm="Linf", eps=EPS, seed=0, version="standard", device=self.x.device
            )
            if self.options.tiny:
                ensemble.apgd.n_iter = ensemble.apgd_targeted.n_iter = TINY["steps"]
                ensemble.fab.n_iter, ensemble.square.n_queries = TINY["steps"], TINY["queries"]
            found: Tensor = ensemble.run_standard_evaluation(
                self.x, self.y, batch_size=self.options.batch
            )[0]
        return found

    def rejecting(self, version: str, engine: str = "auto") -> None:
        """Measure the accepted errors of RejectAutoAttack at a threshold of 95% TPR."""
        with torch.no_grad():
            score = torch.cat([con(as_output(self.model(part))) for part in self.x.split(250)])
        threshold = float(score[self.correct(self.x)].quantile(0.05))
        criterion = AcceptedError(Con(), threshold)
        ensemble = RejectAutoAttack(self.model, criterion, eps=EPS, version=version, engine=engine)
        if self.options.tiny:
            ensemble.chain = shortened(ensemble.chain)
        found = ensemble.run_standard_evaluation(self.x, self.y, bs=self.options.batch)
        assert isinstance(found, Tensor)
        with torch.no_grad():
            out = torch.cat([self.model(part) for part in found.split(250)])
        accepted_errors = (out.argmax(1) != self.y) & (con(as_output(out)) >= threshold)
        self.rows[f"accepted errors, {version}, {engine}"] = accepted_errors.float().mean().item()

    def queries(self) -> None:
        """Measure milliseconds of a gradient query and of a forward pass, by batch size."""
        sizes = [size for size in (64, 128, 250, 500, 1000) if size <= len(self.x)] or [len(self.x)]
        for engine in ("plain", "auto"):
            with (
                checked(self.model, self.x, self.y) as (model, x, y),
                accelerated(model, x, y, len(x), engine, say) as fast,
            ):
                for size in sizes:
                    part, label = x[:size], y[:size]
                    row = {
                        kind: self.milliseconds(partial(call, CE(), part, label))
                        for kind, call in (("gradient", fast.gradient), ("forward", fast.value))
                    }
                    self.rows[f"ms, {engine}, {size}"] = row
                    say(f"ms, {engine}, {size}: {row}")

    def compiled_queries(self) -> None:
        """Measure a query of the largest batch with a compiled copy, and the compilation."""
        size = min(self.options.batch, len(self.x))
        with (
            checked(self.model, self.x, self.y) as (model, x, y),
            accelerated(model, x, y, len(x), "auto", say) as fast,
        ):
            assert isinstance(fast.model, FrozenModule)
            fast.model.fast.net = torch.compile(fast.model.fast.net, dynamic=False)  # type: ignore[assignment]
            part, label = x[:size], y[:size]
            for kind, call in (("gradient", fast.gradient), ("forward", fast.value)):
                start = time.perf_counter()
                call(CE(), part, label)
                synchronise(x)
                row = {"first_seconds": round(time.perf_counter() - start, 2)}
                row["ms"] = self.milliseconds(partial(call, CE(), part, label))
                self.rows[f"compiled {kind}, {size}"] = row
                say(f"compiled {kind}, {size}: {row}")

    def milliseconds(self, query: Callable[[], Any], repeats: int = 20) -> float:
        repeats = 2 if self.options.tiny else repeats
        for _ in range(2):
            query()
        synchronise(self.x)
        start = time.perf_counter()
        for _ in range(repeats):
            query()
        synchronise(self.x)
        return round(1000 * (time.perf_counter() - start) / repeats, 3)

    def compare(self) -> None:
        """Count different verdicts, and divide the seconds."""
        names = [name for name in self.verdicts if name.startswith("pyautoattack")]
        for theirs in names:
            for ours in (name for name in self.verdicts if name.startswith("ours")):
                a, b = self.verdicts[ours], self.verdicts[theirs]
                spent, row = self.rows[theirs]["seconds"], self.rows[ours]
                self.rows[f"{ours} / {theirs}"] = {
                    "only_ours_breaks": int((~a & b).sum()),
                    "only_theirs_breaks": int((a & ~b).sum()),
                    "times": round(spent / row["seconds"], 2),
                    "times_without_start_up": round(
                        spent / row.get("without_start_up", row["seconds"]), 2
                    ),
                }
                say(f"{ours} / {theirs}: {self.rows[f'{ours} / {theirs}']}")


def packed(verdicts: Tensor) -> str:
    """Return booleans as hexadecimal digits."""
    return np.packbits(verdicts.cpu().numpy()).tobytes().hex()


def unpacked(digits: str, count: int) -> Tensor:
    """Return the booleans that `packed` wrote."""
    found = np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8), count=count)
    return torch.from_numpy(found.astype(bool))


def stored(file: Path | None) -> dict[str, Any]:
    """Return the models of a report that exists already."""
    if file is None or not file.is_file():
        return {}
    models: dict[str, Any] = json.loads(file.read_text())["models"]
    return models


def shortened(chain: Any) -> Any:
    """Return the chain with few steps and queries, for --tiny."""
    from dataclasses import replace

    def short(attack: Any) -> Any:
        if hasattr(attack, "attack"):
            return replace(attack, attack=short(attack.attack))
        key, value = ("queries", TINY["queries"]) if hasattr(attack, "queries") else ("steps", 6)
        return replace(attack, **{key: value})

    return replace(chain, attacks=tuple(short(attack) for attack in chain.attacks))


def say(sentence: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def synchronise(x: Tensor) -> None:
    """Wait for the GPU."""
    if x.is_cuda:
        torch.cuda.synchronize()


@contextmanager
def cudnn_benchmark(enabled: bool) -> Iterator[None]:
    """Set cuDNN benchmark as a user would; an attack must leave it so."""
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
        assert torch.backends.cudnn.benchmark == enabled, "the attack left another setting"
    finally:
        torch.backends.cudnn.benchmark = False


@contextmanager
def timed_captures(seconds: list[float]) -> Iterator[None]:
    """Collect the seconds of each capture of a CUDA graph."""
    plain = graphs.CapturedGraph.__init__

    def timed(self: Any, *args: Any, **options: Any) -> None:
        start = time.perf_counter()
        plain(self, *args, **options)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    graphs.CapturedGraph.__init__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        graphs.CapturedGraph.__init__ = plain  # type: ignore[method-assign]


def bench(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the measurements of one model."""
    device = torch.device(options.device)
    model = build(name, options.tiny).to(device)
    if options.images:
        x, y = read_images(options.images, options.count, device)
    else:
        x, y = torch.rand(options.count, 3, 32, 32, device=device), None
    if options.weights and name in ("preact", "branching"):
        load_demur_weights(model, options.weights)
    elif options.nets and (options.nets / f"{name}.safetensors").is_file():
        model.load_state_dict(load_file(options.nets / f"{name}.safetensors", options.device))
    elif options.train:
        fit(model, *read_images(options.train, options.train_count, device), options.epochs, EPS)
        if options.nets:
            save_file(model.state_dict(), options.nets / f"{name}.safetensors")
    model.eval()
    if y is None:
        y = torch.cat([model(part).argmax(1) for part in x.split(64)]).detach()
    run = Bench(options, name, model, x, y)
    clean = run.correct(x).float().mean().item()
    say(f"{name}: {clean:.1%} of {len(x)} clean images correct")
    if options.weights and name in ("preact", "branching"):
        assert clean > 0.7, "the weights do not fit this model"
    run.rows["clean"] = clean
    what = options.measure.split(";")
    plan: dict[str, tuple[float, Callable[[], Tensor | None]]] = {
        "queries": (15, run.queries),
        "ours": (30, lambda: run.ours(False)),
        "pyautoattack, benchmark": (95, lambda: run.pyautoattack(True)),
        "ours, benchmark": (30, lambda: run.ours(True)),
        "ours, second call": (30, lambda: run.ours(False)),
        "reject, standard": (45, lambda: run.rejecting("standard")),
        "reject, fast": (15, lambda: run.rejecting("fast")),
        "pyautoattack": (85, lambda: run.pyautoattack(False)),
        "compiled": (45, run.compiled_queries),
        "ours, plain": (75, lambda: run.ours(False, "plain")),
        "reject, fast, plain": (40, lambda: run.rejecting("fast", "plain")),
    }
    for key, (seconds, work) in plan.items():
        if key in what or options.measure == "all":
            run.measure(key, seconds, work)
            write(options, stored(options.output) | {name: run.rows})
    run.compare()
    return run.rows


def write(options: argparse.Namespace, models: dict[str, Any]) -> None:
    """Write the report so far."""
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    shown = {
        key: value.name if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key not in ("until", "output")
    }
    report = {
        "device": where, "torch": torch.__version__, "code": code_version(), "options": shown,
        "models": models,
    }  # fmt: skip
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Read the options and measure each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="resnet18,wideresnet,vit")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--nets", type=Path, help="folder in which trained weights are kept")
    parser.add_argument("--train-count", type=int, help="training images; default: all")
    parser.add_argument("--measure", default="all", help="measurements, joined by ; or all")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small nets, short attacks")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    options.until = time.perf_counter() + options.seconds
    if options.tiny:
        options.count, options.batch = TINY["count"], TINY["batch"]
    logging.getLogger("auto-attack").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if options.device == "cuda":  # loads the libraries of the GPU, for everybody
        conv = nn.Conv2d(3, 8, 3).to("cuda")
        conv(torch.rand(8, 3, 32, 32, device="cuda")).sum().backward()
        synchronise(conv.weight)
    for name in options.only.split(","):
        rows = bench(options, name)
        write(options, stored(options.output) | {name: rows})


if __name__ == "__main__":
    main()
