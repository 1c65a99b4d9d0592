"""Every command that an error message prints is accepted, and no name is suggested for itself."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from demur.errors import suggestion
from demur.runs import Run
from tests.conftest import Command

VERB = (
    "attack|score|calibrate|report|archive|list|train|data|verify|bench|demo|paper|show|theory|table|"
    "adaptive|distortion"
)
# words of a command, quoted ones too, up to punctuation or the rest of the sentence
COMMAND = rf"demur ((?:{VERB})\b(?: (?!{{rest}})(?:'[^']*'|[^\s;,)?'])+)*)"
REST = r"(?:or|and|to|where|which|reads|shows|prints|since|makes|takes|-h)\b"
FILLED = {"RECIPE": "digits-standard", "RUN": "tiny", "DIR": "there", "NAME": "cifar10"}
WRONG_NAMES = [
    f"{verb} {name}{more}"
    for name in ("nothing", "tinny", "unfinished", "archive", "orphans", "'my runs/odd'", "hollow")
    for verb, more in (
        ("attack", " clean"), ("attack", " pdg-20"), ("score", ""), ("score", " --split cal"),
        ("calibrate", " --risk 0.05"), ("report", ""), ("list", ""), ("list", " epochs=3"),
        ("export --archive", " -o copy"), ("paper study theory", ""), ("paper study adaptive", ""),
        ("paper study distortion", ""),
        ("train", ""), ("verify", ""),
    )
]  # fmt: skip
WRONG = [
    *WRONG_NAMES, "list recipe", "list runs", "list runs nowhere", "list attacks 'my runs'",
    "data get mnist", "data get cifar", "paper table nothing",
    "train @nothing.txt", "train @tiny/model.safetensors", "train cifar10-pgdat-rr",
    "train cifar10-pgdat-rr --data 'my data'", "train digits-pgdat --out runs/tiny", "attack tiny",
    "attack tiny clean --split fitt", "score tiny --protocol papr", "calibrate tiny", "trian",
    "list digits-pgdat-r", "train digits-pgdat epochz=3", "attack tiny @nothing",
    "bench nothing", "verify",
    "train digits-pgdat --device cuda:99", "report tiny -o tiny", "theory tiny", "show tiny",
    "table 2 --from runs", "adaptive tiny", "distortion tiny", "paper study theory tiny --gamma 2",
    "",
]  # fmt: skip


class Began(BaseException):
    """The work of a command has begun."""


def begin(*_: object, **__: object) -> None:
    raise Began


@pytest.fixture
def runs(tiny_run: Run, in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and runs of which something is missing."""
    folder = in_empty_folder / "runs"
    shutil.copytree(tiny_run.path, folder / "tiny")
    for name, missing in (
        ("unfinished", ("checkpoint.json", "model.safetensors")),
        ("archive", ("model.safetensors",)),
        ("orphans", ("model.safetensors",)),
        ("../my runs/odd", ("model.safetensors",)),
    ):
        copy = shutil.copytree(tiny_run.path, folder / name)
        for file in missing:
            (Path(copy) / file).unlink()
    (folder / "orphans" / "records").mkdir(exist_ok=True)
    (folder / "orphans" / "records" / "clean-test-0.json").write_text("{}")
    (folder / "hollow" / "recipe.txt").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_empty_folder / "cache"))
    monkeypatch.delenv("DEMUR_DATA", raising=False)
    for work in ("demur.training.train", "demur.evaluate.recording.run_attack",
                 "demur.data.cifar.download", "demur.evaluate.run_attack"):  # fmt: skip
        monkeypatch.setattr(work, begin)
    return folder


def printed_commands(said: str) -> list[list[str]]:
    """The words after `demur` of each command in a message, with placeholders filled."""
    found = []
    for match in re.finditer(COMMAND.replace("{rest}", REST), said):
        found.append([FILLED.get(word, word) for word in shlex.split(match[1])])
    return found


def answer(command: Command, words: list[str]) -> str | None:
    """The sentence by which a command is refused; None if it is accepted."""
    try:
        code, _, said = command(*words)
    except Began:
        return None
    return None if code == 0 else said


def leads_somewhere(command: Command, words: list[str], first: str) -> bool:
    """Whether a printed command is accepted, is only a verb, or is refused for another reason."""
    if len(words) == 1:  # "make one with demur attack"
        return "no such command" not in (answer(command, [*words, "-h"]) or "")
    refusal = answer(command, words)
    return refusal is None or (refusal != first and not is_usage_error(refusal))


def is_usage_error(said: str) -> bool:
    """Whether a command line is wrong in itself: a name, an option, an argument."""
    return bool(
        re.search(r"no such|missing argument|unexpected|there is no|is called|in the way", said)
    )


def test_the_printed_commands_are_accepted_and_no_name_is_suggested_for_itself(
    command: Command, runs: Path
) -> None:
    tried: dict[str, str] = {}
    bad: list[str] = []
    for request in WRONG:
        words = shlex.split(request)
        said = answer(command, words)
        for match in re.finditer(r"did you mean (.*?)\?", said or ""):
            assert not set(match[1].replace("'", "").split(" or ")) & set(words), (request, said)
        for printed in printed_commands(said or ""):
            text = shlex.join(printed)
            if text not in tried and "torchrun" not in text:
                tried[text] = request
                if not leads_somewhere(command, printed, said or ""):
                    refusal = answer(command, printed)
                    bad.append(f"demur {request}\n  {said}  demur {text}\n  {refusal}")
    assert bad == [], "\n".join(bad)
    assert len(tried) > 12, tried


def test_a_suggestion_is_another_name() -> None:
    assert "did you mean demo?" not in suggestion("demo", ["demo"])
    assert suggestion("demo", ["demo", "demos"]) == "did you mean demos?"
