"""Two seconds of the load that benchmarks/serve_load.py gives for a minute."""

from pathlib import Path
from threading import Thread

import pytest

import serve_load
from demur import Guard
from tests import forked


def start_service(bundle: str, options: list[str]) -> tuple[forked.Process, int]:
    """The service as a process without seconds of imports, and its port."""
    words = ["-m", "demur", "serve", bundle, "--port", "0", "--device", "cpu", *options]
    process = forked.popen(words)
    line = process.stderr.readline()
    assert line.startswith("serving at"), line
    Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop its exit
    return process, int(line.strip().rpartition(":")[2])


def test_more_load_than_the_service_takes(
    tiny_guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_load, "start_service", start_service)
    found = serve_load.measure(
        str(tiny_guard.save(tmp_path / "guard")), seconds=1.0, clients=100, images=4
    )
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
