"""A copy of a run that fits in a repository: no weights, features or images, but every score.

    slim(source, Path("results/NAME"))

Records keep what each rejector makes of every image, so that all tables can be made again from the
copy alone. The clean cal record goes with them, since thresholds come from it. Where only some
rejectors are asked for, their scores, Con and T-Con are all that is left of the answers: bare
records take a third of the room.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from demur.attacks import Clean
from demur.errors import BadInput, suggestion
from demur.evaluate.attack import Source, unwatched
from demur.evaluate.binding import Binding
from demur.evaluate.values import TRUE, can_score, true_confidence, values
from demur.rejectors import Rejector, TooFew, tried_on
from demur.rule import Score
from demur.runs import Record, Run, code_version
from demur.runs.record import record_path, write_record
from demur.spec import digest, show

COPIED = ("recipe.txt", "chosen.json", "metrics.jsonl")
DROPPED = ("feature", "x_adv")
KEPT_BARE = ("y", "index", "size_linf", "size_l2")


def slim(
    source: Source,
    target: Path,
    only: Sequence[str] = (),
    watch: Callable[[int, int], None] = unwatched,
) -> Run:
    """The slim copy of a run, with bare records of some rejectors if those are named."""
    own = _named(source, only)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} is in the way; name a folder that is not there yet")
    splits = [split for split in source.run.recipe.data.splits if split != "fit"]
    records = _once([record for split in splits for record in source.run.records(split)])
    if not records:
        raise BadInput(f"{source.run.path} has no record yet; make one with demur attack")
    if "cal" in splits:
        records = _once([*records, source.clean("cal")])
    binding = Binding(source.clean, source.device)
    scores = learned_scores(source, records, binding) if not only else {}
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
        made = _bare(record, own, binding) if only else _slim(record, scores, binding.fitted)
        write_record(path, made)
    watch(len(records), len(records))
    if target.exists():
        target.rmdir()
    half.replace(target)
    return Run(target)


def _named(source: Source, only: Sequence[str]) -> dict[str, Rejector]:
    """The rejectors of these names by their whole text, Con first."""
    known = source.run.recipe.rejectors()
    for name in only:
        if name not in known:
            raise BadInput(f"the run has no rejector called {name!r}; {suggestion(name, known)}")
    names = dict.fromkeys(("Con", *only))
    return {show(known[name], full=True): known[name] for name in names}


def _once(records: list[Record]) -> list[Record]:
    """The records without further clean ones of the same images, which differ in what they kept."""
    clean, kept = digest(Clean()), dict[tuple[str, str, int], Record]()
    for record in records:
        attack, split = str(record.about["attack"]), str(record.about["split"])
        key = (split, attack if attack == clean else record.digest, len(record.y))
        if key not in kept or record.about["features"] > kept[key].about["features"]:
            kept[key] = record
    return list(kept.values())


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


def _bare(record: Record, own: dict[str, Rejector], binding: Binding) -> Record:
    """The record with some scores in place of the net's answers."""
    found: dict[str, Tensor] = {}
    for text, rejector in own.items():
        if text in record.kept:
            found[text] = record.kept[text]
        elif can_score(score := binding.bound(rejector), record):
            found[text] = torch.from_numpy(values(score, record)).float()
    found[TRUE] = torch.from_numpy(true_confidence(record)).float()
    arrays = {name: record.arrays[name] for name in KEPT_BARE}
    arrays["correct"] = torch.from_numpy(record.correct)
    arrays["scores"] = torch.stack(list(found.values()))
    about = record.about | {"slim": True, "features": False, "images": 0, "scores": list(found)}
    return Record(arrays, about | {"scored_by": code_version()})
