"""Every test of this folder needs a CUDA device; elsewhere all are skipped, in one line of -rs."""

import pytest
import torch


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; on a GPU machine run python3 -m pytest tests/gpu -q")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
