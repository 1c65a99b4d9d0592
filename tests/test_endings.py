"""How a command ends that cannot be carried out: one sentence, and never a traceback."""

import errno

import pytest

from tests.conftest import Command
from tests.test_cli import refused

NO_MEMORY = [
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9e9"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough "
                 "memory: you tried to allocate 129600000000 bytes."),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]  # fmt: skip


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: str(error)[:30])
def test_running_out_of_memory_is_said(
    error: Exception, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*words: object) -> None:
        raise error

    monkeypatch.setattr("demur.train.Training", too_large)
    refused(command("train", "digits-pgdat"), "not enough memory for this", "smaller")


def test_faults_of_our_own_are_not_hidden(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*words: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("demur.train.Training", wrong)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        command("train", "digits-pgdat")
