"""The deployment on Ray Serve that the guide shows, on a local cluster (ray is not in the lock)."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from demur import Guard, LoadedRun
from tests.test_distributed import free_port

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "serve.md"
RUN = """
import ray
from ray import serve
import cats

ray.init(num_cpus=2, include_dashboard=False)
serve.start(http_options={"port": PORT})
serve.run(cats.app)
print("ready", flush=True)
input()
serve.shutdown()
"""


@pytest.mark.exhaustive
def test_the_deployment_of_the_guide_decides_as_the_guard(
    tiny_guard: Guard, tiny_source: LoadedRun, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    port = free_port()
    block = re.search(r"```python\n(# cats.py\n.*?)```", GUIDE.read_text(), re.S)
    assert block
    (tmp_path / "cats.py").write_text(block[1])
    (tmp_path / "run.py").write_text(RUN.replace("PORT", str(port)))
    folder = tiny_guard.save(tmp_path / "guard")
    known = os.environ.get("PYTHONPATH", "")  # of ray, where it is no part of the environment
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path), known])
    environment = {"GUARD": str(folder), "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"}
    images = tiny_source.splits["test"].batch(slice(0, 200))[0]
    noise = torch.rand(200, *tiny_guard.shape, generator=torch.Generator().manual_seed(0))
    x = torch.cat([images, noise])
    wanted = [(row["label"], row["accepted"]) for row in tiny_guard(x).rows()]
    assert {accepted for _, accepted in wanted} == {False, True}
    found = []
    with subprocess.Popen(
        [sys.executable, "run.py"], cwd=tmp_path, env=os.environ | environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        assert any("ready" in line for line in process.stdout)
        for part in x.permute(0, 2, 3, 1).split(40):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/predict",
                json.dumps({"images": part.tolist(), "dtype": "float32"}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                found += json.load(answer)["predictions"]
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert [(row["label"], row["accepted"]) for row in found] == wanted
