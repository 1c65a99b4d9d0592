"""The verdict of an audit: its grades, the flags behind them, and the page, JSON and Markdown."""

import json
import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from torch import Tensor, nn

from demur import AutoAttack, Con, RejectAutoAttack
from demur.attacks import APGD, FAB, PGD, AcceptedError, MaxMinMargin, Square, autoattack
from demur.attacks.attack_model import checked
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.wrappers import ModelWithScore
from demur.audits import AuditReport, audit, audit_report
from demur.audits.audit_page import provenance
from demur.audits.flags import (
    CHANGE,
    IMPLAUSIBLE,
    JUMP,
    MASKED,
    SLOPE,
    STUCK,
    UNCONFIRMED,
    answer_checks,
    implausible,
)
from demur.audits.preflight import foreign_checks, preflight_warnings
from demur.errors import BadInput
from demur.output import as_output, prediction
from demur.rejectors import ModelScore
from demur.rejectors.rule import Score
from demur.sanity.evidence import Grade
from demur.sanity.single_records import FLAT, NOT_RISEN
from tests import audit_zoo
from tests.audit_zoo import BROKEN, EPS, HONEST, ZOO, Entry, plain, robust
from tests.audit_zoo_odd import ALL
from tests.conftest import Command
from tests.samples import EXHAUSTIVE

N = 20
NAMES = [make.__name__.replace("_", " ") for make in BROKEN]
STORED = "48 of 48 lines from a clean image to twice the radius"
LONG = pytest.mark.exhaustive
pytestmark = pytest.mark.filterwarnings("ignore")


def few_games(*given: Any, **fields: Any) -> MaxMinMargin:
    return MaxMinMargin(*given, **fields | {"steps": 2, "restarts": 1})


@pytest.fixture(scope="module", autouse=True)
def short_attacks() -> Iterator[None]:
    """Few steps in every ensemble, and in the training of every net."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_zoo, "STEPS", audit_zoo.STEPS if EXHAUSTIVE else 150)
        patch.setattr(autoattack, "Square", partial(Square, queries=60))
        patch.setattr(autoattack, "FAST_QUERIES", 60)
        patch.setattr(autoattack, "FAST_STEPS", 10)
        patch.setattr(autoattack, "APGD", partial(APGD, steps=10))
        patch.setattr(autoattack, "FAB", partial(FAB, steps=2))
        patch.setattr(autoattack, "MaxMinMargin", few_games)
        yield


@cache
def audited(name: str, version: str = "", n: int = N) -> AuditReport:
    entry: Entry = ZOO[name]()
    version = version or ("auto" if "noise" in name else "fast")
    needs_cal = entry.rejector is not None and entry.threshold is None
    torch.manual_seed(0)
    return audit(
        entry.model, *entry.images(n), eps=entry.eps, rejector=entry.rejector,
        threshold=entry.threshold, cal=entry.images(60, "cal") if needs_cal else None,
        version=version, name=name,
    )  # fmt: skip


@cache
def signs_of(name: str) -> dict[str, str]:
    """Return what the checks of the model alone observe, by kind."""
    entry: Entry = ALL[name]()
    model, rule, (x, y) = entry.model, None, entry.images(48)
    if isinstance(entry.rejector, Score):
        rule = AcceptedError(entry.rejector, 0.5)
    elif entry.rejector is not None:
        model = ModelWithScore(model, entry.rejector)
        rule = AcceptedError(ModelScore(), entry.threshold or 0.5)
    torch.manual_seed(0)
    with checked(model, x, y) as (own, images, labels):
        before = prediction(own(images))
        pgd = PGD(Linf(EPS), steps=100 if EXHAUSTIVE else 25)
        x_adv = pgd.perturb(own, images, labels, torch.arange(len(y)))
        found = answer_checks(own, images, labels, x_adv, Linf(EPS), rule, before)
    assert all(flag.remedy for check in found for flag in check.flags)
    return {check.kind: " ".join(flag.observed for flag in check.flags) for check in found}


class TestFlags:
    """Each flag has a model that raises it and an honest one that does not."""

    @pytest.mark.parametrize(
        ("flag", "raises", "quiet", "words"),
        [
            (SLOPE, "decoy", "robust, seed 0", "48 of 48 clean images"),
            (SLOPE, "shattered input", "plain, seed 0", "clean images"),
            pytest.param(SLOPE, "reversed gradient", "bf16", "48 of 48 clean images", marks=LONG),
            (SLOPE, "gradient of another seed", "plain, seed 1", "random directions"),
            pytest.param(
                SLOPE, "gradient of a robust net", "fp16", "random directions", marks=LONG
            ),
            pytest.param(
                SLOPE, "soft quantised", "maximum of three nets", "clean images", marks=LONG
            ),
            (JUMP, "masked", "robust, seed 0", "48 of 48 lines"),
            pytest.param(JUMP, "purified", "mixture at temperature 0.01", "jumps", marks=LONG),
            pytest.param(
                JUMP, "cache by rounded image", "steep gate between two nets", "jumps", marks=LONG
            ),
            (JUMP, "seeded by input", "small noise", "A change of 0.0001"),
            pytest.param(JUMP, "hashed rejector", "Con", "A change of 0.0001", marks=LONG),
            (JUMP, "masked score", "Con", "the score jumps"),
            (JUMP, "stored images", "Con", STORED),
            pytest.param(JUMP, "stored images", "fp16", STORED, marks=LONG),  # slow on a CPU
            (CHANGE, "batch statistic", "robust, seed 0", "8 of 8 asked alone"),
            pytest.param(CHANGE, "order", "plain, seed 0", "in reverse order", marks=LONG),
            pytest.param(CHANGE, "order", "3x32x32 convolution", "in reverse order", marks=LONG),
            (CHANGE, "slow counter", "plain, seed 0", "differ"),
            pytest.param(CHANGE, "counter", "noise from its own generator", "differ", marks=LONG),
            (CHANGE, "batch rejector", "Con", "in half of the batch"),
        ],
    )
    def test_is_raised_by_a_broken_model_alone(
        self, flag: str, raises: str, quiet: str, words: str
    ) -> None:
        assert words in signs_of(raises)[flag]
        assert signs_of(quiet)[flag] == ""

    def test_a_loss_that_rises_and_flips_nothing(self) -> None:
        """The examples of the net that decides break a model with the gradients of another."""
        entry = ZOO["masked"]()
        x, y = entry.images(48)
        x_adv = PGD(Linf(EPS), steps=30)(entry.twin, x, y)
        for model, flagged in ((entry.model, True), (entry.twin, False)):
            with checked(model, x, y) as (own, images, labels):
                found = answer_checks(own, images, labels, x_adv, Linf(EPS), None, labels)
            (check,) = (check for check in found if check.kind == STUCK)
            assert bool(check.flags) == flagged
            assert all("never flipped the label" in flag.observed for flag in check.flags)

    @pytest.mark.parametrize(
        ("name", "attacks", "flagged"),
        [
            ("logits times 100", (), False),
            ("logits times 1000", (), False),
            ("logits times 100", ("apgd-ce",), True),
            ("saturated tanh", (), True),
        ],
    )
    def test_a_flat_cross_entropy_beside_attacks_on_logits(
        self, name: str, attacks: tuple[str, ...], flagged: bool
    ) -> None:
        """It hides nothing from attacks on logits, whose own gradient is not zero."""
        entry, version = ALL[name](), "custom" if attacks else "standard"
        chain = AutoAttack(
            entry.model, eps=EPS, verbose=False, version=version, attacks_to_run=attacks
        ).chain
        with checked(entry.model, *entry.images(48)) as (own, x, y):
            right = (prediction(own(x)) == y)[None].numpy()
            told = " ".join(preflight_warnings(own, chain, x, y, right))
            found, _ = foreign_checks(own, x, y, {"autoattack": (chain, x)}, prediction(own(x)))
        assert ("gradient is zero" in told) == flagged
        kinds = {flag.kind for check in found for flag in check.flags} - {NOT_RISEN}
        assert (FLAT in kinds) == flagged

    def test_a_net_in_float64_with_other_labels(self) -> None:
        class Half(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = plain()

            def forward(self, x: Tensor) -> Any:
                return self.net(x if x.dtype == torch.float32 else 1 - x)

        x, y = ZOO["plain, seed 0"]().images(40)
        for net, flagged in ((Half().eval(), True), (plain(), False)):
            with checked(deepcopy(net), x, y) as (own, images, labels):
                found = answer_checks(own, images, labels, x, Linf(EPS), None, prediction(own(x)))
            observed = [flag.observed for flag in found[2].flags]
            assert bool(observed) == flagged
            assert all("in float64" in text for text in observed)

    def test_square_where_gradients_fail(self) -> None:
        attack = partial(AutoAttack, version="custom", attacks_to_run=["apgd-ce", "square"])
        for name, masked in (("one hot logits", True), ("plain, seed 0", False)):
            entry = ZOO[name]()
            made = attack(entry.model, eps=0.25, verbose=False)
            made.chain = autoattack.Chain((APGD(Linf(0.25), steps=5), Square(Linf(0.25), 300)))
            result = made.evaluate(*entry.images(N))
            assert (MASKED in {flag.kind for flag in result.flags}) == masked
            assert (result.grade == Grade.BROKEN) >= masked

    @pytest.mark.parametrize(
        ("data", "ball", "left", "rejects", "flagged"),
        [
            ("cifar10", Linf(8 / 255), 950, False, True),
            ("cifar10", Linf(8 / 255), 700, False, False),
            ("cifar10", Linf(4 / 255), 950, False, False),  # nothing is known at a smaller radius
            ("cifar10", Linf(8 / 255), 950, True, False),  # half the radius
            ("cifar10", Linf(16 / 255), 950, True, True),
            ("imagenet", Linf(8 / 255), 700, True, True),
            ("cifar10", L2(0.5), 900, False, True),
            ("digits", Linf(0.1), 1000, False, False),
        ],
    )
    def test_a_figure_above_the_best_known_one(
        self, data: str, ball: Ball, left: int, rejects: bool, flagged: bool
    ) -> None:
        from demur.audits.ensemble_result import EnsembleResult

        y = torch.zeros(1000, dtype=torch.long)
        broken_by = ("",) * left + ("apgd-ce",) * (1000 - left)
        result = EnsembleResult(
            "attack", rejects, torch.empty(0), y, y, y.bool(), y, y.bool(), broken_by, {}
        )
        (flag,) = implausible(result, ball, data, None).flags or (None,)
        assert (flag is not None) == flagged
        assert flag is None or "does not mean wrong" in flag.observed

    def test_a_claim_above_the_best_known_one(self) -> None:
        y = torch.zeros(10, dtype=torch.long)
        from demur.audits.ensemble_result import EnsembleResult

        result = EnsembleResult(
            "attack", False, torch.empty(0), y, y, y.bool(), y, y.bool(), ("",) * 10, {}
        )
        (flag,) = implausible(result, Linf(8 / 255), "cifar10", 0.9).flags
        assert flag.kind == IMPLAUSIBLE
        assert "A claim of 90.0%" in flag.observed


class TestGrades:
    def test_a_claim_that_the_attacks_refute(self) -> None:
        report = audited("robust, seed 0")
        for claim, grade in ((0.99, Grade.BROKEN), (0.1, Grade.NO_SIGN), (None, Grade.NO_SIGN)):
            assert replace(report, claim=claim).grade == grade
        x, y = ZOO["plain, seed 0"]().images(N)
        for wrong in (60, -0.1, "60%", True, float("nan")):
            with pytest.raises(BadInput, match="claim must be a share"):
                audit(plain(), x, y, eps=0.1, claim=wrong)  # type: ignore[arg-type]

    def test_few_images_are_no_comfort(self) -> None:
        report = audited("masked", n=1)
        assert report.grade == Grade.SUSPICIOUS
        assert "too few to show a sign" in str(report.verdict)

    def test_hardly_an_image_is_left(self) -> None:
        report = audit(plain(), *ZOO["plain, seed 0"]().images(N), eps=0.4, version="fast")
        assert report.grade == Grade.BROKEN
        assert report.flags == []

    def test_no_sign_says_what_was_not_tried_and_never_robust(self) -> None:
        text = str(audited("robust, seed 0").verdict)
        assert "Not tried: FAB, attacks by decisions, attacks by transfer, the rest of A" in text
        assert "robust" not in text
        unchecked = AutoAttack(robust(), eps=0.1, verbose=False).evaluate(
            *ZOO["robust, seed 0"]().images(N), sanity=False
        )
        assert "No check was made" in str(unchecked.verdict)

    def test_probabilities_are_attacked_by_their_logarithms(self) -> None:
        given, logits = audited("probabilities"), audited("robust, seed 0")
        assert given.grade == Grade.NO_SIGN
        assert given.autoattack.unbroken == logits.autoattack.unbroken
        assert given.warnings == ()

    def test_attacks_of_one_kind_say_so(self) -> None:
        """The findings: Square alone named no gradient, and its check had passed without any."""
        images = ZOO["robust, seed 0"]().images(N)
        blind = audited("robust, seed 0", "black-box")
        assert "Not tried: attacks by gradients, FAB" in str(blind.verdict)
        by_gradient = AutoAttack(
            robust(), eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False
        ).evaluate(*images)
        for report in (blind, by_gradient):
            (check,) = (one for one in report.sanity if one.kind == MASKED)
            assert check.missing and not check.flags

    def test_skipped_attacks_have_no_figures(self) -> None:
        report = audited("detached", "fast")
        assert [member.name for member in report.autoattack.members] == ["square"]
        assert "attacks by gradients" in str(report.verdict)
        assert report.grade == Grade.SUSPICIOUS

    def test_small_logits_raise_no_alarm(self) -> None:
        """Plain PGD on their cross-entropy leaves what it breaks on their margin."""
        assert audited("logits times 0.01", "auto").grade == Grade.NO_SIGN

    def test_a_part_of_it_is_not_called_autoattack(self) -> None:
        report = audited("robust, seed 0")
        assert "which is no AutoAttack" in str(report).replace("\n" + " " * 16, " ")
        assert [*report.autoattack.seconds] == ["apgd-ce", "apgd-t", "square"]
        assert "AutoAttack (standard)" in audited("robust, seed 0", "standard").autoattack.attack

    def test_auto_is_a_part_where_a_cpu_would_be_too_slow(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        x, y = ZOO["robust, seed 0"]().images(N)
        options: dict[str, Any] = {"eps": 0.1, "device": "cpu"}
        assert "AutoAttack (standard)" in audit(robust(), x, y, **options).autoattack.attack

        def uncounted(given: torch.Tensor) -> torch.Tensor:  # torch counts no operation of it
            return (given.flatten(1)[:, :10] - 0.5).abs().neg()

        assert "AutoAttack (standard)" in audit(uncounted, x, y, **options).autoattack.attack
        monkeypatch.setattr(audit_report, "CPU_MINUTES", 0)
        assert "a part of" in audit(uncounted, x, y, **options).autoattack.attack
        report = audit(robust(), x, y, **options, verbose=True, command="demur audit robust")
        assert report.autoattack.attack.startswith("a part of AutoAttack")
        assert (
            "version fast, which is no AutoAttack: all of it may need up to"
            in capsys.readouterr().out
        )
        assert report.provenance["command"] == "demur audit robust --version fast"
        assert "the rest of AutoAttack (version='standard')" in str(report.verdict)
        assert report.provenance["version"] == "fast"

    def test_nothing_is_said_about_errors_where_clean_images_are_rejected(self) -> None:
        x, y = ZOO["plain, seed 0"]().images(N)
        highest = float(Con()(as_output(plain()(x))).max())
        rule = AcceptedError(Con(), highest + 1e-7)
        result = RejectAutoAttack(plain(), rule, eps=0.3, version="fast", verbose=False).evaluate(
            x, y, sanity=False
        )
        assert "no clean image reaches" in result.warnings[0]
        assert "no error can be accepted" not in result.warnings[0]
        assert result.attacked.accepted_wrong > 0  # the finding: an error beside that sentence

    def test_a_batch_dependent_model_reports_the_images_that_no_attack_broke(self) -> None:
        report = audited("batch statistic")
        assert report.autoattack.unconfirmed > 1
        assert UNCONFIRMED in {flag.kind for flag in report.flags}
        assert UNCONFIRMED not in {flag.kind for flag in audited("plain, seed 0").flags}
        figures = {name: counts.accepted_right for name, counts, _ in report.figures()}
        assert figures["attacked, never broken"] == report.autoattack.unbroken
        assert figures["attacked, never broken"] < figures["attacked, correct"]


SAMPLE = ["masked", "detached", "order", "batch statistic"]
QUIET = ["robust, seed 0", "plain, seed 0", "probabilities", "Con"]


class TestZoo:
    def test_is_large_enough(self) -> None:
        assert len(BROKEN) >= 18
        assert len(HONEST) >= 18

    @pytest.mark.parametrize("name", SAMPLE)
    def test_no_false_comfort(self, name: str) -> None:
        assert audited(name).grade != Grade.NO_SIGN

    @pytest.mark.parametrize("name", QUIET)
    def test_no_false_alarm(self, name: str) -> None:
        assert audited(name).grade == Grade.NO_SIGN, str(audited(name).verdict)

    @pytest.mark.skipif(not os.environ.get("DEMUR_EXHAUSTIVE"), reason="long: make exhaustive")
    @pytest.mark.parametrize("name", list(ZOO))
    def test_every_model(self, name: str) -> None:
        try:
            grade = str(audited(name, "auto").grade)
        except BadInput:
            grade = "not audited"
        assert (grade == Grade.NO_SIGN) == (name in HONEST)


def schema() -> Any:
    return json.loads(files("demur.audits").joinpath("audit.schema.json").read_text())


class TestFiles:
    @pytest.mark.parametrize("name", ["robust, seed 0", "Con", "masked", "batch statistic"])
    def test_json_follows_the_schema(self, name: str) -> None:
        values = json.loads(json.dumps(audited(name).to_json()))
        Draft202012Validator.check_schema(schema())
        Draft202012Validator(schema()).validate(values)
        assert values["grade"] == audited(name).grade
        wrong: list[dict[str, Any]] = [{"grade": "robust"}, {"provenance": {}}, {"n": 0}]
        for broken in wrong:
            assert not Draft202012Validator(schema()).is_valid(values | broken)

    @pytest.mark.parametrize("ending", ["html", "md", "json"])
    def test_every_format_has_the_grade_and_what_repeats_it(
        self, ending: str, tmp_path: Path
    ) -> None:
        report = audited("masked")
        report.save(tmp_path / f"audit.{ending}")
        text = (tmp_path / f"audit.{ending}").read_text()
        for part in (
            report.grade, JUMP, "apgd-ce", "steps=10", report.provenance["weights"],
            report.provenance["images"], torch.__version__, "no AutoAttack",
        ):  # fmt: skip
            assert part in text
        if ending == "html":
            assert text.count("data:image/png") >= 3
            assert "<polyline" in text
            assert "http" not in text

    def test_radii_rise(self) -> None:
        radii = [float(Fraction(radius)) for radius, *_ in audited("masked").curve]
        assert radii == sorted(radii)
        assert len(radii) == 4

    def test_no_heading_without_sample_images(self, tmp_path: Path) -> None:
        some = audited("masked")
        unchanged = replace(some.autoattack, broken_by=("",) * N)  # every attack was skipped
        for report, count in ((some, 1), (replace(some, autoattack=unchanged), 0)):
            report.save(tmp_path / "audit.html")
            assert (tmp_path / "audit.html").read_text().count("<h2>Sample images") == count

    def test_digests_are_of_weights_and_images(self) -> None:
        x, y = ZOO["plain, seed 0"]().images(N)
        one, other = (provenance(net, (x, y), "cpu") for net in (plain(0), plain(1)))
        assert one["weights"] != other["weights"]
        assert one["images"] == other["images"]
        assert provenance(plain(0), (x[:-1], y[:-1]), "cpu")["images"] != one["images"]
        assert provenance(plain(0).forward, (x, y), "cpu")["weights"] == ""

    def test_sample_images_are_those_that_were_attacked(self) -> None:
        import base64
        import io

        from PIL import Image

        from demur.images import png_url

        shapes: list[tuple[int, int, int]] = [(1, 8, 8), (3, 5, 7), (4, 6, 6)]
        for shape in shapes:
            x = torch.rand(shape)
            picture = Image.open(io.BytesIO(base64.b64decode(png_url(x).split(",")[1])))
            assert picture.size == (shape[2], shape[1])
            assert picture.mode == ("RGB" if shape[0] == 3 else "L")
            if shape[0] == 1:
                expected = (255 * x[0]).round().byte().flatten().tolist()
                assert list(picture.tobytes()) == expected

    def test_the_command_writes_all_formats(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("own_net.py").write_text(
            "from tests.audit_zoo import plain\ndef net(): return plain()\n"
        )
        monkeypatch.syspath_prepend(".")
        words = ["audit", "own_net:net", "--data", "digits", "--n", "12", "--eps", "0.1"]
        words += ["--version", "fast", "--device", "cpu", "--claim", "0.99"]
        code, out, err = command(*words, "-o", "audit.json")
        assert code == 0, err
        values = json.loads(Path("audit.json").read_text())
        assert values["grade"] == "broken"
        assert values["provenance"]["command"].startswith("demur audit own_net:net --data digits")
        assert "verdict         broken. The claim is 99.0%" in out
        code, _, err = command(*words[:-1], "60")
        assert code == 2
        assert "claim must be a share" in err
