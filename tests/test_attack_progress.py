"""Progress within a batch: shares rise from 0 to 1 through targets, restarts and steps."""

import pytest
from torch import Tensor

from demur.attacks import APGD, FAB, Attack, MultiTarget, Square, TargetedMargin
from demur.attacks.balls import Linf
from demur.audits import ensemble_state
from demur.audits.ensembles import AutoAttack
from demur.progress import part, report, track
from tests.linear import LinearNet, centred_images

SMALL = Linf(1e-6)  # nothing succeeds, so that no part is skipped


@pytest.fixture(scope="module")
def batch() -> tuple[LinearNet, Tensor, Tensor]:
    net, x = LinearNet(0), centred_images(6)
    return net, x, net(x).logits.argmax(1)


@pytest.mark.parametrize(
    ("attack", "reports"),
    [
        (Square(SMALL, queries=7), 7),
        (APGD(SMALL, steps=4, restarts=3), 12),
        (FAB(SMALL, steps=3, restarts=2), 6),
        (MultiTarget(APGD(SMALL, steps=4, restarts=2, objective=TargetedMargin()), 3), 24),
    ],
)
def test_shares_rise_evenly_to_one(
    attack: Attack, reports: int, batch: tuple[LinearNet, Tensor, Tensor]
) -> None:
    shares: list[float] = []
    with track(shares.append):
        attack(*batch)
    assert shares == pytest.approx([(i + 1) / reports for i in range(reports)])


def test_nothing_is_reported_outside() -> None:
    report(1, 2)
    with part(0, 2):
        report(1, 2)
    shares: list[float] = []
    with track(shares.append), part(1, 2):
        report(1, 2)
    assert shares == [0.75]


def test_a_line_comes_within_the_only_batch_of_a_member(
    batch: tuple[LinearNet, Tensor, Tensor],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ensemble_state, "LINE_SECONDS", 0.0)
    net, x, y = batch
    attack = AutoAttack(net.eval(), eps=1e-6, version="custom", attacks_to_run=["apgd-ce"])
    attack.run_standard_evaluation(x, y, bs=6)
    printed = capsys.readouterr().out
    assert "apgd-ce: 3 of 6 images, " in printed
    assert printed.count(" s left") > 10


class Terminal:
    """Standard output that claims to be a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        return


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(ensemble_state, "BAR_SECONDS", 0.0)
    with ensemble_state.MemberProgress("square", 10, verbose=True) as progress:
        with progress.batch(4):
            report(1, 2)
        with progress.batch(6):
            report(1, 2)
    monkeypatch.undo()
    assert "square" in terminal.text
    assert "7/10 images" in terminal.text


def test_a_bar_of_a_training_fits_80_columns() -> None:
    from io import StringIO

    from rich.console import Console

    from demur.progress import Bar

    console = Console(width=80, force_terminal=True, file=StringIO())
    with Bar("train images-pgdat-rr-small-3f2a1c", console) as bar:
        bar.update(5, 10, "110/110 loss 1.60 val 100/100%")
        (shown,) = console.render_lines(bar.bar.get_renderable(), pad=False)
    text = "".join(segment.text for segment in shown)
    assert text.startswith("train images-pg…")
    assert " 50% 0:00:00 left " in text
    assert text.rstrip().endswith("110/110 loss 1.60 val 100/100%")
    assert len(text) <= 80
