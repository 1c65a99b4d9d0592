"""Archive or pack a run: copy it without weights and images, so that it fits in a repository.

Scores-only records keep Con, T-Con and the named scores, and L2 norms if the attack uses them;
those of corruptions keep the named scores, Con only beside R-Con, and neither T-Con nor norms.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demur.attacks import Clean
from demur.errors import BadInput
from demur.evaluate.binding import ThresholdResolver
from demur.evaluate.certificates import REMEDY
from demur.evaluate.record_scores import can_score, tcon_of, values
from demur.evaluate.recording import LoadedRun, RecordOptions, run_attack
from demur.evaluate.score import BASELINE, boundary_counts
from demur.files.checked_files import check_private_key, replace_folder, sign_folder, write_json
from demur.files.output_paths import check_output_folder
from demur.progress import ignore
from demur.recipes import Recipe
from demur.rejectors import Con, Coupled, RCon, Rejector, TooFewImages, paper_grid
from demur.rejectors.rule import Score
from demur.runs import Record, Run
from demur.runs.metadata import CERTIFICATE, read_metadata
from demur.runs.record import TRUE, identity, is_corruption, record_path, write_record
from demur.spec import digest, show
from demur.version import code_version

COPIED_FILES = ("recipe.txt", "checkpoint.json", "metrics.jsonl")
DROPPED_ARRAYS = ("feature", "x_adv", "scores")
OUTPUT_ARRAYS = ("logits", "aux")  # scores-only records have scores instead of these
Json = dict[str, Any]
PACKED_ARRAYS = ("y", "index", "size_linf", "size_l2", "logits", "aux", "feature")


class ArchiveKeepsLess(BadInput):
    """The new archive would contain less than the one it replaces."""


def archive(
    loaded: LoadedRun, target: Path, only: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = ignore, again: bool = False,
    sign: str | Path | None = None,
) -> Run:  # fmt: skip
    """Write the archive of a run, and return it as a run without weights.

    `only` names rejectors: records are then scores-only, with these, Con and T-Con; those of
    corruptions have no T-Con, and Con only if R-Con is named. Without it the scores of rejectors
    that are fitted to features are stored at all settings of the paper. `again` replaces an archive
    of the same weights that contains nothing more, `sign` is a private key in a PEM file, and
    `on_progress` gets (records done, in all).
    """
    check_private_key(sign)
    recipe = loaded.run.recipe
    named = _named(recipe, only)
    every = [*recipe.rejectors().values(), *paper_grid(recipe.data).values()]
    kept = {show(one, full=True): one for one in every if not isinstance(one, Score)}
    if only:
        con = recipe.rejectors()[BASELINE]
        kept = {show(con, full=True): con, **named}
    with replace_folder(target) as (half, resolved):
        check_replaceable(resolved, loaded.run, again)
        paths = sorted((loaded.run.path / "certificates").glob("*.json"))
        certificates = {path.name: read_metadata(path, CERTIFICATE, REMEDY) for path in paths}
        records = _records(loaded)
        _ = loaded.run.metrics_state  # raises if metrics.jsonl, which is copied, was changed
        binding = ThresholdResolver(loaded.clean, loaded.device)
        scores = _fit(kept, records, binding, bool(only))
        scorer = _Scorer(loaded.run, kept, named, scores, binding.fitted)
        archived = []
        for done, record in enumerate(records):
            on_progress(done, len(records))
            archived.append(scorer.archived(record))
        on_progress(len(records), len(records))
        _check_nothing_lost(resolved, archived)
        write_archive(loaded.run, archived, certificates, half, sign)
    return Run(target)


def check_replaceable(target: Path, run: Run, again: bool) -> None:
    """Raise BadInput if the target exists and is not an archive of the run to be made again."""
    check_output_folder(str(target), "run")
    if not target.exists() or not any(target.iterdir()):
        return
    existing, is_run = Run(target), (target / COPIED_FILES[0]).is_file()
    if not (again and is_run and existing.recipe == run.recipe and not existing.has_weights):
        raise BadInput(f"{target} is in the way; name a folder that does not exist yet")
    if existing.checkpoint["weights"] != run.checkpoint["weights"]:
        raise BadInput(f"{target} is an archive of other weights; name another folder")


def _check_nothing_lost(target: Path, records: Sequence[Record]) -> None:
    """Raise ArchiveKeepsLess if the target contains a record or a score that these lack."""
    if not (target / COPIED_FILES[0]).is_file():
        return
    copies, existing = {record.digest: record for record in records}, Run(target)
    for old in (one for split in existing.recipe.data.splits for one in existing.records(split)):
        new, scores = copies.get(old.digest), set(old.stored_scores)
        if is_corruption(old.metadata):  # earlier archives of corruptions have these too
            scores -= {TRUE, show(Con(), full=True)}
        if new is not None and new.scores_only == old.scores_only:
            kept = scores <= set(new.stored_scores)
        else:
            kept = new is not None and old.scores_only
        if not kept:
            raise ArchiveKeepsLess(
                f"{target} keeps more of {old.label} than this copy would; name another folder"
            )


def write_archive(
    run: Run, records: Sequence[Record], certificates: Mapping[str, Json], folder: Path,
    sign: str | Path | None = None,
) -> None:  # fmt: skip
    """Write a run without weights into a new folder, with these records and certificates."""
    folder.mkdir()
    for name in COPIED_FILES:
        if (run.path / name).exists():
            shutil.copy2(run.path / name, folder / name)
    for name, metadata in certificates.items():
        write_json(folder / "certificates" / name, metadata)
    for record in records:
        split = str(record.metadata["split"])
        path = record_path(folder / "records", record.label, split, record.digest)
        write_record(path, record, tight=True)
    if sign is not None:
        sign_folder(folder, sign)


def _named(recipe: Recipe, names: Sequence[str]) -> dict[str, Rejector]:
    """Rejectors of these names by their full spec."""
    known, chosen = recipe.rejectors(), dict[str, Rejector]()
    for name in map(recipe.find_rejector, names):
        one = known[name]
        if isinstance(one, Coupled):
            parts = [part for part, other in known.items() if other in (one.gate, one.score)]
            raise BadInput(f"{name} is made of two scores; name those: {','.join(parts)}")
        chosen[show(one, full=True)] = one
    return chosen


def _records(loaded: LoadedRun) -> list[Record]:
    """Records to archive: all but those of the fit split, and of equal clean ones the fullest."""
    splits = [split for split in loaded.run.recipe.data.splits if split != "fit"]
    found = [record for split in splits for record in loaded.run.records(split, loaded.model_key)]
    if not found:
        raise BadInput(f"{loaded.run.path} has no record yet; make one with demur attack")
    found += [loaded.clean("cal")] if "cal" in splits else []
    clean, fullest = digest(Clean()), dict[tuple[str, str, int], Record]()
    for record in found:
        attack, split = str(record.metadata["attack"]), str(record.metadata["split"])
        key = (split, attack if attack == clean else record.digest, len(record.y))
        fullest[key] = max(
            (fullest.get(key, record), record),
            key=lambda one: (one.metadata["features"], not one.scores_only, len(one.stored_scores)),
        )
    return list(fullest.values())


def _fit(
    rejectors: Mapping[str, Rejector], records: Sequence[Record], binding: ThresholdResolver,
    named: bool,
) -> dict[str, Score]:  # fmt: skip
    """Scores that can be computed; if no record has features, fitted ones must be stored."""
    with_features = any(record.metadata["features"] for record in records)
    scores = dict[str, Score]()
    for text, rejector in rejectors.items():
        if with_features or isinstance(rejector, Score):
            # tables leave out a rejector with too few images too, unless the user named it
            with nullcontext() if named else suppress(TooFewImages):
                scores[text] = binding.bound(rejector)
    return scores


@dataclass(frozen=True)
class _Scorer:
    run: Run
    rejectors: Mapping[str, Rejector]  # whose scores are stored, by full spec
    named: Mapping[str, Rejector]  # in scores-only archives: those that the user named
    scores: Mapping[str, Score]  # that can be computed
    fitted: Mapping[str, str]  # digests of the records that they were fitted to

    def archived(self, record: Record) -> Record:
        """Copy of a record with scores instead of the features that they were computed from."""
        computed = {
            text: torch.from_numpy(values(score, record)).float()
            for text, score in self.scores.items()
            if can_score(score, record)
        }
        stored = record.stored_scores | computed
        arrays = {name: a for name, a in record.arrays.items() if name not in DROPPED_ARRAYS}
        metadata = record.metadata | {"archive": True, "features": False, "images": 0}
        metadata.pop("recipe", None)  # recipe.txt, whose digest the checkpoint has
        if any(not isinstance(self.rejectors[text], Score) for text in computed):
            by = {"scores_fitted": sorted({*self.fitted.values()}), "scored_by": code_version()}
            metadata |= by
        if self.named:
            stored = self._keep_scores_only(record, stored, arrays, metadata)
        for name in ("linf", "l2") if "logits" not in arrays else ():
            needed = "L2" in metadata["spec"] if name == "l2" else "L2(" not in metadata["spec"]
            measured = needed and not is_corruption(metadata)
            if not measured and (size := arrays.pop(f"size_{name}", None)) is not None:
                metadata[f"largest_{name}"] = float(size.max())
        if stored:
            arrays["scores"] = torch.stack(list(stored.values()))
        return Record(arrays, metadata | {"scores": list(stored)})

    def _keep_scores_only(
        self, record: Record, stored: Mapping[str, Tensor], arrays: dict[str, Tensor], known: Json
    ) -> dict[str, Tensor]:
        """The scores to keep; correctness replaces the outputs in `arrays`."""
        of_corruption = is_corruption(record.metadata)
        has_rcon = any(isinstance(one, RCon) for one in self.named.values())
        # under a corruption R-Con is compared with Con, and other scores with nothing
        kept = self.named if of_corruption and not has_rcon else self.rejectors
        for text in kept:
            if text not in stored:
                split = str(record.metadata["split"])
                path = record_path(self.run.records_folder, record.label, split, record.digest)
                raise BadInput(
                    f"{path} has neither the features that {text} is computed from nor its score; "
                    "make it again with demur attack, which keeps features, where the weights are"
                )
        for name in OUTPUT_ARRAYS:
            arrays.pop(name, None)
        arrays["correct"] = torch.from_numpy(record.correct)
        if not record.scores_only:  # otherwise they are in its metadata, or unknown
            known["just_past"], known["just_before"] = boundary_counts(record)
        if all(isinstance(rejector, Score) for rejector in kept.values()):
            for key in ("scores_fitted", "scored_by"):
                known.pop(key, None)
        true = {} if of_corruption else {TRUE: torch.from_numpy(tcon_of(record)).float()}
        return {text: stored[text] for text in kept} | true


def pack(
    loaded: LoadedRun, target: Path, count: int = 1000,
    on_progress: Callable[[int, int], None] = ignore, sign: str | Path | None = None,
) -> Run:  # fmt: skip
    """Write the pack of a run: the first `count` images of each record; return it as a run.

    Features are stored in half precision. A clean fit record of as many images is added, on
    which rejectors are fitted, so a new rejector gets its rows without the net and without the
    data. BadInput is raised if the target exists, the count is not positive, or no record has
    features. `on_progress` and `sign` are as in `archive`.
    """
    check_private_key(sign)
    if count < 1:
        raise BadInput(f"a pack needs at least 1 image of each record, not {count}")
    with replace_folder(target) as (half, resolved):
        check_replaceable(resolved, loaded.run, again=False)
        records, packed = _packed_records(loaded, count), list[Record]()
        for done, record in enumerate(records):
            on_progress(done, len(records))
            packed.append(_packed(record, count))
        on_progress(len(records), len(records))
        write_archive(loaded.run, packed, {}, half, sign)
    return Run(target)


def _packed_records(loaded: LoadedRun, count: int) -> list[Record]:
    """The records with features, and a clean one of the fit split."""
    splits = [split for split in loaded.run.recipe.data.splits if split != "fit"]
    every = (record for split in splits for record in loaded.run.records(split))
    records = [record for record in every if record.metadata["features"]]
    if not any(record.metadata["split"] == "test" for record in records):
        raise BadInput(
            f"{loaded.run.path} has no test record with features; make one with demur attack "
            "where the weights are"
        )
    fit = loaded.splits["fit"]
    options = RecordOptions("fit", n=min(count, len(fit)), keep_images=0)
    records = [run_attack(loaded, "clean", Clean(), options), *records]
    if "cal" in splits:
        records.append(loaded.clean("cal"))
    return list({record.digest: record for record in records}.values())


def _packed(record: Record, count: int) -> Record:
    """The first images of a record, features in half precision."""
    arrays = {name: record.arrays[name][:count].clone() for name in PACKED_ARRAYS}
    half = arrays["feature"].half()
    if not half.isinf().any():  # no value is too large for it
        arrays["feature"] = half
    metadata: dict[str, Any] = record.metadata | {"archive": True, "images": 0}
    if len(arrays["y"]) < len(record.y):  # another set of images is another record
        short = identity(first=len(arrays["y"]), of=record.digest)
        metadata |= {"n": len(arrays["y"]), "digest": short, "first_of": record.digest}
    return Record(arrays, metadata)
