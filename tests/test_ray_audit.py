"""Audits on a local Ray cluster of two nodes (ray is not in the lock)."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from demur.audits import cluster
from demur.audits.ray_cluster import RAY
from demur.errors import BadInput
from tests.conftest import Command

ROOT = Path(__file__).parents[1]
AUDIT = """
import os, signal, sys, threading, time
import psutil, ray, torch
from ray.cluster_utils import Cluster
from demur import AcceptedError, AutoAttack, Con, RejectAutoAttack
from demur.audits import cluster

torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
).eval()
x = torch.rand(40, 1, 8, 8)
y = net(x).argmax(1)


def workers():
    found = psutil.Process().children(recursive=True)
    return [one for one in found if one.name().startswith("ray::Worker")]


killed = []


def kill_one():
    while not killed:
        busy = [one for one in workers() if "advance" in one.name() + " ".join(one.cmdline())]
        for one in busy[:1]:
            killed.append(one.pid)
            os.kill(one.pid, signal.SIGKILL)
        time.sleep(0.01)


def results():
    common = dict(eps=0.03, verbose=False, engine="plain")
    on_both = RejectAutoAttack(net, AcceptedError(Con(), 0.11), version="fast", **common)
    names = ["apgd-ce", "fab-t", "square"]
    return [
        AutoAttack(net, version="custom", attacks_to_run=names, **common).evaluate(x, y, bs=8),
        on_both.evaluate(x, y, bs=8, sanity=False),
    ]


alone = results()
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
nodes.add_node(num_cpus=1)
nodes.wait_for_nodes()
threading.Thread(target=kill_one, daemon=True).start()
with cluster(nodes.address):
    assert len(ray.nodes()) == 2
    spread = results()
assert killed, "no worker was killed"
for one, other in zip(alone, spread, strict=True):
    assert 0 < one.broken_by.count("") < 40, one.broken_by
    assert torch.equal(one.x_adv, other.x_adv)
    assert one.broken_by == other.broken_by
    assert one.sanity == other.sanity
    assert torch.equal(one.accepted, other.accepted)
print("the same")
"""


@pytest.mark.exhaustive
def test_two_nodes_give_the_bytes_of_one_process_though_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "audit.py").write_text(AUDIT)
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                   "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip
    run = subprocess.run(
        [sys.executable, "audit.py"], cwd=tmp_path, env=os.environ | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "the same" in run.stdout


def test_a_cluster_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    needs = pytest.raises(
        BadInput, match=r"a cluster needs Ray; install it with pip install 'demur"
    )
    with needs, cluster("auto"):
        pass
    with cluster(None):
        assert RAY.get() is None


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", ""])
def test_an_address_where_nothing_answers_is_told_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", silent)
    nobody = pytest.raises(BadInput, match=r"no Ray cluster answers at .*; give auto, HOST:PORT")
    with nobody, cluster(address):
        pass


def test_a_service_is_not_audited_from_a_cluster(command: Command, tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", x=np.zeros((1, 1, 8, 8)), y=[0])
    data = "--data", str(tmp_path / "few.npz")
    code, _, said = command("audit", "http://127.0.0.1:1", *data, "--cluster", "auto")
    assert code == 2
    assert "is asked from one process; leave --cluster out" in " ".join(said.split())
