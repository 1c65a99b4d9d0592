"""The functions by which tables and figures train, attack and read runs."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from demur.paper.measure import Factories


def reading_factories(folder: str, device: str, data: str | None) -> "Factories":
    """Return factories that only read the stored runs of a folder."""
    from demur.cli.evaluate import load_run
    from demur.cli.progress import on_message
    from demur.paper.measure import stored_factories

    return stored_factories(
        Path(folder), lambda run: load_run(str(run.path), device, data), on_message
    )


def training_factories(
    device: str, data: str | None, engine: str, archive: str | None
) -> "Factories":
    """Return factories that train and attack with progress bars, and archive if asked to."""
    from demur.attacks import Attack
    from demur.cli.evaluate import attack_and_report, load_run
    from demur.cli.train import train_run
    from demur.evaluate import ArchiveKeepsLess, LoadedRun, RecordOptions
    from demur.evaluate import archive as archive_run
    from demur.paper.measure import Factories
    from demur.runs import Record
    from demur.runs.record import record_path

    def keep(loaded: LoadedRun, scores: Sequence[str]) -> None:
        if archive:
            archive_run(loaded, Path(archive) / loaded.run.name, scores, again=True)

    def craft(loaded: LoadedRun, label: str, attack: Attack, options: RecordOptions) -> Record:
        record = attack_and_report(loaded, label, attack, options)
        head_score, _ = loaded.run.recipe.head_rejector
        copies = Path(archive or "") / loaded.run.name / "records"
        if archive and not record_path(copies, record.label, options.split, record.digest).exists():
            # After every attack, so that a stop loses one attack at most. An earlier archive may
            # hold more scores than this one.
            with suppress(ArchiveKeepsLess):
                keep(loaded, [head_score])
        return record

    data_folder = Path(data) if data else None
    return Factories(
        train=lambda recipe, folder: train_run(recipe, folder, device, data_folder, engine),
        open=lambda run: load_run(str(run.path), device, data, engine),
        craft=craft,
        keep=keep,
    )
