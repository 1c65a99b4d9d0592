"""Several processes end with the weights and records of one, and one of them writes."""

import os
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from demur.data import Digits, Splits
from demur.distributed import ProcessGroup, current, init_distributed, launched
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, run_attack
from demur.recipes import attack, recipe
from demur.runs import Run
from demur.spec.importing import allow_import
from demur.training import check_trainable, train
from tests import forked

IMAGES = 92  # in batches of 25: shards of 13 and 12, and of 9 and 8 in the last batch
# AWP uses the gradient of all images, and both ranks hold the same EMA
# a net without batch norm, whose statistics would be those of each process
BRIEF = ["digits-pgdat", "precision=fp64", "epochs=2", "batch_size=25",
         'net=FactoryNet("tests.linear:without_norm")',
         "attack.steps=1", "validation_attack.steps=1", "ema=0.9", "awp=0.05"]  # fmt: skip
NORMED = ["digits-pgdat-rr", "width=2", "epochs=2", "batch_size=25", "attack.steps=1"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200",
                    "DEMUR_MODULES": "tests.linear"}  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
# what torchrun starts twice: a process that has the command forked with its own environment
WORKER = """
import sys
sys.path.insert(0, {root!r})
from tests import forked
forked._server = lambda: {server!r}
done = forked.run(["-m", "demur", *sys.argv[1:]])
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
"""


def two_processes(
    *arguments: str, folders: tuple[Path, Path], seconds: float = 0.0
) -> list[forked.Process]:
    """Start the two processes that torchrun would start, each in a folder; see `few_digits`."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
              "TORCHELASTIC_RUN_ID": "job"}  # fmt: skip
    words = ["-c", forked.few_digits(IMAGES, seconds), *arguments]
    return [
        forked.popen(words, folder, ENV | shared | {"RANK": rank, "LOCAL_RANK": rank})
        for rank, folder in zip("01", folders, strict=True)
    ]


def max_difference(one: Path, other: Path) -> float:
    """Return the largest difference between the weights and statistics of two runs."""
    a, b = (load_file(path / "model.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The brief recipe trained by one process."""
    load, (name, *changes) = Digits.load, BRIEF

    def few(self: Digits, folder: Path | None = None) -> Splits:
        return {split: images.first(IMAGES) for split, images in load(self, folder).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Digits, "load", few)
        allow_import("tests.linear:without_norm")
        return train(recipe(name, changes), tmp_path_factory.mktemp("single") / "run").path


# ------------------------------------------------------------------ one process


def test_a_group_of_one_process_changes_nothing() -> None:
    group, tensor = ProcessGroup(), torch.arange(7.0)
    before = tensor.clone()
    assert group.is_leader
    assert torch.equal(group.shard(tensor), tensor)
    group.all_reduce([tensor])
    group.broadcast_tensors([tensor])
    group.barrier()
    assert group.broadcast({"a": 1}) == {"a": 1}
    assert group.gather(tensor)[0] is tensor
    assert torch.equal(tensor, before)
    assert current() == group


@given(st.integers(0, 300), st.integers(1, 17))
def test_shards_cover_the_batch_and_are_about_equal(count: int, size: int) -> None:
    items = torch.arange(count)
    shards = [ProcessGroup(rank, size).shard(items) for rank in range(size)]
    assert torch.equal(torch.cat(shards), items)
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1
    assert [rank for rank in range(size) if ProcessGroup(rank, size).is_leader] == [0]


def test_init_distributed_does_nothing_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not launched()
    with init_distributed(torch.device("cpu")) as device:
        assert device == torch.device("cpu")
        assert current() == ProcessGroup()


def test_running_statistics_are_broadcast_after_every_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few_digits: None
) -> None:
    """Those of the ranks differ; all ranks must validate and resume with those of rank 0."""
    counts: list[int] = []
    monkeypatch.setattr(
        ProcessGroup, "broadcast_tensors", lambda self, tensors: counts.append(len(tensors))
    )
    spec = recipe("digits-standard", ["width=2", "epochs=2", "validation_attack=Clean"])
    train(spec, tmp_path / "run")
    net = spec.net.build(spec.data.domain, spec.method.head)
    buffers, weights = len(list(net.buffers())), len(list(net.parameters()))
    assert counts == [buffers + 2 * weights, buffers, buffers]


def test_a_last_batch_too_small_for_all_processes_raises() -> None:
    spec = recipe("digits-pgdat-rr", ["batch_size=1147"])  # leaves three images
    splits = spec.data.load()
    check_trainable(spec, splits, processes=1)
    with pytest.raises(BadInput, match="last batch has 3 images, too few for 2 processes"):
        check_trainable(spec, splits, processes=2)


# ------------------------------------------------------------------ two processes


def test_two_processes_end_with_the_weights_of_one_also_after_kill_9(
    single: Path, tmp_path: Path
) -> None:
    """Killed after the first epoch and resumed; uninterrupted runs differ by 3e-14."""
    command, folders = ("train", *BRIEF, "--out", "run"), (tmp_path, tmp_path)
    processes = two_processes(*command, folders=folders, seconds=0.05)
    deadline = time.monotonic() + 100
    while not (tmp_path / "run/state/now.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        process.kill()
        process.wait()
    assert not Run(tmp_path / "run").has_weights
    resumed = two_processes(*command, folders=folders)
    said = "".join(process.communicate()[1] for process in resumed)
    assert [process.wait() for process in resumed] == [0, 0], said
    assert max_difference(single, tmp_path / "run") < 1e-10
    assert Run(tmp_path / "run").checkpoint["processes"] == 2
    assert said.count("of 2 is stored") == 1, "only one process prints"


def test_machines_without_a_shared_folder_train_together(tmp_path: Path) -> None:
    """Each process in its own folder."""
    folders = (tmp_path / "a", tmp_path / "b")
    for folder in folders:
        folder.mkdir()
    processes = two_processes("train", *NORMED, "--out", "run", folders=folders)
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    (written,) = [folder / "run" for folder in folders if (folder / "run").exists()]
    assert all(bool(v.isfinite().all()) for v in load_file(written / "model.safetensors").values())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def arrays(run: Path, name: str) -> dict[str, bytes]:
    (path,) = (run / "records").glob(f"{name}-test-*.npz")
    with np.load(path) as file:
        return {key: file[key].tobytes() + str(file[key].dtype).encode() for key in file.files}


class Crash(Exception):
    """Raised in the middle of an attack."""


def test_two_processes_write_the_record_of_one(tiny_run: Run, tmp_path: Path) -> None:
    """They resume after the first batch of an attack that one process started."""
    for name in ("one", "two"):
        shutil.copytree(tiny_run.path, tmp_path / name)
    arguments = ["pgd-20:steps=3", "adaptive:steps=4", "--batch-size", "64"]

    def crash(images: int, total: int) -> None:
        raise Crash

    def loaded(name: str) -> LoadedRun:
        return LoadedRun(Run(tmp_path / name), torch.device("cpu"))

    attacks = [(text, attack(text, tiny_run.recipe)) for text in arguments[:2]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for text, spec in attacks:
        run_attack(loaded("one"), text, spec, RecordOptions(batch_size=64))
    with pytest.raises(Crash):
        run_attack(loaded("two"), *attacks[0], RecordOptions(batch_size=64), crash)
    torch.set_num_threads(threads)
    assert len(list((tmp_path / "two/records").glob(".making-*/parts-*/0-64-*"))) == 1
    worker, root = tmp_path / "worker.py", str(Path(__file__).parents[1])
    worker.write_text(WORKER.format(root=root, server=forked._server()))
    both = forked.run([*TORCHRUN, str(worker), "attack", "two", *arguments], tmp_path, ENV)
    assert both.returncode == 0, both.stderr
    for name in ("pgd-20-steps-3", "adaptive-steps-4"):
        expected, found = arrays(tmp_path / "one", name), arrays(tmp_path / "two", name)
        assert {"y", "logits", "aux", "x_adv", "size_linf", "size_l2"} <= expected.keys()
        assert found == expected
    assert both.stderr.count("images correct") == 2, "one line per attack, from one process"
    assert not list((tmp_path / "two/records").glob(".making-*"))


def test_an_error_in_two_processes_is_one_sentence(tmp_path: Path) -> None:
    """Batches of 89 leave three images, and batch norm needs two in each process."""
    command = ("train", *BRIEF, "batch_size=89", "--out", "run")
    failed = two_processes(*command, folders=(tmp_path, tmp_path))
    for process in failed:
        _, said = process.communicate()
        assert process.returncode == 2
        assert said.startswith("demur: the last batch has 3 images, too few for 2 processes")
        assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
