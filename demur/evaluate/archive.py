"""A copy of a run that fits in a repository: no weights, features or images, but every score.

    archive(source, Path("results/NAME"))
    archive(source, Path("results/NAME"), only=["R-Con"])      # bare: a third of the room

Records keep what each learned rejector makes of every image beside the net's answers, so that all
tables can be made again from the copy alone. The clean cal record goes with them, since thresholds
come from it. Bare records keep the scores of some rejectors, Con and T-Con instead of the answers.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from demur.attacks import Clean
from demur.errors import BadInput, suggestion
from demur.evaluate.attack import Evaluator, no_progress
from demur.evaluate.binding import Binding
from demur.evaluate.certificates import MEND
from demur.evaluate.record_scores import TRUE, can_score, tcon_of, values
from demur.rejectors import Coupled, Rejector, TooFewImages, paper_grid
from demur.rule import Score
from demur.runs import Record, Run
from demur.runs.files import put_in_place, read_json, write_json
from demur.runs.record import record_path, write_record
from demur.spec import digest, show
from demur.version import code_version

COPIED = ("recipe.txt", "checkpoint.json", "metrics.jsonl")
DROPPED = ("feature", "x_adv")
ANSWERS = ("logits", "aux")  # what bare records have scores for
Metadata = dict[str, Any]


class ArchiveKeepsLess(BadInput):
    """A copy that would replace one that keeps more."""


def archive(
    evaluator: Evaluator,
    target: Path,
    only: Sequence[str] = (),
    watch: Callable[[int, int], None] = no_progress,
    again: bool = False,
) -> Run:
    """The archive of a run, with bare records of some rejectors if those are named.

    An earlier copy is in the way, unless it shall be made `again` and keeps nothing more.
    """
    asked = _named(evaluator, only) if only else _learned(evaluator)
    with put_in_place(target) as (half, place):
        _check_free(place, evaluator.run, again)
        guarantees, records = _promises(evaluator.run), _records(evaluator)
        binding = Binding(evaluator.clean, evaluator.device)
        scores = _bound(asked, records, binding, bool(only))
        thinned = []
        for done, record in enumerate(records):
            watch(done, len(records))
            thinned.append(_thinned(record, asked, scores, binding.fitted, bool(only)))
            if only:
                _check_all_found(asked, thinned[-1], evaluator.run)
        watch(len(records), len(records))
        _check_nothing_lost(place, thinned)
        _write(evaluator.run, thinned, guarantees, half)
    return Run(target)


def _check_free(target: Path, run: Run, again: bool) -> None:
    """Refuse a target that holds anything but a copy of the run that may be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    there, known = Run(target), (target / COPIED[0]).is_file()
    if not (again and known and there.recipe == run.recipe and not there.finished):
        raise BadInput(f"{target} is in the way; name a folder that is not there yet")
    if there.checkpoint["weights"] != run.checkpoint["weights"]:
        raise BadInput(f"{target} is a copy of another training; name another folder")


def _check_nothing_lost(target: Path, records: Sequence[Record]) -> None:
    """Refuse to replace a copy that keeps a record or a score which these do not."""
    if not (target / COPIED[0]).is_file():
        return
    made, there = {record.digest: record for record in records}, Run(target)
    for split in there.recipe.data.splits:
        for old in there.records(split):
            if _poorer(made.get(old.digest), old):
                raise ArchiveKeepsLess(
                    f"{target} keeps more of {old.label} than this copy would; name another folder"
                )


def _poorer(new: Record | None, old: Record) -> bool:
    """Whether a record keeps less than an earlier one of the same."""
    if new is None or (new.scores_only and not old.scores_only):
        return True
    return new.scores_only == old.scores_only and bool(set(old.kept) - set(new.kept))


def _promises(run: Run) -> dict[str, Metadata]:
    """What every certificate says, by its file's name; a damaged one is refused."""
    paths = sorted((run.path / "certificates").glob("*.json"))
    return {path.name: read_json(path, MEND) for path in paths}


def _write(
    run: Run, records: Sequence[Record], guarantees: Mapping[str, Metadata], folder: Path
) -> None:
    folder.mkdir()
    for name in COPIED:
        if (run.path / name).exists():
            shutil.copy2(run.path / name, folder / name)
    for name, metadata in guarantees.items():
        write_json(folder / "certificates" / name, metadata)
    for record in records:
        split = str(record.metadata["split"])
        path = record_path(folder / "records", record.label, split, record.digest)
        write_record(path, record, tight=True)


def _named(evaluator: Evaluator, only: Sequence[str]) -> dict[str, Rejector]:
    """The rejectors of these names by their whole text, Con first."""
    known = evaluator.run.recipe.rejectors()
    for name in only:
        if name not in known:
            raise BadInput(f"the run has no rejector called {name!r}; {suggestion(name, known)}")
        if isinstance(pair := known[name], Coupled):
            parts = [part for part, each in known.items() if each in (pair.gate, pair.score)]
            raise BadInput(f"{name} is made of two scores; name those: {','.join(parts)}")
    names = dict.fromkeys(("Con", *only))
    return {show(known[name], full=True): known[name] for name in names}


def _learned(evaluator: Evaluator) -> dict[str, Rejector]:
    """Every rejector that has to be learned, by its whole text."""
    recipe = evaluator.run.recipe
    asked: list[Rejector] = [*recipe.rejectors().values(), *paper_grid(recipe.data).values()]
    return {show(each, full=True): each for each in asked if not isinstance(each, Score)}


def _records(evaluator: Evaluator) -> list[Record]:
    """All but those of fit images; clean ones of the same images once, the fullest."""
    splits = [split for split in evaluator.run.recipe.data.splits if split != "fit"]
    found = [record for split in splits for record in evaluator.run.records(split)]
    if not found:
        raise BadInput(f"{evaluator.run.path} has no record yet; make one with demur attack")
    found += [evaluator.clean("cal")] if "cal" in splits else []
    clean, kept = digest(Clean()), dict[tuple[str, str, int], Record]()
    for record in found:
        attack, split = str(record.metadata["attack"]), str(record.metadata["split"])
        key = (split, attack if attack == clean else record.digest, len(record.y))
        if key not in kept or _fullness(record) > _fullness(kept[key]):
            kept[key] = record
    return list(kept.values())


def _fullness(record: Record) -> tuple[bool, bool, int]:
    return bool(record.metadata["features"]), not record.scores_only, len(record.kept)


def _bound(
    asked: Mapping[str, Rejector], records: Sequence[Record], binding: Binding, named: bool
) -> dict[str, Score]:
    """What can be computed here: what was learned is read where no record has features."""
    featured = any(record.metadata["features"] for record in records)
    scores = dict[str, Score]()
    for text, rejector in asked.items():
        if featured or isinstance(rejector, Score):
            # the tables leave it out too, unless it was named
            with nullcontext() if named else suppress(TooFewImages):
                scores[text] = binding.bound(rejector)
    return scores


def _thinned(
    record: Record,
    asked: Mapping[str, Rejector],
    scores: Mapping[str, Score],
    fitted: Mapping[str, str],
    bare: bool,
) -> Record:
    """The record with scores in place of what they were computed from."""
    made = {
        text: torch.from_numpy(values(score, record)).float()
        for text, score in scores.items()
        if can_score(score, record)
    }
    found = record.kept | made
    arrays = {name: array for name, array in record.arrays.items() if name not in DROPPED}
    about = record.metadata | {"archive": True, "features": False, "images": 0}
    if bare:
        found = {text: found[text] for text in asked if text in found}
        found[TRUE] = torch.from_numpy(tcon_of(record)).float()
        arrays = {name: array for name, array in arrays.items() if name not in ANSWERS}
        arrays["correct"] = torch.from_numpy(record.correct)
    if found:
        arrays["scores"] = torch.stack(list(found.values()))
    about["scores"] = list(found)
    if any(not isinstance(asked[text], Score) for text in made):
        about |= {"scores_fitted": sorted(set(fitted.values())), "scored_by": code_version()}
    elif bare and all(isinstance(asked[text], Score) for text in found if text != TRUE):
        about.pop("scores_fitted", None)
    return Record(arrays, about)


def _check_all_found(asked: Mapping[str, Rejector], record: Record, run: Run) -> None:
    """Refuse a rejector whose score a record cannot give, where no more than scores are kept."""
    for text in asked:
        if text not in record.kept:
            split = str(record.metadata["split"])
            path = record_path(run.records_folder, record.label, split, record.digest)
            raise BadInput(
                f"{path} has neither the features that {text} is computed from nor its score; "
                "make it again with demur attack, which keeps features, where the weights are"
            )
