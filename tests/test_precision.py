"""Arithmetic that is asked for and given back, and functions fused only where asked."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from demur.fused import fused, fusing
from demur.precision import Precision, autocast, products_dtype, use_precision, weights_dtype

CPU = torch.device("cpu")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def flags() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(params=[(True, False), (False, True)])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[bool, bool]]:
    """TF32 in convolutions or in products, as somebody else may have set it."""
    found = flags()
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_arithmetic_is_set_for_a_while(precision: Precision, before: tuple[bool, bool]) -> None:
    rough = precision in ("tf32", "bf16")
    with pytest.raises(RuntimeError, match="inside"), use_precision(precision, CPU):
        assert flags() == (rough, rough)
        assert torch.is_autocast_enabled("cpu") == (precision == "bf16")
        raise RuntimeError("inside")
    assert flags() == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_bf16_lowers_convolutions_and_nothing_lowers_weights(precision: Precision) -> None:
    weights = weights_dtype(precision)
    assert weights == (torch.float64 if precision == "fp64" else torch.float32)
    conv = torch.nn.Conv2d(2, 2, 3).to(weights)
    with autocast(precision, CPU):
        assert conv(torch.zeros(1, 2, 4, 4, dtype=weights)).dtype == products_dtype(precision)
        assert not torch.is_autocast_cache_enabled()
    assert products_dtype(precision) == (torch.bfloat16 if precision == "bf16" else weights)


class Compiler:
    """Stands in for torch.compile and counts what it is asked for."""

    def __init__(self) -> None:
        self.made, self.ran = 0, 0

    def __call__(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        self.made += 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran += 1
            return function(*args, **kwargs)

        return counted


def test_fused_functions_are_compiled_once_and_only_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)

    @fused
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    def asked() -> tuple[int, int]:
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
        return compiler.made, compiler.ran

    assert asked() == (0, 0)
    with fusing(wanted=False):
        assert asked() == (0, 0)
    with fusing():
        assert asked() == (1, 1)
        with fusing(), fusing(wanted=False):
            assert asked() == (1, 2)
        assert asked() == (1, 3)
    assert asked() == (1, 3)
    with pytest.raises(ValueError, match="inside"), fusing():
        raise ValueError("inside")
    assert asked() == (1, 3), "an error ends it too"
    assert doubled.__name__ == "doubled"


def test_nothing_is_compiled_by_itself_inside_what_is_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with fusing():
        assert fused(lambda x: x + 1)(1) == 2
    assert compiler.made == 0
