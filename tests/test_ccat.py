"""CCAT: targets and losses against formulas, both forms, and both engines."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor, nn

import engine_check
from demur.attacks import CE, PGD, WrongConfidence
from demur.attacks.balls import L2, Linf
from demur.data import Digits, Images
from demur.errors import BadInput
from demur.methods import CCAT, RR, BatchOutputs, LabelledOutput, Method, NoHead
from demur.methods.frameworks import CCAT_OFFICIAL, CCAT_REFERENCE
from demur.nets import RejectingNet, ResNet8
from demur.output import Output
from demur.recipes import RECIPES

CPU = torch.device("cpu")
FORMS = {
    "official": CCAT(attack=replace(CCAT_OFFICIAL, ball=Linf(0.1), steps=3, step_size=0.03)),
    "reference": CCAT(
        1.0, "reference", replace(CCAT_REFERENCE, ball=Linf(0.1), steps=3, step_size=0.03), "train"
    ),
}  # fmt: skip
each_form = pytest.mark.parametrize("framework", FORMS.values(), ids=FORMS)


def labelled(x: Tensor, logits: Tensor, y: Tensor) -> LabelledOutput:
    return LabelledOutput(x, y, Output(logits, logits[:, :0], logits[:, :0]))


# ------------------------------------------------------------------ formulas


@pytest.mark.parametrize(("rho", "half"), [(1.0, 0.5), (10.0, 1 - 0.5**10)])
def test_the_transition_at_zero_half_and_full_radius(rho: float, half: float) -> None:
    framework = CCAT(rho=rho)
    eps = 8 / 255
    delta = torch.zeros(4, 3, 2, 2, dtype=torch.float64)
    delta[1, 0, 0, 1], delta[2, 2, 1, 1], delta[3, 0, 0, 0] = eps / 2, -eps, 2 * eps
    assert framework.transition(delta).tolist() == pytest.approx([0, half, 1, 1], abs=1e-12)
    assert CCAT(attack=replace(CCAT_OFFICIAL, ball=Linf(0))).transition(0 * delta).tolist() == 4 * [
        0
    ]


def test_the_transition_uses_the_norm_of_the_ball() -> None:
    delta = torch.full((1, 1, 1, 4), 0.25, dtype=torch.float64)  # of length one half
    framework = CCAT(rho=1.0, attack=replace(CCAT_OFFICIAL, ball=L2(2.0)))
    assert framework.transition(delta).tolist() == pytest.approx([0.25])


def three_classes(framework: CCAT) -> tuple[BatchOutputs, Tensor, Tensor]:
    """Outputs for two images, the second perturbed by half the radius, and both sets of logits."""
    eps = framework.attack.ball.eps
    before = torch.full((2, 1, 1, 2), 0.5, dtype=torch.float64)
    after = before.clone()
    after[1, 0, 0, 0] += eps / 2
    clean = torch.tensor([[1.0, 0, 0], [0, 0, 2.0]], dtype=torch.float64, requires_grad=True)
    attacked = torch.tensor([[0, 1.0, 0], [3.0, 0, 1]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 2])
    return (
        BatchOutputs(labelled(after, attacked, y), labelled(before, clean, y), before),
        clean,
        attacked,
    )


def test_the_official_loss_equals_its_formula() -> None:
    framework = FORMS["official"]
    outputs, clean, attacked = three_classes(framework)
    gamma = 1 - 0.5**10
    p, q = clean.detach().log_softmax(1), attacked.detach().log_softmax(1)
    target = [gamma / 3, gamma / 3, 1 - gamma + gamma / 3]
    by_hand = [-p[0, 0], -p[1, 2], -q[0, 0], -sum(target[k] * q[1, k] for k in range(3))]
    assert framework.classification_loss(outputs).tolist() == pytest.approx(
        [float(v) for v in by_hand]
    )
    framework.classification_loss(outputs).sum().backward()
    assert attacked.grad is not None
    gradient = q[1].exp() - torch.tensor(target, dtype=torch.float64)
    assert attacked.grad[1].tolist() == pytest.approx(gradient.tolist())


def test_the_reference_loss_equals_its_formula() -> None:
    framework = FORMS["reference"]
    outputs, clean, attacked = three_classes(framework)
    p, q = clean.detach().log_softmax(1), attacked.detach().log_softmax(1)
    target = [1 / 6, 1 / 6, 2 / 3]
    divergence = sum(t * (log(t) - float(q[1, k])) for k, t in enumerate(target))
    by_hand = [float(-p[0, 0] - q[0, 0]), float(-p[1, 2]) + divergence]
    assert framework.classification_loss(outputs).tolist() == pytest.approx(by_hand)
    framework.classification_loss(outputs).sum().backward()
    assert clean.grad is not None
    assert attacked.grad is not None
    assert clean.grad.isfinite().all()
    assert attacked.grad.isfinite().all()


def test_both_forms_have_the_same_gradient() -> None:
    """The losses differ by the entropy of the target, which is constant."""
    grads = []
    for form in ("official", "reference"):
        outputs, _, attacked = three_classes(replace(FORMS["reference"], form=form))
        (grad,) = torch.autograd.grad(
            replace(FORMS["reference"], form=form).classification_loss(outputs).sum(), attacked
        )
        grads.append(grad)
    assert torch.allclose(grads[0], grads[1])


def test_settings_are_the_published_ones() -> None:
    assert CCAT().rho == 10
    assert CCAT().bn == "eval"
    assert CCAT().attack == PGD(
        Linf(8 / 255), steps=40, step_size=0.005, start="mixed", objective=WrongConfidence(),
        momentum=0.9, backtrack=1.5,
    )  # fmt: skip
    framework = RECIPES["cifar10-ccat-reference-rr"].method.framework
    assert framework == CCAT(1.0, "reference", CCAT_REFERENCE, "train")
    assert CCAT_REFERENCE.backtrack_objective == CE()
    assert (CCAT_REFERENCE.steps, CCAT_REFERENCE.step_size) == (20, 1 / 255)
    short = RECIPES["cifar10-ccat-reference-rr-short"].method.framework
    assert isinstance(short, CCAT)
    assert short.bn == "batch"
    assert RECIPES["cifar10-ccat-short"].method.framework == CCAT()


# ------------------------------------------------------------------ forward passes


class BatchRecorder(nn.Module):
    """A net that stores its input batches."""

    def __init__(self, net: RejectingNet) -> None:
        super().__init__()
        self.net, self.batches = net, list[Tensor]()

    def forward(self, x: Tensor) -> Output:
        self.batches.append(x.detach())
        out: Output = self.net(x)
        return out


@pytest.fixture
def net() -> RejectingNet:
    return ResNet8(4).build(Digits().domain, RR()).train()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_official_form_attacks_the_second_half(
    count: int, net: RejectingNet, test_images: Images
) -> None:
    x, y = test_images.batch(slice(0, count))
    framework, index = FORMS["official"], torch.arange(count)
    x_adv = framework.craft(net, x, y, index, 3)
    first, half = count // 2, (count + 1) // 2
    assert net.training
    assert torch.equal(x_adv[:first], x[:first])
    sizes = Linf(0.1).norm(x_adv - x)[first:]
    assert (sizes > 0).any()
    assert sizes.max() <= 0.1 + 1e-6
    recorder = BatchRecorder(net)
    outputs = framework.outputs(recorder, x, x_adv, y, clean=False)
    (joint,) = recorder.batches
    assert torch.equal(joint, torch.cat([x[:half], x_adv[first:]]))
    assert outputs.clean is not None
    assert outputs.unperturbed is not None
    assert torch.equal(outputs.clean.y, y[:half])
    assert torch.equal(outputs.attacked.y, y[first:])
    assert torch.equal(outputs.unperturbed, x[first:])
    assert len(outputs.clean.out.logits) == len(outputs.attacked.out.logits) == half
    loss = framework.classification_loss(outputs)
    assert len(loss) == 2 * half
    expected = 0.5 * (loss[:half].mean() + loss[half:].mean())
    assert Method(framework, NoHead()).reduce_loss(outputs).item() == pytest.approx(expected.item())
    with_head = expected + RR().auxiliary_loss(outputs).mean()
    assert Method(framework, RR()).reduce_loss(outputs).item() == pytest.approx(
        with_head.item(), rel=1e-6
    )


def test_the_reference_form_classifies_the_whole_batch_clean_and_attacked(
    net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = batch
    framework = FORMS["reference"]
    x_adv = framework.craft(net, x, y, torch.arange(len(x)), 3)
    recorder = BatchRecorder(net)
    outputs = framework.outputs(recorder, x, x_adv, y, clean=False)
    first, second = recorder.batches
    assert torch.equal(first, x)
    assert torch.equal(second, x_adv)
    assert len(framework.classification_loss(outputs)) == len(x)


@each_form
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("head", [NoHead(), RR()], ids=lambda head: type(head).__name__)
def test_any_batch_has_gradients_for_every_parameter(
    framework: CCAT, count: int, head: NoHead | RR, test_images: Images
) -> None:
    if count == 1 and framework.form == "reference" and head != NoHead():
        return  # batch norm of a single feature vector has no statistics
    net = ResNet8(4).build(Digits().domain, head).train()
    x, y = test_images.batch(slice(0, count))
    loss = Method(framework, head).loss(net, x, y, torch.arange(count), 0)
    assert loss.isfinite()
    loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(("form", "updates"), [("official", 1), ("reference", 8)])
def test_number_of_updates_of_the_running_statistics(
    form: str, updates: int, net: RejectingNet, batch: tuple[Tensor, Tensor]
) -> None:
    """The attack in eval mode, or three steps of two forward passes; then those of the loss."""
    x, y = batch
    Method(FORMS[form], RR()).loss(net, x, y, torch.arange(len(x)), 0)
    counts = {int(v) for k, v in net.state_dict().items() if k.endswith("num_batches_tracked")}
    assert counts == {updates}


@each_form
def test_heads_with_their_own_objective_raise(framework: CCAT) -> None:
    with pytest.raises(BadInput, match="fixes the objective"):
        framework.with_objective(CE(), "eval")
    assert not framework.one_loss_per_image


def test_an_attack_that_drops_images_raises_in_train_mode() -> None:
    with pytest.raises(BadInput, match="drops images"):
        CCAT(attack=PGD(Linf(0.1), keep="success"), bn="train")


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    ("form", "bn"),
    [("official", "train"), ("official", "batch"), ("reference", "batch"), ("reference", "eval")],
)
def test_engines_agree(form: str, bn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the modes of batch norm that are not the form's own; test_engine.py has those."""
    monkeypatch.setattr(engine_check, "STEPS", 2)
    recipe = engine_check.recipe_of(Method(replace(FORMS[form], bn=bn), RR()), "fp64")  # type: ignore[arg-type]
    recipe = replace(recipe, net=ResNet8(4), batch_size=17, epochs=1)
    found = engine_check.equality(recipe, CPU, "none")
    assert found.holds, found
    assert found.tolerance == 1e-9
