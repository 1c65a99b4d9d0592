"""The speed benchmark: rows, rates, kernels and the printed report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import speed
from demur.errors import BadInput
from demur.output import Output
from demur.recipes import recipe
from demur.spec import lines, show
from speed import SPEED_COLUMNS, EagerLoop, program, show_speed, speed_cells, speed_sentences
from tests.benchmarks.conftest import Script
from tests.test_cli import expect_error
from timing import (
    KernelTime,
    _kind,
    best_of_two,
    copy_rate,
    kernel_difference,
    matrix_peak,
    time_by_kind,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["digits-pgdat", "digits-pgdat-rr"])
def test_the_eager_loop_trains(name: str) -> None:
    small = recipe(name, ["width=4", "batch_size=64"])
    fit = small.data.load()["fit"]
    loop = EagerLoop(small, fit, eps=0.1, step_size=0.1, steps=1)
    x, y = fit.batch(slice(0, 256))

    def loss() -> float:
        with torch.no_grad():
            out: Output = loop.net.eval()(x)
        loop.net.train()
        return float(cross_entropy(out.logits, y))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        for i in range(4):  # warm up the running statistics of batch norm
            loop(i)
        early = loss()
        for i in range(4, 34):
            loop(i)
        assert loss() < 0.92 * early
        delta = loop._craft(x, y)
    assert float(delta.abs().max()) <= 0.1 + 1e-6
    assert float((x + delta).min()) >= 0
    assert float((x + delta).max()) <= 1


def test_forward_flops_of_resnet18() -> None:
    """0.556 billion multiply-adds per 32x32 image."""
    assert speed._forward_flops(recipe("cifar10-pgdat-rr")) == pytest.approx(1.11e9, rel=0.02)


def test_timing_warms_up_and_takes_the_faster_of_two_trials() -> None:
    calls: list[int] = []
    seconds = best_of_two(calls.append, 5, CPU)
    assert calls == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert 0 < seconds < 0.1
    assert matrix_peak(CPU) is None
    assert copy_rate(CPU) is None


def test_the_report_is_json_with_hardware_versions_and_rates(script: Script) -> None:
    brief = recipe("digits-pgdat-rr", ["width=4", "attack.steps=1"])
    Path("brief.txt").write_text(lines(brief))
    options = ("--only", "eager,plain", "--steps", "3", "--json", "-o", "out.json")
    code, out, err = script(program, "@brief.txt", *options)
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads(Path("out.json").read_text())
    assert {"device", "torch", "code", "threads"} <= report["machine"].keys()
    assert report["recipe"] == show(brief, full=True)
    assert [line["what"] for line in report["lines"]] == ["eager loop", "plain step"]
    for line in report["lines"]:
        rate = line["batch_size"] / (line["step_ms"] / 1000)
        assert line["images_per_s"] == pytest.approx(rate)
        assert line["epoch_s"] == pytest.approx(report["epoch_images"] / rate)
        assert 10 < rate < 1e6
        assert line["share_of_peak"] is None, "there is no peak for a CPU"
        assert line["bn"] == "train"


def test_impossible_measurements_are_an_error(script: Script) -> None:
    expect_error(
        script(program, "--only", "eagre"), "there is no measurement 'eagre'; did you mean eager"
    )
    expect_error(script(program, "atacks"), "no recipe is called 'atacks'; demur list shows the")
    expect_error(script(program, "--steps", "1"), "invalid value for '--steps'")
    result = script(program, "--only", "eager,fast", "--steps", "3")
    expect_error(result, "the fast engine needs a GPU; on a CPU use --only eager,plain")
    assert not any("measuring" in text for text in result[1:]), "the error precedes any work"
    with pytest.raises(BadInput, match="only recipes trained with PGD"):
        speed.Bench(recipe("digits-standard"), CPU, 3)


def speed_row(what: str, **changes: Any) -> dict[str, Any]:
    return {"what": what, "batch_size": 128, "bn": "eval", "precision": "bf16",
            "step_ms": 15.0, "epoch_s": 5.9, "images_per_s": 8533.3, "share_of_peak": 0.273,
            "memory_gib": 1.04, "prepare_s": 41.0, **changes}  # fmt: skip


def test_the_printed_report_shows_every_measurement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = {
        "machine": {"device": "Some GPU", "torch": "2.0"},
        "lines": [speed_row("fast"), speed_row("eager loop", share_of_peak=None, memory_gib=None)],
        "head": {
            "eval": {
                "share": 0.0071,
                "ms": [14.1, 14.1],
                "ms_without": [14.0, 14.014],
                "kernels": {
                    "gemm": {"launches": 3.0, "ms": 0.05},
                    "mean": {"launches": -1.0, "ms": -0.008},
                    "fprop": {"launches": 0.0, "ms": 0.3},  # equal launches: not the head's
                },
            },
            "train": {"share": 0.01, "ms": [14.14], "ms_without": [14.0], "kernels": {}},
        },
        "attack": {"images": 10_000, "batch_size": 1000, "seconds": 5.5, "prepare_s": 12.0},
        "where": {
            "kinds_ms": {"convolutions and matrix products": 9.5, "between kernels": 0.25},
            "longest": {},
        },
    }
    assert speed_cells(report["lines"][0]) == (  # type: ignore[index]
        "fast", "128", "eval", "bf16", "5.90", "8,533", "27%", "1.0", "41"
    )  # fmt: skip
    assert len(speed_cells(report["lines"][1])) == len(SPEED_COLUMNS)  # type: ignore[index]
    assert speed_sentences(report) == [
        "the head costs +0.71% of a step with batch norm in eval mode; captures of one step are "
        "up to 0.10% apart; it launches 2 more kernels, which take 0.30%",
        "the head costs +1.00% of a step with batch norm in train mode; captures of one step are "
        "up to 0.00% apart",
        "PGD-100 on 10,000 images: 5.50 s at batch 1000 (12 s to prepare)",
        "a fast step with batch norm in train mode: convolutions and matrix products 9.50 ms, "
        "between kernels 0.25 ms",
    ]
    show_speed(report)
    out = " ".join(capsys.readouterr().out.split())
    for text in ("Some GPU, torch 2.0", "eager loop", "+0.71%", "PGD-100 on 10,000 images"):
        assert text in out


def test_kernels_are_grouped_by_name() -> None:
    kinds = {
        "sm90_xmma_fprop_implicit_gemm_bf16": "convolutions",
        "triton_red_fused_native_batch_norm": "batch norm",
        "multi_tensor_apply_kernel<FusedSgdMathFunctor>": "optimiser, averaging",
        "multi_tensor_apply_kernel<CopyFunctor>": "copies",
        "nothing known": "other",
    }
    for name, kind in kinds.items():
        assert _kind(name).startswith(kind)


def test_time_is_split_into_kinds_of_kernels_and_idle_time() -> None:
    kernels = {"fprop": KernelTime(2, 6.0), "dgrad": KernelTime(1, 3.0), "odd": KernelTime(1, 0.5)}
    assert time_by_kind(kernels, 0.010) == {
        "convolutions and matrix products": 9.0, "other": 0.5, "between kernels": 0.5,
    }  # fmt: skip
    longer = {
        "gemm": KernelTime(3, 0.06),
        "fprop": KernelTime(2, 6.0005),
        "odd": KernelTime(0, 0.0),
    }
    assert kernel_difference(longer, kernels) == {
        "gemm": KernelTime(3, 0.06), "odd": KernelTime(-1, -0.5), "dgrad": KernelTime(-1, -3.0),
    }  # fmt: skip


def test_the_overhead_of_a_head_is_the_median_over_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures take 10, 11, 30 ms with the head and 10, 10, 9 without; one turn is slow."""
    with_head = recipe("digits-pgdat-rr")
    without_head = recipe("digits-pgdat")
    ms = {with_head: iter([10.0, 11.0, 30.0]), without_head: iter([10.0, 10.0, 9.0])}
    bench = speed.Bench(with_head, CPU, steps=10)
    monkeypatch.setattr(bench, "_prepare", lambda recipe: (next(ms[recipe]), 0.0))
    slowdown = iter([5.0, *[1.0] * 17])
    monkeypatch.setattr(bench, "_step_seconds", lambda steps: steps * next(slowdown) / 1000)
    profiles = iter([{"gemm": KernelTime(3, 0.5)}, {"gemm": KernelTime(1, 0.25)}])
    monkeypatch.setattr(speed, "kernels_of", lambda action: next(profiles))
    cost = bench.overhead(with_head, without_head)
    assert cost["share"] == pytest.approx(0.1)
    assert cost["ms"] == pytest.approx([10, 11, 30])
    assert cost["ms_without"] == pytest.approx([10, 10, 9])
    assert cost["kernels"] == {"gemm": {"launches": 2, "ms": 0.25}}
