"""Precision contexts restore what they set; fused functions compile only inside `fusing()`."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from demur.numerics import (
    Precision,
    autocast,
    fused,
    fusing,
    products_dtype,
    use_precision,
    weights_dtype,
)

CPU = torch.device("cpu")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def flags() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[(True, False), (False, True)])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool]]:
    """TF32 flags that the caller has set, in convolutions or in matrix products."""
    initial = flags()
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = initial


@pytest.mark.parametrize("precision", PRECISIONS)
def test_use_precision_sets_and_restores_the_flags(
    precision: Precision, before: tuple[bool, bool]
) -> None:
    allow_tf32 = precision in ("tf32", "bf16")
    with pytest.raises(RuntimeError, match="inside"), use_precision(precision, CPU):
        assert flags() == (allow_tf32, allow_tf32)
        assert torch.is_autocast_enabled("cpu") == (precision == "bf16")
        raise RuntimeError("inside")
    assert flags() == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_bf16_casts_convolutions_and_no_precision_casts_weights(precision: Precision) -> None:
    weights = weights_dtype(precision)
    assert weights == (torch.float64 if precision == "fp64" else torch.float32)
    conv = torch.nn.Conv2d(2, 2, 3).to(weights)
    with autocast(precision, CPU):
        assert conv(torch.zeros(1, 2, 4, 4, dtype=weights)).dtype == products_dtype(precision)
        assert not torch.is_autocast_cache_enabled()
    assert products_dtype(precision) == (torch.bfloat16 if precision == "bf16" else weights)


class CountingCompile:
    """Replaces torch.compile; counts compilations and calls of compiled functions."""

    def __init__(self) -> None:
        self.compiled, self.calls = 0, 0

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        self.compiled += 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return counted


def test_fused_functions_are_compiled_once_and_only_inside_fusing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = CountingCompile()
    monkeypatch.setattr(torch, "compile", compiler)

    @fused
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def counts() -> tuple[int, int]:
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
        return compiler.compiled, compiler.calls

    assert counts() == (0, 0)
    with fusing(enabled=False):
        assert counts() == (0, 0)
    with fusing():
        assert counts() == (1, 1)
        with fusing(), fusing(enabled=False):
            assert counts() == (1, 2)
        assert counts() == (1, 3)
    assert counts() == (1, 3)
    with pytest.raises(ValueError, match="inside"), fusing():
        raise ValueError("inside")
    assert counts() == (1, 3), "an error ends the block too"
    assert doubled.__name__ == "doubled"


def test_fused_functions_are_inlined_while_an_outer_function_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = CountingCompile()
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with fusing():
        assert fused(lambda x: x + 1)(1) == 2
    assert compiler.compiled == 0
