"""Wrong arguments and options give one line that says what to do, before any work."""

import pytest

from tests.conftest import Command
from tests.test_cli import expect_error

NUMBERS = [
    "calibrate RUN --risk", "calibrate RUN --tpr",
    "calibrate RUN --coverage", "calibrate RUN --risk 0.05 --confidence",
    "paper study theory RUN --rho", "paper study theory RUN --gamma 0.7 --gamma",
]  # fmt: skip


@pytest.mark.parametrize("words", NUMBERS)
@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_must_be_finite(words: str, number: str, command: Command) -> None:
    option = words.rsplit(maxsplit=1)[-1]
    expect_error(command(*words.split(), number), f"{option} is {number}; give a finite number")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "no such command 'trian' (did you mean 'train'?); see demur -h"),
        ("data gett", "no such command 'gett' (did you mean 'get'?); see demur data -h"),
        ("train", "missing argument 'recipe'; see demur train -h"),
        ("attack", "missing argument 'RUN'; see demur attack -h"),
        ("train x --outt y", "no such option: --outt (did you mean --out?); see demur train -h"),
        ("score x -z", "no such option: -z; see demur score -h"),
        ("-z", "no such option: -z; see demur -h"),
        ("score x y", "got unexpected extra argument(s) (y); see demur score -h"),
        (
            "paper study recipes x --seeds",
            "option '--seeds' requires an argument; see demur paper study recipes -h",
        ),
    ],
)
def test_unknown_commands_and_options_give_one_line(
    words: str, sentence: str, command: Command
) -> None:
    assert command(*words.split()) == (2, "", f"demur: {sentence}\n")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("paper study theory x --rho ten", "--rho"),
        ("verify x --n many", "--n"),
        ("paper study recipes methods-digits --seeds 0", "--seeds"),
        ("attack x clean --n many", "--n"),
    ],
)
def test_invalid_values_give_one_line(words: str, option: str, command: Command) -> None:
    code, out, err = command(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"demur: invalid value for '{option}': ")
    assert err.endswith(" -h\n")
    assert err.count("\n") == 1


def test_a_command_group_alone_prints_its_help(command: Command) -> None:
    for words in ((), ("data",)):
        code, out, err = command(*words)
        assert (code, err) == (2, "")
        assert f"Usage: {' '.join(['demur', *words])} [OPTIONS] COMMAND" in out
