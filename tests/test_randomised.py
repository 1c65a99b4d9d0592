"""Randomised models: mean accuracy over passes, not a lucky pass, and noise that is not random."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from demur import AutoAttack, Output, RejectAutoAttack, audit
from demur.attacks import (
    CRITERIA,
    EOTPGD,
    AcceptedError,
    AutoAttackEnsemble,
    Chain,
    Criterion,
    MeanChain,
    Misclassified,
    RayS,
    Rejected,
    SuccessProbability,
)
from demur.attacks.attack import RuleCriterion
from demur.attacks.attack_model import checked
from demur.attacks.autoattack import PASSES, rand_chain
from demur.attacks.balls import L2, Ball, Linf
from demur.attacks.objectives.classification import ANY
from demur.audits import ensembles, flags, preflight
from demur.audits.ensemble_result import EnsembleResult
from demur.audits.flags import A_DRAW, CHANGE, JUMP, SLOPE, STUCK, answer_checks, masking_checks
from demur.audits.preflight import foreign_checks, preflight_warnings
from demur.data import Images
from demur.evaluate.probing import is_random
from demur.output import as_output, prediction
from demur.rejectors import Con
from demur.sanity import CheckResult
from demur.sanity.comparisons import BEATEN, LEFT, RISES, TOO_GOOD
from demur.sanity.evidence import Grade
from tests.quick_net import EPS, QuickNet

RULE = AcceptedError(Con(), 0.6)
Net = Callable[[Tensor], Any]


def noisy(net: nn.Module, size: float = 0.25) -> Net:
    """A net behind Gaussian noise."""
    return lambda x: net(x + size * torch.randn_like(x))


def mean_success(criterion: Criterion, net: Net, x: Tensor, y: Tensor, passes: int = 200) -> float:
    with torch.no_grad():
        found = [criterion(as_output(net(x)), y).float().mean() for _ in range(passes)]
    return float(torch.stack(found).mean())


def eot_pgd(loss: Callable[[Tensor, Tensor], Tensor], net: Net, x: Tensor, y: Tensor) -> Tensor:
    """PGD of 40 steps of eps/4, each by the mean of 20 gradients."""
    x_adv = (x + EPS * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
    for _ in range(40):
        x_adv.requires_grad_()
        total = torch.stack([loss(as_output(net(x_adv)).logits, y).sum() for _ in range(20)]).sum()
        (grad,) = torch.autograd.grad(total, x_adv)
        x_adv = (x_adv.detach() + EPS / 4 * grad.sign()).clamp(x - EPS, x + EPS).clamp(0, 1)
    return x_adv


@pytest.fixture
def images(test_images: Images) -> tuple[Tensor, Tensor]:
    return test_images.batch(slice(0, 30))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class TestStrength:
    @pytest.mark.parametrize("ball", [Linf(0.02), L2(0.1)])
    def test_on_a_linear_net_the_mean_accuracy_is_the_closed_form(self, ball: Ball) -> None:
        weight = torch.randn(64)

        def net(x: Tensor) -> Tensor:
            margin = (x - 0.5 + 0.1 * torch.randn_like(x)).flatten(1) @ weight
            return torch.stack([margin, torch.zeros_like(margin)], 1)

        x = 0.5 + 0.1 * torch.rand(20, 1, 8, 8) * weight.sign().view(8, 8)
        y = torch.zeros(20, dtype=torch.long)
        x_adv = EOTPGD(ball, steps=20, restarts=2, passes=20)(net, x, y)
        dual = weight.norm() if isinstance(ball, L2) else weight.abs().sum()
        margins = (x - 0.5).flatten(1) @ weight - ball.eps * dual
        expected = (margins / (0.1 * weight.norm())).double()
        right = sum(NormalDist().cdf(float(value)) for value in expected) / 20
        assert abs(1 - mean_success(Misclassified(), net, x_adv, y, 400) - right) < 0.02

    def test_as_strong_as_eot_pgd_with_as_many_passes(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        net, (x, y) = noisy(quick_net.classifier()), images
        chain = replace(rand_chain(Linf(EPS), Misclassified(), 0, restarts=1), passes=48)
        ours = mean_success(Misclassified(), net, chain(net, x, y), y)
        theirs = eot_pgd(nn.functional.cross_entropy, net, x, y)
        assert ours >= mean_success(Misclassified(), net, theirs, y) - 0.01
        lucky = replace(chain, attacks=chain.attacks[:1])
        first = Chain(lucky.attacks)(net, x, y)  # where an image leaves at one wrong pass
        assert ours > mean_success(Misclassified(), net, first, y)

    @pytest.mark.exhaustive
    def test_a_randomised_rejector_accepts_as_many_errors_as_under_eot_pgd(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        net, (x, y) = noisy(quick_net, 0.1), images
        chain = replace(rand_chain(Linf(EPS), RULE, 0, restarts=1), passes=48)
        ours = mean_success(RULE, net, chain(net, x, y), y)

        def confident_error(z: Tensor, y: Tensor) -> Tensor:
            return z.log_softmax(-1).scatter(1, y[:, None], -1e9).amax(-1)

        theirs = mean_success(RULE, net, eot_pgd(confident_error, net, x, y), y)
        assert ours >= theirs - 0.01
        assert ours > mean_success(RULE, net, x, y)

    def test_targets_differ_between_restarts_and_rejections_have_none(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        net, (x, y) = noisy(quick_net, 0.1), images
        rule = Rejected(Con(), 0.6)
        chain = rand_chain(Linf(EPS), rule, 0, restarts=1)
        few = tuple(replace(part, steps=8) for part in chain.attacks[:2])  # type: ignore[call-arg]
        x_adv = replace(chain, attacks=few, passes=20)(net, x, y)
        assert mean_success(rule, net, x_adv, y, 50) > mean_success(rule, net, x, y, 50) + 0.1
        one = EOTPGD(Linf(EPS), steps=2, restarts=12, passes=2, targeted=True)
        assert one(net, x, y).shape == x.shape  # more restarts than wrong classes
        assert one.gradient_queries == 2 * 12 * 5

    def test_the_ensemble_of_the_version(self) -> None:
        chain = AutoAttackEnsemble(Linf(EPS), version="rand").chain()
        assert isinstance(chain, MeanChain)
        own = sum(part.gradient_queries for part in chain.attacks)
        judging = sum(part.restarts * part.passes for part in chain.attacks)  # type: ignore[attr-defined]
        assert own + judging + 4 * chain.passes < 2 * 100 * 20  # passes of the authors' version


class TestSuccessProbability:
    @pytest.mark.parametrize("kind", CRITERIA)
    def test_all_margins_are_positive_exactly_at_a_success(self, kind: type[Criterion]) -> None:
        criterion = kind(Con(), 0.4) if issubclass(kind, RuleCriterion) else kind()
        out, y = Output(2 * torch.randn(500, 4), *torch.zeros(2, 500, 0)), torch.randint(4, (500,))
        margins = SuccessProbability(criterion).margins(out, y, torch.full_like(y, ANY))
        assert torch.equal((margins > 0).all(1), criterion(out, y))
        assert 0 < criterion(out, y).float().mean() < 1

    def test_no_weight_vanishes_far_from_the_boundary(self) -> None:
        logits = torch.tensor([[1e4, 0.0]]).requires_grad_()
        y, objective = torch.tensor([0]), SuccessProbability()
        out = Output(logits, *torch.zeros(2, 1, 0))
        target = torch.full_like(y, ANY)
        widths = objective.widths(objective.margins(out, y, target).detach()[None])
        (grad,) = torch.autograd.grad(objective(out, y, target, widths).sum(), logits)
        assert grad[0, 0] < 0 < grad[0, 1]


class TestResult:
    def attack(self, net: Net, criterion: AcceptedError | None = None) -> Any:
        if criterion is None:
            attack: Any = AutoAttack(net, eps=EPS, version="rand", verbose=False)
        else:
            attack = RejectAutoAttack(net, criterion, eps=EPS, version="rand", verbose=False)
        quick = EOTPGD(Linf(EPS), steps=5, criterion=attack.chain.criterion)
        attack.chain = replace(attack.chain, attacks=(quick,), passes=20)
        attack.names = ["eot-margin"]
        return attack

    @pytest.mark.parametrize("criterion", [None, RULE])
    def test_figures_are_means_over_passes(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor], criterion: AcceptedError | None
    ) -> None:
        net, (x, y) = noisy(quick_net), images
        result = self.attack(net, criterion).evaluate(x, y, bs=17, sanity=False)
        found = result.attacked
        kind = "accepted_right" if criterion is None else "accepted_wrong"
        success = mean_success(criterion or Misclassified(), net, result.x_adv, y)
        expected = 1 - success if criterion is None else success
        assert abs(found.share(kind) - expected) < 0.03
        assert found.n == len(y)
        assert found.accepted_right != round(found.accepted_right)
        assert result.majority.accepted_right == int(result.majority.accepted_right)
        low, high = found.interval(kind)
        assert low < found.share(kind) < high
        text = str(result)
        assert f"means over {PASSES} passes" in " ".join(text.split())
        assert max(map(len, text.splitlines())) <= 80
        stored = json.loads(json.dumps(result.to_json()))
        assert stored["attacked"][kind]["share"] == found.share(kind)
        assert stored["passes"] == PASSES
        assert stored["majority"][kind]["count"] == getattr(result.majority, kind)
        shares = result.to_numpy()[f"{kind}_share"]
        assert abs(shares.mean() - found.share(kind)) < 1e-9

    def test_the_figure_is_not_the_one_that_chose_the_image(self) -> None:
        """A coin decides: a selected example has many successes, but no image is better."""

        def coin(x: Tensor) -> Tensor:
            return torch.randn(len(x), 2) + 0 * x.flatten(1)[:, :1]

        x, y = torch.rand(200, 1, 4, 4), torch.zeros(200, dtype=torch.long)
        result = self.attack(coin).evaluate(x, y, sanity=False)
        assert abs(result.attacked.share("accepted_right") - 0.5) < 0.015  # over 3 deviations

    def test_a_standard_version_reports_means_too(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        attack = self.attack(noisy(quick_net))
        attack.chain = Chain(attack.chain.attacks)
        assert attack.evaluate(*images, sanity=False).passes == PASSES
        attack.model = quick_net
        result = attack.evaluate(*images, sanity=False)
        assert (result.passes, len(result.kinds), result.passes_note) == (1, 0, "")
        assert isinstance(result.attacked.accepted_right, int)

    def test_resumes(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor], tmp_path: Path
    ) -> None:
        attack, state = self.attack(noisy(quick_net)), tmp_path / "state"
        first = attack.evaluate(*images, sanity=False, state_path=state)
        again = attack.evaluate(*images, sanity=False, state_path=state)
        assert torch.equal(first.x_adv, again.x_adv)

    def test_an_audit_shows_them(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        def quick(self: EOTPGD, *arguments: Any) -> Tensor:
            return original(replace(self, steps=2, restarts=1), *arguments)

        original = EOTPGD.run
        monkeypatch.setattr(EOTPGD, "run", quick)
        x, y = (part[:6] for part in images)
        report = audit(noisy(quick_net), x, y, rejector=Con(), threshold=0.6, eps=EPS)
        assert report.accepted_errors is not None
        assert report.forced_rejections is not None
        assert report.forced_rejections.passes == PASSES
        share = 100 * report.accepted_errors.attacked.share("accepted_wrong")
        assert f"{share:.1f}%" in str(report)
        assert f"means over {PASSES} passes" in " ".join(str(report).split())
        report.save(tmp_path / "audit.html")
        page = (tmp_path / "audit.html").read_text()
        assert f"{share:.1f}%" in page
        assert f"means over {PASSES} passes" in page


class TestChecks:
    """What the checks of an audit say about noise: fresh, seeded, or in place of a memory."""

    def found(self, net: Net, images: tuple[Tensor, Tensor]) -> dict[str, CheckResult]:
        with checked(net, *images) as (own, x, y):
            checks = answer_checks(own, x, y, x, Linf(EPS), None, prediction(own(x)))
        return {check.kind: check for check in checks}

    @pytest.mark.parametrize("size", [0.01, 0.1, 0.25])
    def test_fresh_noise_is_no_sign_and_what_was_not_checked_is_named(
        self, size: float, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        """The finding: a slope and a jump of two draws were called masked gradients."""
        found = self.found(noisy(quick_net.classifier(), size), images)
        assert [check.kind for check in found.values() if check.flags] == []
        assert found[CHANGE].missing
        assert not (found[SLOPE].missing or found[JUMP].missing or found[STUCK].missing)

    def test_masked_gradients_behind_noise_are_a_sign(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        net = quick_net.classifier()

        def wrong(x: Tensor) -> Tensor:  # in most passes the gradient is that of other pixels
            z = net(x + 0.1 * torch.randn_like(x))
            extra = z.flip(1) + net(x.flip(2))
            return z + (extra - extra.detach()) * float(torch.rand(()) < 0.8)  # type: ignore[no-any-return]

        assert self.found(wrong, images)[SLOPE].flags

    def test_a_memory_is_no_draw(self, quick_net: QuickNet, images: tuple[Tensor, Tensor]) -> None:
        calls = iter(range(10**6))
        found = self.found(lambda x: quick_net((x + 0.1 * (next(calls) % 2)).clamp(0, 1)), images)
        assert "remembers earlier calls" in found[CHANGE].flags[0].observed
        assert [found[kind].missing for kind in (SLOPE, JUMP)] == [A_DRAW] * 2

    @pytest.mark.parametrize(
        ("seed", "kind", "note"),
        [
            (lambda x: 0, CHANGE, "in reverse order"),
            (lambda x: int(x.double().sum() * 1e4), JUMP, "seed is computed from the input"),
            (lambda x: hash(x.numpy().tobytes()) % 2**31, JUMP, "seed is computed from the input"),
        ],
    )
    def test_seeded_noise_is_named(
        self, seed: Callable[[Tensor], int], kind: str, note: str, quick_net: QuickNet,
        images: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        def net(x: Tensor) -> Output:
            generator = torch.Generator().manual_seed(seed(x.detach()))
            return quick_net(x + 0.2 * torch.randn(x.shape, generator=generator))  # type: ignore[no-any-return]

        assert note in self.found(net, images)[kind].flags[0].observed
        assert not is_random(net, images[0])

    def test_noise_that_changes_labels_alone_is_random(self) -> None:
        """The finding: no pass on clean images differed, and the check of jumps saw noise."""
        dark = torch.full((8, 1, 4, 4), 0.1)
        images = torch.stack((dark, 1 - dark), 1).flatten(0, 1)

        def hard(x: Tensor) -> Tensor:
            bright = (x + 0.1 * torch.randn_like(x)).mean((1, 2, 3)) > 0.5
            return torch.nn.functional.one_hot(bright.long(), 2).float()

        assert all(is_random(hard, images) for _ in range(5))

    def test_a_choice_of_few_is_random(self, images: tuple[Tensor, Tensor]) -> None:
        def shifted(x: Tensor) -> Tensor:
            return x.roll(int(torch.randint(3, ())), 3).flatten(1)

        assert all(is_random(shifted, images[0]) for _ in range(20))
        assert not any(is_random(lambda x: x.flatten(1), images[0]) for _ in range(3))

    def test_an_audit_asks_once(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = list[int]()

        def count(*given: Any) -> Any:
            asked.append(1)
            return masking_checks(*given)

        monkeypatch.setattr(ensembles, "masking_checks", count)
        monkeypatch.setattr(flags, "masking_checks", count)
        attack = AutoAttack(quick_net, eps=EPS, verbose=False)
        attack.chain = Chain((EOTPGD(Linf(EPS), steps=1),))
        attack.on_masking.attacks = {}
        for _ in range(2):
            attack.evaluate(*images)
        assert len(asked) == 2
        attack.on_masking.attacks = {"rays": RayS(Linf(EPS), 10)}
        attack.evaluate(*images)
        assert len(asked) == 3


def coin(good: Net, other: Net, share: float = 0.5) -> Net:
    """One of two nets for all images of a pass; `share` is that of the other one."""
    return lambda x: other(x) if torch.rand(()) < share else good(x)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps in the attacks on the mean, and few passes."""

    def run(self: EOTPGD, *given: Any) -> Tensor:
        return original(replace(self, steps=10, restarts=1), *given)

    original = EOTPGD.run
    monkeypatch.setattr(EOTPGD, "run", run)
    for module in (ensembles, preflight):
        monkeypatch.setattr(module, "PASSES", 40)


@pytest.mark.usefixtures("short")
class TestOneDrawForABatch:
    """What the verdict compares are means over passes, and the spread of passes is no sign."""

    @pytest.mark.parametrize("rejector", [None, Con()])
    def test_a_coin_for_all_images_is_no_sign(
        self, rejector: Con | None, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        """The finding: six audits of one model had two grades, by the coins of single passes."""
        bad = 0.1 * torch.randn(64, 10)
        net = coin(quick_net.classifier(), lambda x: x.flatten(1) @ bad)
        given = {} if rejector is None else {"rejector": rejector, "threshold": 0.6}
        for seed in (0, 3, 5)[: 1 if rejector else 3]:
            torch.manual_seed(seed)
            report = audit(net, *images, eps=EPS, seed=seed, **given)  # type: ignore[arg-type]
            found = {flag.kind for flag in report.flags}
            assert not found & {BEATEN, RISES, LEFT, TOO_GOOD}, (seed, found)
            assert not any("no better than chance" in said for said in report.warnings), seed
            assert {check.kind for check in report.sanity if not check.missing} >= {BEATEN, RISES}

    def checks(
        self, net: Net, images: tuple[Tensor, Tensor], chain: MeanChain
    ) -> dict[str, list[str]]:
        """Return what the checks observe where the attack returned clean images, by kind."""
        with checked(net, *images) as (own, x, y):
            found, _ = foreign_checks(own, x, y, {"rand": (chain, x)}, prediction(own(x)))
        return {check.kind: [flag.observed for flag in check.flags] for check in found}

    def test_an_attack_that_does_nothing_is_a_sign(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        net, chain = quick_net.classifier(), rand_chain(Linf(EPS), Misclassified(), 0)
        shared = lambda x: net(x + 0.1 * torch.randn_like(x[:1]))  # noqa: E731
        found = self.checks(shared, images, chain)
        assert "EOT-PGD-20 leaves" in found[BEATEN][0] and "rand" in found[BEATEN][0]
        assert found[RISES] == found[LEFT] == []

    def test_a_useless_gradient_behind_shared_noise_is_a_sign(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        net, useless = quick_net.classifier(), torch.randn(64, 10)

        def decoy(x: Tensor) -> Tensor:
            extra = 1e3 * x.flatten(1) @ useless
            return net(x + 0.1 * torch.randn_like(x[:1])) + extra - extra.detach()  # type: ignore[no-any-return]

        found = self.checks(decoy, images, rand_chain(Linf(EPS), Misclassified(), 0))
        assert "EOT-PGD-20 at eps=128/255" in found[LEFT][0]

    def test_chance_is_chance_in_the_mean_of_all_passes(
        self, images: tuple[Tensor, Tensor]
    ) -> None:
        x, y = images
        chain, good = rand_chain(Linf(EPS), Misclassified(), 0), torch.rand(40, 1) < 0.5
        guess = torch.rand(40, len(y)) < 0.1
        for right, said in ((guess, True), (guess & False, True), (good | guess, False)):
            told = preflight_warnings(lambda x: x.flatten(1)[:, :10], chain, x, y, right.numpy())
            assert ("no better than chance" in " ".join(told)) == said

    def test_hardly_an_image_is_left_of_those_right_in_the_mean(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> None:
        """The finding: most passes are wrong without an attack, and so nothing seemed to break."""
        net = quick_net.classifier()
        wrong = lambda x: net(x).roll(1, 1)  # noqa: E731
        result = AutoAttack(coin(net, wrong, 0.7), eps=0.5, version="rand", verbose=False)
        found = result.evaluate(*images)
        assert 4 < found.clean.accepted_right < 15 and found.left < 1
        assert found.grade == Grade.BROKEN


@pytest.mark.usefixtures("short")
class TestSeed:
    """The seed of an audit is that of the model's draws, and what was outside stays as it was."""

    @pytest.fixture
    def report(
        self, quick_net: QuickNet, images: tuple[Tensor, Tensor]
    ) -> Callable[..., EnsembleResult]:
        def net(x: Tensor) -> Tensor:
            size = 0.2 + random.random() / 9 + float(np.random.random_sample()) / 9
            return quick_net(x + size * torch.randn_like(x[:1])).logits  # type: ignore[no-any-return]

        x, y = (part[:12] for part in images)
        return lambda **given: audit(net, x, y, eps=EPS, **given).autoattack

    def test_the_same_call_has_the_same_figures(
        self, report: Callable[..., EnsembleResult]
    ) -> None:
        kinds = []
        for state, seed in ((1, 0), (2, 0), (2, 5)):
            torch.manual_seed(state)
            before = torch.get_rng_state(), random.getstate(), np.random.random_sample()
            found = report(seed=seed)
            kinds.append(torch.cat((found.kinds, found.clean_kinds)))
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]
        assert torch.equal(kinds[0], kinds[1])
        assert not torch.equal(kinds[1], kinds[2])

    def test_one_that_resumes_draws_anew(
        self, report: Callable[..., EnsembleResult], tmp_path: Path
    ) -> None:
        """Else the draws that found an example would judge it."""
        first, again = (report(state_folder=tmp_path) for _ in range(2))
        assert torch.equal(first.x_adv, again.x_adv)
        assert not torch.equal(first.clean_kinds, again.clean_kinds)
