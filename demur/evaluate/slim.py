"""A copy of a run that fits in a repository: no weights, features or images, but every score.

    slim(source, Path("results/NAME"))

Records keep what each rejector makes of every image, so that all tables can be made again from the
copy alone. The clean cal record goes with them, since thresholds come from it.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from demur.errors import BadInput
from demur.evaluate.attack import Source, unwatched
from demur.evaluate.binding import Binding
from demur.evaluate.values import can_score, values
from demur.rejectors import Rejector, TooFew, tried_on
from demur.rule import Score
from demur.runs import Record, Run, code_version
from demur.runs.record import record_path, write_record
from demur.spec import show

COPIED = ("recipe.txt", "chosen.json", "metrics.jsonl")
DROPPED = ("feature", "x_adv")


def slim(source: Source, target: Path, watch: Callable[[int, int], None] = unwatched) -> Run:
    """The slim copy of a run."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} is in the way; name a folder that is not there yet")
    splits = [split for split in source.run.recipe.data.splits if split != "fit"]
    records = [record for split in splits for record in source.run.records(split)]
    if not records:
        raise BadInput(f"{source.run.path} has no record yet; make one with demur attack")
    if "cal" in splits:
        known = {record.digest for record in records}
        records += [clean for clean in [source.clean("cal")] if clean.digest not in known]
    binding = Binding(source.clean, source.device)
    scores = learned_scores(source, records, binding)
    half = target.with_name(f".{target.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for name in COPIED:
        shutil.copy2(source.run.path / name, half / name)
    if (promised := source.run.path / "certificates").is_dir():
        shutil.copytree(promised, half / "certificates")
    for done, record in enumerate(records):
        watch(done, len(records))
        split = str(record.about["split"])
        path = record_path(half / "records", record.label, split, record.digest)
        write_record(path, _slim(record, scores, binding.fitted))
    watch(len(records), len(records))
    if target.exists():
        target.rmdir()
    half.replace(target)
    return Run(target)


def learned_scores(source: Source, records: list[Record], binding: Binding) -> dict[str, Score]:
    """Every rejector that has to be learned, fitted, by its whole text."""
    recipe = source.run.recipe
    asked: list[Rejector] = [*recipe.rejectors().values(), *tried_on(recipe.data).values()]
    learned = [rejector for rejector in asked if not isinstance(rejector, Score)]
    if not any(record.about["features"] for record in records):
        return {}
    scores = {}
    for rejector in learned:
        with suppress(TooFew):  # the tables leave it out too
            scores[show(rejector, full=True)] = binding.bound(rejector)
    return scores


def _slim(record: Record, scores: dict[str, Score], fitted: dict[str, str]) -> Record:
    """The record with scores in place of what they were computed from."""
    found = record.kept | {
        text: torch.from_numpy(values(score, record)).float()
        for text, score in scores.items()
        if can_score(score, record)
    }
    arrays = {name: array for name, array in record.arrays.items() if name not in DROPPED}
    if found:
        arrays["scores"] = torch.stack(list(found.values()))
    about = record.about | {"slim": True, "features": False, "images": 0, "scores": list(found)}
    if scores:
        about |= {"scores_fitted": sorted(set(fitted.values())), "scored_by": code_version()}
    return Record(arrays, about)
