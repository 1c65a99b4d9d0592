"""Checks for NaN: which sentence, when it comes, and that no value escapes them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demur import numerics
from demur.attacks import Square
from demur.attacks.attack_model import CheckedModel
from demur.attacks.balls import Linf
from demur.errors import BadInput
from demur.numerics import COUNT_EVERY, deferred_checks, raise_deferred, raise_if_invalid
from demur.output import Output, check_logits

FINE, REMEDY = torch.zeros(4), "do this"
NAN = torch.tensor([0.0, torch.nan, torch.nan, 0.0])


@pytest.fixture
def block() -> Iterator[None]:
    """A block in which the first check of a score was passed."""
    with deferred_checks():
        raise_if_invalid("score", FINE, REMEDY)
        yield


def test_outside_a_block_and_at_its_first_call_a_check_raises_at_once() -> None:
    sentence = "the rejector's score is not a number for 2 of 4 images; do this"
    with pytest.raises(BadInput, match=sentence):
        raise_if_invalid("score", NAN, REMEDY)
    with pytest.raises(BadInput, match=sentence), deferred_checks():
        raise_if_invalid("score", NAN, REMEDY)
        pytest.fail("the first call was deferred")


@pytest.mark.parametrize("later", [0, 1, COUNT_EVERY - 1, 3 * COUNT_EVERY])
@pytest.mark.parametrize("size", [2, 3])
def test_the_worst_call_is_reported_whenever_it_was(block: None, later: int, size: int) -> None:
    raise_if_invalid("score", NAN[:2], REMEDY)
    raise_if_invalid("score", NAN[:size].double(), REMEDY)
    for _ in range(later):
        raise_if_invalid("score", FINE[: 1 + later % 4], REMEDY)
    for _ in range(2):  # it stays
        with pytest.raises(BadInput, match=f"score is not a number for {size - 1} of 4 images"):
            raise_deferred()
    _forget()


def test_a_larger_batch_is_checked_at_once(block: None) -> None:
    with pytest.raises(BadInput, match="2 of 5 images"):
        raise_if_invalid("score", torch.cat((NAN, FINE[:1])), REMEDY)


def test_a_view_may_be_overwritten_before_it_is_counted(block: None) -> None:
    static = NAN[:, None].clone()
    raise_if_invalid("score", static[:, -1], REMEDY)
    static.zero_()
    with pytest.raises(BadInput, match="2 of 4"):
        raise_deferred()
    _forget()


def test_values_that_wait_keep_no_autograd_graph(block: None) -> None:
    raise_if_invalid("score", FINE.clone().requires_grad_() * 2, REMEDY)
    deferred = numerics._deferred.get()
    assert deferred is not None
    assert not any(values.requires_grad for values in deferred["score"].waiting)


def test_logits_may_be_minus_infinity_but_not_all_of_them() -> None:
    none = torch.zeros(1, 0)
    check_logits(Output(torch.tensor([[0.0, -torch.inf]]), none, none))
    for value in (torch.inf, torch.nan):
        with pytest.raises(BadInput, match="logits are not a number"):
            check_logits(Output(torch.tensor([[0.0, value]]), none, none))
    with pytest.raises(BadInput, match="logits are not a number"):
        check_logits(Output(torch.tensor([[-torch.inf, -torch.inf]]), none, none))


class SameTensor:
    """A model that writes its logits to one tensor, as a captured graph does; NaN in one call."""

    def __init__(self, nan_at: int) -> None:
        self.logits, self.nan_at, self.calls = torch.eye(3)[:2].clone(), nan_at, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.logits[0, 0] = torch.nan if self.calls == self.nan_at else 1.0
        return self.logits


@pytest.mark.parametrize("nan_at", [2, 3, 7, 60])
def test_logits_in_one_static_tensor_are_checked_in_every_call(nan_at: int) -> None:
    model = CheckedModel(SameTensor(nan_at), torch.float32)
    x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 1])
    with pytest.raises(BadInput, match=r"(logits are|objective is) not a number for 1 of 2"):
        Square(Linf(0.1), queries=70).perturb(model, x, y, y)


class CountOperations(TorchDispatchMode):
    """Count operations that launch a kernel on a GPU."""

    VIEWS = ("view", "slice", "select", "expand", "unsqueeze", "detach", "alias", "empty")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.VIEWS
        return func(*args, **(kwargs or {}))


def test_the_checks_of_a_query_cost_little_more_than_one_kernel() -> None:
    none, value = torch.zeros(8, 0), torch.zeros(8)
    out = Output(torch.rand(8, 3), none, none)
    with deferred_checks():
        for queries in (1, COUNT_EVERY):
            with CountOperations() as operations:
                for _ in range(queries):
                    check_logits(out)
                    raise_if_invalid("objective", value, REMEDY)
        assert COUNT_EVERY <= operations.count <= 1.5 * COUNT_EVERY


def _forget() -> None:
    deferred = numerics._deferred.get()
    assert deferred is not None
    deferred.clear()
