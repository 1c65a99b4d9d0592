"""Digests of specs: they depend on every field, and those of named specs never change."""

import re
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from demur.methods import HEADS
from demur.recipes import RECIPES, VOCABULARY, recipe
from demur.spec import Spec, digest, later, read, show
from demur.spec.field_types import Positive, PositiveInt
from tests.test_spec import NAMED

RENAMED = ("coin", "ray_or_clean")  # values of PGD.start, the first of them in stored recipes
RENAMED_DIGEST = "d07b5fa68ae4636602fe9716b265f910f9eb1caa5d6ca65667f2258bd9734e97"


@dataclass(frozen=True)
class Early(Spec):
    a: PositiveInt = 1


@dataclass(frozen=True)
class Toy(Spec):
    a: PositiveInt = 1
    b: Positive = 0.5
    mode: Literal["x", "y"] = "x"


def test_a_field_added_later_does_not_change_digests_at_its_neutral_value() -> None:
    before = digest(Early())

    @dataclass(frozen=True)
    class Early2(Spec):
        a: PositiveInt = 1
        added: float = field(default=2.0, metadata=later(neutral=0.0))

    Early2.__name__ = "Early"
    assert digest(Early2(added=0.0)) == before
    assert digest(Early2()) != before


def test_a_renamed_value_is_read_by_both_names_and_keeps_its_digest() -> None:
    old, new = (read(f'PGD(Linf(0.1), start="{name}")', VOCABULARY) for name in RENAMED)
    assert old == new
    assert show(old) == 'PGD(Linf(0.1), start="ray_or_clean")'
    assert digest(old) == digest(new) == RENAMED_DIGEST


def test_a_new_version_changes_the_digest() -> None:
    before = digest(Toy())
    changed = type("Toy", (Toy,), {"VERSION": 2})
    assert digest(changed()) != before


@given(st.integers(1, 99), st.floats(0.01, 9), st.sampled_from(["x", "y"]))
def test_the_digest_depends_on_every_field(a: int, b: float, mode: Literal["x", "y"]) -> None:
    spec = Toy(a, b, mode)
    assert (digest(spec) == digest(Toy())) == (spec == Toy())


HEAD_NAMES = [head.__name__ for head in HEADS[1:]]
CHANGES = (  # parts of a golden name that no recipe has, and the changes that they stand for
    (r"^cifar100-", "cifar10-", "data=CIFAR100()"),
    (r"-wrn", "", "net=WideResNet()"),
    (r"-snet-(\d+)-(0\.\d)", "-snet", r"head.weight=\1 head.coverage=\2"),
    (r"-ebd-6-0", "-ebd", "head.m_in=6 head.m_out=0"),
    (r"-ebd-swapped", "-ebd", "head.m_in=-5 head.m_out=-23 head.weight=1"),
    *((rf"(?<!pgdat)-{name.lower()}", "", f"head={name}()") for name in HEAD_NAMES),
)


def spelled_out(name: str) -> list[str]:
    """A recipe and its changes for a golden name such as cifar10-pgdat-rr-wrn."""
    changes: list[str] = []
    for pattern, shorter, change in CHANGES:
        found = None if name in RECIPES else re.search(pattern, name)
        if found:
            name = name[: found.start()] + shorter + name[found.end() :]
            changes += found.expand(change).split()
    return [name, *changes] if changes and name in RECIPES else []


def test_digests_of_named_specs_are_frozen() -> None:
    """A changed digest loses stored runs and records: bump VERSION or use later()."""
    by_changes = {name: words for name in GOLDEN if (words := spelled_out(name))}
    specs = NAMED | {name: recipe(first, rest) for name, (first, *rest) in by_changes.items()}
    found = {name: digest(spec)[:8] for name, spec in specs.items()}
    named = " ".join(show(spec, full=True) for spec in specs.values())
    assert [name for name in VOCABULARY if f"{name}(" not in named] == [], "classes not covered"
    assert {name: found.get(name) for name in GOLDEN} == GOLDEN


GOLDEN: dict[str, str] = {
    "digits-standard": "de9df0c3",
    "digits-standard-rr": "2998b302",
    "digits-standard-ebd": "139a927c",
    "digits-standard-snet": "30ffa52f",
    "digits-standard-atro": "9eb49985",
    "digits-standard-carl": "ec55fea1",
    "digits-pgdat": "d7b3ee18",
    "digits-pgdat-rr": "623ec171",
    "digits-pgdat-ebd": "0df3022f",
    "digits-pgdat-snet": "53dfd365",
    "digits-pgdat-atro": "f83e5cfe",
    "digits-pgdat-carl": "953ddd06",
    "digits-trades": "0a206ca5",
    "digits-trades-rr": "16e2090d",
    "digits-trades-ebd": "0252ac4d",
    "digits-trades-snet": "4c2b577e",
    "digits-ccat": "9ff06621",
    "digits-ccat-rr": "d34d32c0",
    "digits-ccat-ebd": "e7883603",
    "digits-ccat-reference": "e7ea0088",
    "digits-ccat-reference-rr": "2e3cc666",
    "digits-ccat-reference-ebd": "bff0d740",
    "digits-pgdat-ebd-swapped": "c819ef9d",
    "cifar10-standard": "a9060b9c",
    "cifar10-standard-wrn": "3d97ebfe",
    "cifar10-pgdat": "8560bd8f",
    "cifar10-pgdat-wrn": "dd5d171f",
    "cifar10-pgdat-rr": "51e1aa21",
    "cifar10-pgdat-rr-wrn": "bedb9b2d",
    "cifar10-pgdat-ebd": "b67f47a2",
    "cifar10-pgdat-ebd-wrn": "c7e32d72",
    "cifar10-pgdat-snet": "0b03a080",
    "cifar10-pgdat-snet-wrn": "53b25bee",
    "cifar10-pgdat-atro": "86bb2349",
    "cifar10-pgdat-atro-wrn": "7c5b81c0",
    "cifar10-pgdat-carl": "5877c625",
    "cifar10-pgdat-carl-wrn": "e09e3ad1",
    "cifar10-trades": "eabdb10f",
    "cifar10-trades-wrn": "8317f8d8",
    "cifar10-trades-rr": "96ff1442",
    "cifar10-trades-rr-wrn": "25cb40fc",
    "cifar10-ccat": "6405755c",
    "cifar10-ccat-wrn": "c8a66f2c",
    "cifar10-ccat-rr": "b79098cc",
    "cifar10-ccat-rr-wrn": "0f74f855",
    "cifar10-ccat-reference": "0e87e385",
    "cifar10-ccat-reference-wrn": "fcaa031f",
    "cifar10-ccat-reference-rr": "1ded3f81",
    "cifar10-ccat-reference-rr-wrn": "5166149a",
    "cifar10-pgdat-ebd-6-0": "e142288f",
    "cifar10-pgdat-ebd-6-0-wrn": "179be141",
    "cifar10-pgdat-ebd-swapped": "2360973e",
    "cifar10-pgdat-ebd-swapped-wrn": "82b609dd",
    "cifar10-pgdat-snet-8-0.8": "c53a1ad5",
    "cifar10-pgdat-snet-8-0.8-wrn": "a9cf21b8",
    "cifar10-pgdat-snet-8-0.9": "62a5ac21",
    "cifar10-pgdat-snet-8-0.9-wrn": "bd5a74d9",
    "cifar10-pgdat-snet-16-0.7": "867a9696",
    "cifar10-pgdat-snet-16-0.7-wrn": "ee9ce503",
    "cifar10-pgdat-snet-16-0.8": "97743c03",
    "cifar10-pgdat-snet-16-0.8-wrn": "9514c3fe",
    "cifar10-pgdat-snet-16-0.9": "5e45eec5",
    "cifar10-pgdat-snet-16-0.9-wrn": "b527e499",
    "cifar10-pgdat-snet-32-0.7": "3e380492",
    "cifar10-pgdat-snet-32-0.7-wrn": "9e29e7f1",
    "cifar10-pgdat-snet-32-0.8": "59a6c5a0",
    "cifar10-pgdat-snet-32-0.8-wrn": "25946510",
    "cifar10-pgdat-snet-32-0.9": "84d49617",
    "cifar10-pgdat-snet-32-0.9-wrn": "adc9404b",
    "cifar100-standard": "a04bb945",
    "cifar100-standard-wrn": "a91f22e7",
    "cifar100-pgdat": "47ea0e71",
    "cifar100-pgdat-wrn": "ead254d8",
    "cifar100-pgdat-rr": "91b63f8d",
    "cifar100-pgdat-rr-wrn": "84740ba4",
    "cifar100-pgdat-ebd": "2485881f",
    "cifar100-pgdat-ebd-wrn": "b2a8c8b6",
    "cifar100-pgdat-snet": "c45db7c0",
    "cifar100-pgdat-snet-wrn": "1d9f68a0",
    "cifar100-pgdat-atro": "c324843e",
    "cifar100-pgdat-atro-wrn": "b9531cd1",
    "cifar100-pgdat-carl": "9d47e068",
    "cifar100-pgdat-carl-wrn": "d56de228",
    "cifar100-trades": "63bb8ee2",
    "cifar100-trades-wrn": "4d5f50d0",
    "cifar100-trades-rr": "8029a618",
    "cifar100-trades-rr-wrn": "6b33cdc8",
    "cifar100-ccat": "37ed3ad1",
    "cifar100-ccat-wrn": "b7528d2c",
    "cifar100-ccat-rr": "4fa8744c",
    "cifar100-ccat-rr-wrn": "9fb2dffc",
    "cifar100-ccat-reference": "97205883",
    "cifar100-ccat-reference-wrn": "a1f3c2ae",
    "cifar100-ccat-reference-rr": "e8848e5a",
    "cifar100-ccat-reference-rr-wrn": "07a56e0d",
    "cifar10-standard-short": "6f5703ce",
    "cifar10-standard-wrn-short": "251d28fc",
    "cifar10-pgdat-short": "fa1de40b",
    "cifar10-pgdat-wrn-short": "cba7392d",
    "cifar10-pgdat-rr-short": "18d1d96b",
    "cifar10-pgdat-rr-wrn-short": "1d1f0beb",
    "cifar10-pgdat-ebd-short": "0307236c",
    "cifar10-pgdat-ebd-wrn-short": "2fa317ff",
    "cifar10-pgdat-snet-short": "3098b0a1",
    "cifar10-pgdat-snet-wrn-short": "67c3a2f0",
    "cifar10-pgdat-atro-short": "accc6920",
    "cifar10-pgdat-atro-wrn-short": "e376700d",
    "cifar10-pgdat-carl-short": "f8913848",
    "cifar10-pgdat-carl-wrn-short": "b62f3f83",
    "cifar10-trades-short": "5c7afa1c",
    "cifar10-trades-wrn-short": "a56cbf6a",
    "cifar10-trades-rr-short": "50913bfd",
    "cifar10-trades-rr-wrn-short": "ff068f22",
    "cifar10-ccat-short": "4b4a3c1a",
    "cifar10-ccat-wrn-short": "05bcd4d1",
    "cifar10-ccat-rr-short": "c4ad94ad",
    "cifar10-ccat-rr-wrn-short": "a77aff04",
    "cifar10-ccat-reference-short": "2df89e89",
    "cifar10-ccat-reference-wrn-short": "e6ce83a8",
    "cifar10-ccat-reference-rr-short": "491ba28c",
    "cifar10-ccat-reference-rr-wrn-short": "3b755d04",
    "cifar10-pgdat-ebd-6-0-short": "e16e8f68",
    "cifar10-pgdat-ebd-6-0-wrn-short": "81cf11f2",
    "cifar10-pgdat-ebd-swapped-short": "50cd5d86",
    "cifar10-pgdat-ebd-swapped-wrn-short": "bc818361",
    "cifar10-pgdat-snet-8-0.8-short": "13ca1243",
    "cifar10-pgdat-snet-8-0.8-wrn-short": "22089e26",
    "cifar10-pgdat-snet-8-0.9-short": "b7b7dec0",
    "cifar10-pgdat-snet-8-0.9-wrn-short": "33065ddd",
    "cifar10-pgdat-snet-16-0.7-short": "ef61dbf0",
    "cifar10-pgdat-snet-16-0.7-wrn-short": "76e11a5b",
    "cifar10-pgdat-snet-16-0.8-short": "980c344a",
    "cifar10-pgdat-snet-16-0.8-wrn-short": "ba55ba4e",
    "cifar10-pgdat-snet-16-0.9-short": "7105233b",
    "cifar10-pgdat-snet-16-0.9-wrn-short": "da480a60",
    "cifar10-pgdat-snet-32-0.7-short": "a4129972",
    "cifar10-pgdat-snet-32-0.7-wrn-short": "7def0129",
    "cifar10-pgdat-snet-32-0.8-short": "4a23ae04",
    "cifar10-pgdat-snet-32-0.8-wrn-short": "6c69fc88",
    "cifar10-pgdat-snet-32-0.9-short": "a4c6457c",
    "cifar10-pgdat-snet-32-0.9-wrn-short": "34cac218",
    "cifar100-standard-short": "199d272f",
    "cifar100-standard-wrn-short": "1477a0ed",
    "cifar100-pgdat-short": "e7c251d1",
    "cifar100-pgdat-wrn-short": "baf4e9ad",
    "cifar100-pgdat-rr-short": "1e6a4ac2",
    "cifar100-pgdat-rr-wrn-short": "2696292d",
    "cifar100-pgdat-ebd-short": "4511a0c5",
    "cifar100-pgdat-ebd-wrn-short": "11c0a361",
    "cifar100-pgdat-snet-short": "cde111b0",
    "cifar100-pgdat-snet-wrn-short": "b25c0d22",
    "cifar100-pgdat-atro-short": "118e3bfb",
    "cifar100-pgdat-atro-wrn-short": "2543ffef",
    "cifar100-pgdat-carl-short": "5625cd97",
    "cifar100-pgdat-carl-wrn-short": "d5ee0bca",
    "cifar100-trades-short": "a2e994b5",
    "cifar100-trades-wrn-short": "3c66b068",
    "cifar100-trades-rr-short": "17399f7e",
    "cifar100-trades-rr-wrn-short": "20688b75",
    "cifar100-ccat-short": "ee1a170d",
    "cifar100-ccat-wrn-short": "d444b8db",
    "cifar100-ccat-rr-short": "7ad2fdda",
    "cifar100-ccat-rr-wrn-short": "9774013b",
    "cifar100-ccat-reference-short": "1001a6fc",
    "cifar100-ccat-reference-wrn-short": "257300d5",
    "cifar100-ccat-reference-rr-short": "47decbf1",
    "cifar100-ccat-reference-rr-wrn-short": "7fc2ffd8",
    "cifar10-trades-rr-awp": "6f6b5609",
    "cifar10-best": "2201ef25",
    "clean": "d02a4cc7",
    "pgd-10": "9c7a1f37",
    "pgd-20": "408c29dc",
    "pgd-100": "fe2642ab",
    "pgd-500": "0005458b",
    "pgd-1000": "63035160",
    "pgd-10-l2": "2f5bfe12",
    "pgd-100-l2": "73447e91",
    "adaptive": "e5fa8289",
    "adaptive-apgd": "07dd2baf",
    "multi-target": "61f6c556",
    "corruption": "91f891dc",
    "gama-pgd": "a663751c",
    "gama-fw": "e52dd496",
    "xi": "aa9b098b",
    "autoattack": "142001d0",
    "autoattack-l2": "2ecab6f1",
    "frank-wolfe": "d6372161",
    "max-min-margin": "eaa4b3e3",
    "orthogonal-apgd": "4a510a1c",
    "pgd": "fc71db6d",
    "reject-autoattack": "031b0bc7",
    "force-rejection": "04132b4c",
    "cw": "b749a657",
    "cw-linf": "b700accc",
    "cw-linf-adam": "72c3b69f",
    "cw-adaptive": "6a219e98",
    "cw-adaptive-linf": "55995331",
    "adaptive-ce-log-score": "0f9db1d2",
    "adaptive-ce-rr": "a32b3f0e",
    "adaptive-con-rr": "f42ddf03",
    "adaptive-con-log-score": "47550a74",
    "adaptive-targets-rr": "b40c7ca4",
    "adaptive-ce-score": "05f1ff58",
    "adaptive on a plain net": "e0ddfe14",
    "slips": "c4ce7a5d",
    "refused": "be82ada3",
    "slips at a risk": "2cf6224f",
    "refused at a coverage": "780e5b19",
    "energy": "2f9a3efb",
    "objectives": "8643f7d5",
    "goals of heads": "b24f63d2",
    "scores of heads": "a60d5e51",
    "a difference": "c6267a5b",
    "a rule against A": "58c24262",
    "rr in full": "3bf3b02e",
    "rr apart": "51c79068",
    "a wrapped recipe": "2cc63228",
    "a retrofit": "6d931783",
    "piecewise": "fe027306",
    "crop": "a8c86774",
    "cifar10": "369bc955",
    "cifar100": "9d8c50b8",
    "Con": "0883908e",
    "R-Con": "f34ba368",
    "Con+R-Con": "b7f6cd53",
    "A": "afe32a6a",
    "Energy": "6aa36b4b",
    "Margin": "05f8e3ab",
    "Entropy": "0a044fb9",
    "MaxLogit": "b7db7f80",
    "KD": "7ffefbfc",
    "LID": "92f49c00",
    "kNN": "6dce35c2",
    "GDA": "f7b2e7f1",
    "GDA*": "244f1e7e",
    "GMM": "25221b02",
    "ViM": "69ac00f3",
    "coverage": "0210e092",
    "risk": "2cf6224f",
    "apgd": "1c7e914c",
    "fab": "a26fe07e",
    "square": "67468c79",
    "chain": "75751990",
    "balanced": "ae9e13bd",
    "orthogonal": "97459f7d",
    "passing": "eab26f1a",
    "dlr sum": "ddd07c71",
}
