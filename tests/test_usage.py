"""Words that a command does not take: one line that says what to do, before any work."""

import pytest

from tests.conftest import Command
from tests.test_cli import refused

NUMBERS = [
    "bench refusals RUN --times", "calibrate RUN --risk", "calibrate RUN --tpr",
    "calibrate RUN --coverage", "calibrate RUN --risk 0.05 --confidence", "theory RUN --rho",
    "theory RUN --gamma 0.7 --gamma",
]  # fmt: skip


@pytest.mark.parametrize("words", NUMBERS)
@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_must_be_finite(words: str, number: str, command: Command) -> None:
    option = words.rsplit(maxsplit=1)[-1]
    floor = option == "--times" and number != "inf"
    sentence = "equal to 0" if floor else f"{option} is {number}; give a finite number"
    refused(command(*words.split(), number), option, sentence)
