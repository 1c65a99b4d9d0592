"""The four commands of the README: a folder of 300 PNGs becomes a served, calibrated guard."""

import json
import os
import re
import signal
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests import forked
from tests.own_images import write_folder
from tests.test_code_style import ROOT

BRIEF = ["size=16", "width=4", "epochs=1", "attack.steps=3", "validation_attack.steps=3"]
FEWER = {"attack": ["--n", "15"], "serve": ["--port", "0", "--device", "cpu"]}


def readme_commands() -> list[list[str]]:
    """The commands of the section about own images, without comments."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    section = text[text.index("## Your own images") :]
    block = re.search(r"```text\n(.*?)```", section, re.S)
    assert block is not None
    return [line.split("#")[0].split() for line in block[1].splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four")
    write_folder(root / "photos", 300, side=16)
    return root


def test_four_commands_lead_from_a_folder_to_a_served_guard(folder: Path) -> None:
    """As the README has them, with a smaller net and a shorter attack, each in a process."""
    commands = readme_commands()
    assert [words[:2] for words in commands] == [
        ["demur", word] for word in ("train", "attack", "export", "serve")
    ]
    env = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    start = time.monotonic()
    for _, name, *words in commands[:3]:
        more = BRIEF if name == "train" else FEWER.get(name, [])
        short = ["adaptive:steps=3" if word == "adaptive" else word for word in words]
        done = forked.run(["-m", "demur", name, *short, *more], folder, env)
        assert done.returncode == 0, done.stderr
    _, name, *words = commands[3]
    served = forked.popen(["-m", "demur", name, *words, *FEWER["serve"]], folder, env)
    try:
        lines = iter(served.stderr.readline, "")
        address = next(line for line in lines if "serving at" in line).split()[-1]
        answer = ask(address, folder / "photos" / "fish" / "2.png")
        assert time.monotonic() - start < 300
    finally:
        served.send_signal(signal.SIGINT)
        served.wait(timeout=60)
    (result,) = answer["predictions"]
    assert result["class"] in ("cat", "dog", "fish")
    assert result["accepted"] in (True, False)
    assert "R-Con" in str(result["reason"])
    config = json.loads((folder / "guard" / "config.json").read_text())
    assert config["calibration"]["images"] == 45
    assert config["class_names"] == ["cat", "dog", "fish"]
    card = (folder / "guard" / "README.md").read_text()
    assert "pgd-20" in card, "the card has the figures under attack"


def ask(address: str, image: Path) -> dict[str, list[dict[str, object]]]:
    """The answer of /predict for one file."""
    request = Request(
        f"{address.rstrip('/')}/predict", image.read_bytes(), {"Content-Type": "image/png"}
    )
    with urlopen(request, timeout=60) as answer:
        found: dict[str, list[dict[str, object]]] = json.loads(answer.read())
    return found
