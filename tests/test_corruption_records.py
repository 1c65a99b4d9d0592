"""Corruptions and C&W as records of a run, and the cells of the paper's tables made from them."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

from demur import metrics
from demur.attacks import CW, Corruption
from demur.attacks.corruption import CorruptionName, enlarge, shrink
from demur.data import CIFAR10
from demur.data.corruptions import CORRUPTIONS, corrupt, find_source
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, RejectorEvaluation, archive, run_attack, values
from demur.evaluate.archive import ArchiveKeepsLess
from demur.output import Output
from demur.paper.cells import Cell, measure_cells
from demur.paper.pages import results_page
from demur.paper.paper_runs import accuracy_by_severity, pool_severities, severities
from demur.paper.published import PAPER_CORRUPTIONS, PAPER_TABLES, PaperTable
from demur.paper.scales import SCALES, Scale
from demur.paper.studies import counted_distances, distances_of
from demur.recipes import RECIPES, Recipe, attack, attack_group
from demur.rejectors import GDA, GMM, RCon
from demur.runs import Record, Run
from tests.cifar_files import use_small_set
from tests.conftest import Command
from tests.test_cifar10c import release

N = 60
PAPER_FOG = Corruption("fog")


def net(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1)[:, :10]


def test_an_image_gets_the_corruption_of_its_index() -> None:
    x = torch.linspace(0, 1, 7 * 3 * 32 * 32).view(7, 3, 32, 32).mul(255).round() / 255
    index, y = torch.tensor([4, 9, 1, 13, 6, 2, 5]), torch.zeros(7, dtype=torch.int64)
    mixed = PAPER_FOG(net, x, y, index)
    pixels = (x * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for row, i in enumerate(index.tolist()):
        severity = 1 + i % 5
        wanted = corrupt(pixels[row : row + 1], "fog", severity, index=[i])
        found = (mixed[row] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        assert np.array_equal(found, wanted[0])
        alone = Corruption("fog", severity)(net, x[row : row + 1], y[:1], index[row : row + 1])
        assert torch.equal(alone, mixed[row : row + 1])


def test_small_and_grey_images_are_enlarged_and_averaged() -> None:
    x = torch.arange(2 * 64).view(2, 1, 8, 8) / 255
    assert enlarge(x).shape == (2, 32, 32, 3)
    assert torch.allclose(shrink(enlarge(x), x), x)
    odd = torch.arange(105).view(1, 3, 5, 7) / 255
    assert torch.allclose(shrink(enlarge(odd), odd), odd)
    for shape in ((2, 8, 8), (3, 8, 33), (3, 64, 64)):
        with pytest.raises(BadInput, match="at most 32 x 32 pixels"):
            enlarge(torch.zeros(1, *shape))


def test_names() -> None:
    assert CorruptionName.__args__ == CORRUPTIONS  # type: ignore[attr-defined]
    recipe = RECIPES["digits-pgdat"]
    assert attack_group("pgd-10") == ["pgd-10"]
    group = [attack(text, recipe) for text in attack_group("corruptions:severity=3")]
    assert group == [Corruption(name, 3) for name in CorruptionName.__args__]  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="severity must be"):
        Corruption("fog", 6)


def test_released_images_are_found_by_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_set(CIFAR10, monkeypatch, tmp_path)
    test = CIFAR10().load(tmp_path)["test"]
    assert find_source(tmp_path, "fog").kind == "generated"
    assert find_source(tmp_path, "frost").kind == "generated, procedural texture"
    images = release(tmp_path, "fog").reshape(5, -1, 32, 32, 3)
    source, rows = find_source(tmp_path, "fog"), torch.tensor([3, 0])
    x, _ = test.batch(rows)
    made = Corruption("fog", 4).corrupt(x, test.index[rows], source)
    assert source.kind == "released"
    assert np.array_equal((made * 255).round().permute(0, 2, 3, 1).numpy(), images[3][[3, 0]])
    assert find_source(tmp_path, "fog", released=False).kind == "generated"


@pytest.fixture(scope="module")
def corrupted(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    """A run with records of fog, mixed and at each severity, of contrast, and of C&W."""
    copy = copytree(tiny_run.path, tmp_path_factory.mktemp("corrupted") / "run")
    loaded = LoadedRun(Run(Path(copy)), "cpu")
    options = RecordOptions(n=N, keep_images=0)
    texts = ["corruption:name=contrast", "corruption:name=fog"]
    for text in texts + [f"corruption:name=fog,severity={s}" for s in range(1, 6)]:
        run_attack(loaded, text, attack(text, loaded.run.recipe), options)
    for text in ("cw", "cw-adaptive"):
        cw = replace(attack(text, loaded.run.recipe), searches=2, steps=20, rate=0.1, constant=5.0)  # type: ignore[call-arg]
        run_attack(loaded, text, cw, RecordOptions(n=12, keep_images=0))
    return loaded


def record_of(loaded: LoadedRun, label: str) -> Record:
    (found,) = [one for one in loaded.run.records("test") if one.label == label]
    return found


def test_a_record_says_where_its_images_come_from(corrupted: LoadedRun) -> None:
    fog = record_of(corrupted, "corruption:name=fog")
    assert fog.metadata["source"] == "generated"
    assert np.array_equal(severities(fog), 1 + fog.arrays["index"].numpy() % 5)


def test_pooled_and_separate_thresholds(corrupted: LoadedRun) -> None:
    parts = [record_of(corrupted, f"corruption:name=fog,severity={s}") for s in range(1, 6)]
    pooled = pool_severities(parts)
    assert len(pooled.y) == 5 * N
    assert np.array_equal(severities(pooled), np.repeat(np.arange(1, 6), N))
    score = values(RCon(), pooled)
    own = [metrics.paper_stats(values(RCon(), one), one.correct, 0.95).accuracy for one in parts]
    assert accuracy_by_severity(score, pooled, 0.95) == pytest.approx(np.mean(own))


class TinyScale(Scale):
    """The tiny run in place of every net."""

    def __init__(self, recipe: Recipe) -> None:
        object.__setattr__(self, "tiny", recipe)

    def recipe(self, entry: str, changes: object) -> Recipe | None:
        return self.tiny if entry == "pgdat-rr" else None  # type: ignore[attr-defined]

    def attack_text(self, text: str, recipe: Recipe) -> str:
        return text + (":searches=2,steps=20,rate=0.1,constant=5" if text.startswith("cw") else "")


def tiny_cells(loaded: LoadedRun) -> list[Cell]:
    """The cells of Tables 3 and 7 from the records of a tiny run."""
    tables: list[PaperTable] = [PAPER_TABLES[3], PAPER_TABLES[7]]
    SCALES["tiny"] = TinyScale(loaded.run.recipe)
    try:
        return measure_cells(tables, loaded.run.path.parent, lambda run: loaded, print, ["tiny"])
    finally:
        del SCALES["tiny"]


@pytest.fixture(scope="module")
def cells(corrupted: LoadedRun) -> list[Cell]:
    return tiny_cells(corrupted)


def test_cells_of_corruptions(corrupted: LoadedRun, cells: list[Cell]) -> None:
    found = {cell.column: cell for cell in cells if cell.table == 3 and cell.measured is not None}
    assert set(found) == {"fog", "contrast"} < set(PAPER_CORRUPTIONS)
    parts = [record_of(corrupted, f"corruption:name=fog,severity={s}") for s in range(1, 6)]
    pooled = pool_severities(parts)
    score = values(RCon(), pooled)
    stats = metrics.paper_stats(score, pooled.correct, 0.95)
    assert (found["fog"].measured, found["fog"].n) == (100 * stats.accuracy, 5 * N)
    assert found["contrast"].n == N
    assert found["contrast"].protocol.endswith("generated images")
    by_severity = found["fog"].variants["a threshold for each severity"]
    assert by_severity == 100 * accuracy_by_severity(score, pooled, 0.95)


def test_a_scores_only_record_of_a_corruption_keeps_the_scores_of_its_cell(
    corrupted: LoadedRun, cells: list[Cell], tmp_path: Path
) -> None:
    kept = archive(corrupted, tmp_path / "kept" / "run", ["R-Con"])
    for record in kept.records("test"):
        whole = record_of(corrupted, record.label)
        if record.label.startswith("corruption"):
            assert set(record.arrays) == {"y", "index", "scores", "correct"}
            assert list(record.stored_scores) == ["Con(tau=1.0)", "RCon(tau=1.0)"]
            assert np.array_equal(values(RCon(), record), values(RCon(), whole))
            assert np.array_equal(record.correct, whole.correct)
            for norm in ("linf", "l2"):
                largest = float(whole.arrays[f"size_{norm}"].max())
                assert record.metadata[f"largest_{norm}"] == largest
        else:
            assert list(record.stored_scores) == ["Con(tau=1.0)", "RCon(tau=1.0)", "T-Con"]
            assert "size_linf" in record.arrays
    again = tiny_cells(LoadedRun(kept, "cpu"))
    assert [replace(cell, record="") for cell in again] == [
        replace(cell, record="") for cell in cells
    ]


def test_an_earlier_archive_with_t_con_of_corruptions_is_replaced(
    corrupted: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        module = sys.modules["demur.evaluate.archive"]  # the package has a function of this name
        earlier.setattr(module, "is_corruption", lambda metadata: False)
        old = LoadedRun(archive(corrupted, tmp_path / "run", ["R-Con"]), "cpu")
    assert "T-Con" in record_of(old, "corruption:name=fog").stored_scores
    new = LoadedRun(archive(corrupted, tmp_path / "run", ["R-Con"], again=True), "cpu")
    assert "T-Con" not in record_of(new, "corruption:name=fog").stored_scores
    with pytest.raises(ArchiveKeepsLess, match="keeps more of"):
        archive(corrupted, tmp_path / "run", ["Energy"], again=True)


def test_a_record_of_a_corruption_without_confidence_is_not_scored(
    corrupted: LoadedRun, tmp_path: Path, command: Command
) -> None:
    kept = archive(corrupted, tmp_path / "run", ["Energy"])
    fog, cw = (record_of(LoadedRun(kept, "cpu"), one) for one in ("corruption:name=fog", "cw"))
    assert list(fog.stored_scores) == ["Energy(tau=1.0)"]
    assert list(cw.stored_scores) == ["Con(tau=1.0)", "Energy(tau=1.0)", "T-Con"]
    code, out, err = command("score", str(kept.path), "--json")
    assert code == 0, err
    assert re.search(r"without \d+ of \d+ records: archived without confidence", err)
    assert {row["attack"] for row in json.loads(out)["rows"]} == {"cw", "cw-adaptive"}


def test_a_record_of_a_corruption_with_confidence_is_scored_without_t_con(
    corrupted: LoadedRun, tmp_path: Path
) -> None:
    kept = LoadedRun(archive(corrupted, tmp_path / "run", ["R-Con"]), "cpu")
    before, after = (
        RejectorEvaluation.of(one).score_record(record_of(one, "corruption:name=fog"))
        for one in (corrupted, kept)
    )
    assert after.summary == before.summary
    assert {row.rejector for row in after.rows} == {"Con", "R-Con"}
    rows = [row for row in before.rows if row.rejector in ("Con", "R-Con")]
    assert [row.to_json() for row in after.rows] == [row.to_json() for row in rows]


def test_cells_of_distances(corrupted: LoadedRun, cells: list[Cell]) -> None:
    found = {cell.column: cell for cell in cells if cell.table == 7 and cell.measured is not None}
    assert set(found) == {f"CIFAR-{c}, L2, {w}" for c in (10, 100) for w in ("normal", "adaptive")}
    normal, adaptive = record_of(corrupted, "cw"), record_of(corrupted, "cw-adaptive")
    near, far = (distances_of(one, CW()) for one in (normal, adaptive))
    assert found["CIFAR-10, L2, normal"].measured == near.mean()
    counted = counted_distances(far, near)
    assert found["CIFAR-10, L2, adaptive"].measured == counted.mean()
    assert (far == 0)[counted > 0].any(), "some adaptive attack failed and counts as the normal one"
    beside = found["CIFAR-10, L2, adaptive"].variants
    assert beside["mean of the broken"] == far[far > 0].mean()
    assert beside["broken by a change, %"] == 100 * (far > 0).mean()
    page = results_page(cells, "demur paper table 7")
    assert "The same cells, mean of the broken:" in page


def test_the_ridge_of_the_reference_code() -> None:
    z = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 6)
    y = torch.arange(200) % 2
    logits = torch.nn.functional.one_hot(y, 2).float()
    output = Output(logits, z, z[:, :0])
    means = torch.stack([z[y == c].mean(0) for c in (0, 1)]).double()
    centred = z.double() - means[y]
    scatter = centred.t() @ centred + 1e-10 * torch.eye(5)
    inverse = torch.linalg.inv(scatter / 200)
    gaps = z.double()[:, None] - means
    found = GDA(inverse="reference").fit(output, y)(output).double()
    nearest = torch.einsum("ncd,de,nce->nc", gaps, inverse, gaps).amin(1)
    assert torch.allclose(found, -nearest, rtol=1e-3)
    assert not torch.allclose(found, GDA().fit(output, y)(output).double(), rtol=1e-5)
    assert GMM("reference").fit(output, y)(output).isfinite().all()


def test_the_command_runs_all_corruptions(command: Command, tiny_run: Run) -> None:
    copytree(tiny_run.path, Path("runs/tiny"))
    code, _, err = command("attack", "tiny", "corruptions:severity=5", "--n", "4")
    assert code == 0, err
    assert len(Run.open("tiny").records("test")) == 15
