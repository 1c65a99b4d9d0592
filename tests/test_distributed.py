"""Several processes do what one does: the same weights, the same records, one voice."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from demur.distributed import ProcessGroup, current, init_distributed, launched
from demur.errors import BadInput
from demur.evaluate import AttackOptions, Evaluator, run_attack
from demur.nets import Small
from demur.nets.norm import Norm2d, synchronise_batch_norm
from demur.recipes import attack, recipe
from demur.runs import Run
from demur.training import check_trainable, train

# 1150 images in batches of 301: shares of 151 and 150, and of 124 and 123 in the last batch
BRIEF = ["digits-pgdat-rr", "precision=fp64", "width=4", "epochs=2", "batch_size=301",
         "attack.steps=1", "validation_attack.steps=1"]  # fmt: skip
ENV = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def together(*words: str) -> list[str]:
    return [*TORCHRUN, "--standalone", "-m", "demur", *words]


def done(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=200, check=False
    )


def apart(one: Path, other: Path) -> float:
    """The largest difference of any weight or statistic of two runs."""
    a, b = (load_file(path / "model.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the brief recipe."""
    name, *changes = BRIEF
    return train(recipe(name, changes), tmp_path_factory.mktemp("single") / "run").path


# ------------------------------------------------------------------ one process


def test_a_world_of_one_changes_nothing() -> None:
    here, held = ProcessGroup(), torch.arange(7.0)
    before = held.clone()
    assert here.is_leader
    assert torch.equal(here.shard(held), held)
    here.all_reduce([held])
    here.broadcast_tensors([held])
    here.barrier()
    assert here.broadcast({"a": 1}) == {"a": 1}
    assert here.gather(held)[0] is held
    assert torch.equal(held, before)
    assert current() == here


@given(st.integers(0, 300), st.integers(1, 17))
def test_shares_are_the_whole_and_about_equal(count: int, size: int) -> None:
    items = torch.arange(count)
    shares = [ProcessGroup(rank, size).shard(items) for rank in range(size)]
    assert torch.equal(torch.cat(shares), items)
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert [rank for rank in range(size) if ProcessGroup(rank, size).is_leader] == [0]


def test_nothing_is_joined_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not launched()
    with init_distributed(torch.device("cpu")) as device:
        assert device == torch.device("cpu")
        assert current() == ProcessGroup()


def test_norms_told_to_share_are_ordinary_ones_in_a_single_process() -> None:
    made = recipe("digits-pgdat-rr", ["width=4"])
    nets = [Small(4).build(made.data.domain, made.method.head).train() for _ in range(2)]
    synchronise_batch_norm(nets[1])
    assert all(m.shared for m in nets[1].modules() if isinstance(m, Norm2d))
    x, _ = made.data.load()["fit"].batch(slice(0, 32))
    assert torch.equal(nets[0](x).logits, nets[1](x).logits)
    assert not any(m.shared for m in nets[0].modules() if isinstance(m, Norm2d))


def test_processes_agree_on_running_statistics_after_every_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Own statistics part; all must judge, and later resume, with the leading process's."""
    agreed: list[int] = []
    monkeypatch.setattr(
        ProcessGroup, "broadcast_tensors", lambda self, tensors: agreed.append(len(tensors))
    )
    made = recipe("digits-standard", ["width=2", "epochs=2", "validation_attack=Clean"])
    train(made, tmp_path / "run")
    net = made.net.build(made.data.domain, made.method.head)
    statistics, weights = len(list(net.buffers())), len(list(net.parameters()))
    assert agreed == [statistics + 2 * weights, statistics, statistics]


def test_a_last_batch_too_small_for_all_processes_is_refused() -> None:
    made = recipe("digits-pgdat-rr", ["batch_size=1147"])  # leaves three images
    splits = made.data.load()
    check_trainable(made, splits, processes=1)
    with pytest.raises(BadInput, match="last batch has 3 images, too few for 2 processes"):
        check_trainable(made, splits, processes=2)


# ------------------------------------------------------------------ two processes


def test_two_processes_train_what_one_does_even_when_killed(single: Path, tmp_path: Path) -> None:
    """Killed -9 after the first epoch and given again; whole runs were measured 3e-14 apart."""
    command = together("train", *BRIEF, "--sync-bn", "--out", "run")
    with subprocess.Popen(command, cwd=tmp_path, env=ENV, stderr=subprocess.DEVNULL) as process:
        children, deadline = list[int](), time.monotonic() + 100
        while not (tmp_path / "run/state/now.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
            if (tmp_path / "run").exists():
                children = children or processes_below(process.pid)
        for pid in (process.pid, *children):
            os.kill(pid, signal.SIGKILL)
    assert len(children) == 2
    assert not Run(tmp_path / "run").finished
    again = done(command, tmp_path)
    assert again.returncode == 0, again.stderr
    assert apart(single, tmp_path / "run") < 1e-10
    assert Run(tmp_path / "run").checkpoint["processes"] == 2
    assert Run(tmp_path / "run").checkpoint["sync_bn"] is True
    assert again.stderr.count("of 2 chosen") == 1, "one of the processes speaks"


def test_two_processes_wrap_steps_as_one_does(tmp_path: Path) -> None:
    """The weights move along the gradient of all images, and both hold the same average."""
    (name, *changes), around = BRIEF, ["ema=0.9", "awp=0.05"]
    one = train(recipe(name, [*changes, *around]), tmp_path / "one").path
    both = done(together("train", *BRIEF, *around, "--sync-bn", "--out", "two"), tmp_path)
    assert both.returncode == 0, both.stderr
    assert apart(one, tmp_path / "two") < 1e-10


def processes_below(parent: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, above in pairs if int(above) == parent]


def test_machines_that_share_no_folder_train_with_statistics_of_their_own(
    single: Path, tmp_path: Path
) -> None:
    """Two launchers that find each other by rendezvous, each in a folder of its own."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
             "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}",
             "--rdzv-id", "job", "-m", "demur", "train", *BRIEF]  # fmt: skip
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    launched = [
        subprocess.Popen([sys.executable, *words, "--out", "run"], cwd=place, env=ENV,
                         stderr=subprocess.PIPE, text=True)
        for place in places
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[1] for process in launched]
    assert [process.returncode for process in launched] == [0, 0], said
    (written,) = [place / "run" for place in places if (place / "run").exists()]
    assert Run(written).checkpoint["sync_bn"] is False
    assert apart(single, written) > 1e-3
    assert all(bool(v.isfinite().all()) for v in load_file(written / "model.safetensors").values())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def arrays(run: Path, name: str) -> dict[str, bytes]:
    (path,) = (run / "records").glob(f"{name}-test-*.npz")
    with np.load(path) as held:
        return {key: held[key].tobytes() + str(held[key].dtype).encode() for key in held.files}


class Killed(Exception):
    """A crash."""


def test_a_shared_attack_leaves_the_record_of_one_process(tiny_run: Run, tmp_path: Path) -> None:
    """It goes on from the first batch of an attack that one process began."""
    for name in ("one", "two"):
        shutil.copytree(tiny_run.path, tmp_path / name)
    words = ["pgd-20:steps=3", "adaptive:steps=4", "--batch-size", "64"]

    def crash(images: int, total: int) -> None:
        raise Killed

    def sources(name: str) -> Evaluator:
        return Evaluator(Run(tmp_path / name), torch.device("cpu"))

    meant = [(text, attack(text, tiny_run.recipe)) for text in words[:2]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for text, spec in meant:
        run_attack(sources("one"), text, spec, AttackOptions(batch_size=64))
    with pytest.raises(Killed):
        run_attack(sources("two"), *meant[0], AttackOptions(batch_size=64), crash)
    torch.set_num_threads(threads)
    assert len(list((tmp_path / "two/records").glob(".making-*/parts-*/0-64-*"))) == 1
    both = done(together("attack", "two", *words), tmp_path)
    assert both.returncode == 0, both.stderr
    for name in ("pgd-20-steps-3", "adaptive-steps-4"):
        expected, found = arrays(tmp_path / "one", name), arrays(tmp_path / "two", name)
        assert {"y", "logits", "aux", "x_adv", "size_linf", "size_l2"} <= expected.keys()
        assert found == expected
    assert both.stderr.count("images correct") == 2, "one line an attack, from one process"
    assert not list((tmp_path / "two/records").glob(".making-*"))


def test_what_two_processes_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    """Batches of 1147 leave three images, and batch norm needs two in each process."""
    refused = done(together("train", *BRIEF, "batch_size=1147", "--out", "run"), tmp_path)
    assert refused.returncode != 0
    assert "demur: the last batch has 3 images, too few for 2 processes" in refused.stderr
    assert "exitcode  : 2" in refused.stderr
    assert "demur/cli" not in refused.stderr, "no traceback of ours"
    assert not (tmp_path / "run").exists()
