"""Two seconds of the load that benchmarks/serve_load.py gives for a minute."""

from pathlib import Path

import pytest

from demur import Guard
from serve_load import measure
from tests.test_serve import environment


def test_more_load_than_the_service_takes(
    tiny_guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    found = measure(str(tiny_guard.save(tmp_path / "guard")), seconds=1.0, clients=100, images=4)
    assert found["wrong"] == []
    assert found["alive"]
    assert found["exit code"] == 0
    codes = found["codes"]
    assert codes["good 200"] > 0
    assert codes["good 429"] > 0
    assert "good 0" not in codes
    assert {int(name.split()[1]) for name in codes} <= {
        0,
        1,
        200,
        400,
        404,
        413,
        415,
        422,
        429,
        503,
    }
