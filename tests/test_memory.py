"""Peak memory: an attack holds a few batches of pixels and features, however many images it has."""

import io
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from demur.evaluate import LoadedRun
from demur.files import checked_files
from demur.runs.record import write_npz
from tests import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss")
N, SIDE = 6000, 32
ONE_COPY = N * 3 * SIDE**2 * 4  # bytes of all images in fp32
MEASURED = f"""
import json, sys
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
import numpy as np, torch
from demur import LoadedRun, Run
from demur.data import MappedImages

def peak():
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024

file = Path(sys.argv[1]) / "pixels.npy"
pixels = np.lib.format.open_memmap(file, "w+", np.uint8, ({N}, 3, {SIDE}, {SIDE}))
pixels[:] = (np.arange({N}) % 251)[:, None, None, None]
pixels.flush()
pixels = np.lib.format.open_memmap(file, "c")
y, index = torch.arange({N}) % 10, torch.arange({N})
"""
ATTACK = (
    MEASURED
    + """
from demur.attacks import Clean
from demur.evaluate import RecordOptions, run_attack
from demur.output import Output

class Net(torch.nn.Module):  # as many features as pixels
    def forward(self, x):
        return Output(x[:, 0, 0, :10], x.flatten(1), x[:, 0, 0, :1])

loaded = LoadedRun(Run(Path(sys.argv[2])), "cpu")
images = MappedImages(torch.from_numpy(pixels), y, index, 255, file, pixels)
vars(loaded).update(net=Net(), splits={"test": images})
loaded.split_digests["test"] = loaded.run.checkpoint["data"]["test"]
few, all_images = (RecordOptions(n=n, batch_size=64, keep_images=n // 4) for n in (512, len(y)))
run_attack(loaded, "few", Clean(), few)
before = peak()
record = run_attack(loaded, "clean", Clean(), all_images)
grown = peak() - before
x = images.batch(slice(None))[0]
same = torch.equal(record.arrays["feature"], x.flatten(1))
print(json.dumps([grown, same and torch.equal(record.arrays["x_adv"], x[: len(y) // 4])]))
"""
)


def measured(script: str, *words: str) -> tuple[int, bool]:
    """Bytes by which the peak grew, and whether the results are right."""
    done = forked.run(["-c", script, *words])
    assert done.returncode == 0, done.stderr
    grown, right = json.loads(done.stdout)
    return grown, right


def test_an_attack_never_holds_all_images(own_source: LoadedRun, tmp_path: Path) -> None:
    """It took 4.3 times the images in fp32, and their features twice."""
    grown, right = measured(ATTACK, str(tmp_path), str(own_source.run.path))
    assert right
    assert grown < ONE_COPY


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [(torch.float32, zipfile.ZIP_LZMA), (torch.float32, zipfile.ZIP_DEFLATED),
     (torch.int64, zipfile.ZIP_DEFLATED)],
)  # fmt: skip
def test_arrays_in_pieces_give_the_same_file(dtype: torch.dtype, compression: int) -> None:
    values = (torch.randn(900, 300, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    streamed, whole = io.BytesIO(), io.BytesIO()
    write_npz(streamed, {"y": torch.arange(5), "feature": values.t()}, compression)
    with zipfile.ZipFile(whole, "w") as file:
        for name, array in (("y", np.arange(5)), ("feature", values.t().contiguous().numpy())):
            member = io.BytesIO()
            np.lib.format.write_array(member, array)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue(), compression)
    assert streamed.getvalue() == whole.getvalue()


def test_a_large_array_is_mapped_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_files, "MAPPED", 1)
    for array in (np.arange(600, dtype=">i4").reshape(3, 200), np.ones((5, 7), order="F")):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, array)
        size = stream.tell()
        stream.write(b"rest")
        stream.seek(0)
        found = checked_files.read_array(stream, size)
        assert isinstance(found, np.memmap)
        assert np.array_equal(found, array)
        assert found.dtype == array.dtype
        assert stream.read() == b"rest"
        stream.truncate(size - 1)
        stream.seek(0)
        with pytest.raises(ValueError, match=r"reshape|multiple"):
            checked_files.read_array(stream, size)


def test_a_mapped_tensor_that_was_changed_keeps_its_values(tmp_path: Path) -> None:
    np.arange(12, dtype=np.float32).tofile(tmp_path / "numbers")
    values = checked_files.mapped(tmp_path / "numbers", 3, 4)
    digest = checked_files.tensor_digest({"x": values})
    values[1] *= 2
    changed = values.clone()
    assert (
        checked_files.tensor_digest({"x": values})
        == checked_files.tensor_digest({"x": changed})
        != digest
    )
    assert torch.equal(values, changed)
