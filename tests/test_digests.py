"""Digests of specs: what they see, and that those of everything with a name last."""

from dataclasses import dataclass, field
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from demur.declared import Count, Positive
from demur.recipes import VOCABULARY
from demur.spec import Spec, digest, later, show
from tests.test_spec import NAMED


@dataclass(frozen=True)
class Early(Spec):
    a: Count = 1


@dataclass(frozen=True)
class Toy(Spec):
    a: Count = 1
    b: Positive = 0.5
    mode: Literal["x", "y"] = "x"


def test_a_field_added_later_leaves_digests_alone_at_its_neutral_value() -> None:
    before = digest(Early())

    @dataclass(frozen=True)
    class Early2(Spec):
        a: Count = 1
        added: float = field(default=2.0, metadata=later(neutral=0.0))

    Early2.__name__ = "Early"
    assert digest(Early2(added=0.0)) == before
    assert digest(Early2()) != before


def test_a_new_version_changes_the_digest() -> None:
    before = digest(Toy())
    changed = type("Toy", (Toy,), {"VERSION": 2})
    assert digest(changed()) != before


@given(st.integers(1, 99), st.floats(0.01, 9), st.sampled_from(["x", "y"]))
def test_digest_sees_every_field(a: int, b: float, mode: Literal["x", "y"]) -> None:
    spec = Toy(a, b, mode)
    assert (digest(spec) == digest(Toy())) == (spec == Toy())


def test_golden_digests() -> None:
    """A change here makes old runs and records unfindable: bump VERSION or use later()."""
    found = {name: digest(spec)[:8] for name, spec in NAMED.items()}
    named = " ".join(show(spec, full=True) for spec in NAMED.values())
    assert [name for name in VOCABULARY if f"{name}(" not in named] == [], "classes not covered"
    assert found == GOLDEN


GOLDEN: dict[str, str] = {
    "digits-standard": "07a7f3cb",
    "digits-standard-rr": "2abf2de0",
    "digits-standard-ebd": "fd443862",
    "digits-standard-snet": "7e64d617",
    "digits-standard-atro": "bacc0827",
    "digits-standard-carl": "6147bc03",
    "digits-pgdat": "6a52ef21",
    "digits-pgdat-rr": "bb2d4b1b",
    "digits-pgdat-ebd": "04cce702",
    "digits-pgdat-snet": "60c9f447",
    "digits-pgdat-atro": "558afbba",
    "digits-pgdat-carl": "9c34be50",
    "digits-trades": "01499267",
    "digits-trades-rr": "626b3d6d",
    "digits-trades-ebd": "a6485112",
    "digits-trades-snet": "253a4965",
    "digits-ccat": "98171418",
    "digits-ccat-rr": "6dccc0c3",
    "digits-ccat-ebd": "18cf3d96",
    "digits-ccat-reference": "56e935a6",
    "digits-ccat-reference-rr": "dd35441e",
    "digits-ccat-reference-ebd": "62a24738",
    "digits-pgdat-ebd-swapped": "06aff85d",
    "cifar10-standard": "1a059fe9",
    "cifar10-standard-wrn": "3790bf12",
    "cifar10-pgdat": "ee46e87d",
    "cifar10-pgdat-wrn": "75821339",
    "cifar10-pgdat-rr": "a545aa57",
    "cifar10-pgdat-rr-wrn": "75b1b951",
    "cifar10-pgdat-ebd": "988f4b18",
    "cifar10-pgdat-ebd-wrn": "30c591b3",
    "cifar10-pgdat-snet": "91629c1a",
    "cifar10-pgdat-snet-wrn": "efb4f9b4",
    "cifar10-pgdat-atro": "81716b31",
    "cifar10-pgdat-atro-wrn": "d244bf06",
    "cifar10-pgdat-carl": "7470c952",
    "cifar10-pgdat-carl-wrn": "594c09ab",
    "cifar10-trades": "4bc8b9b9",
    "cifar10-trades-wrn": "612f8496",
    "cifar10-trades-rr": "81b9f766",
    "cifar10-trades-rr-wrn": "6acc7955",
    "cifar10-ccat": "f00ffee0",
    "cifar10-ccat-wrn": "cbf412fa",
    "cifar10-ccat-rr": "9d4d04ff",
    "cifar10-ccat-rr-wrn": "2aa4c4cc",
    "cifar10-ccat-reference": "655dc3e4",
    "cifar10-ccat-reference-wrn": "cda0b196",
    "cifar10-ccat-reference-rr": "f5c4aae1",
    "cifar10-ccat-reference-rr-wrn": "35008e1a",
    "cifar10-pgdat-ebd-6-0": "765eeb88",
    "cifar10-pgdat-ebd-6-0-wrn": "e47b47cd",
    "cifar10-pgdat-ebd-swapped": "50c1f76c",
    "cifar10-pgdat-ebd-swapped-wrn": "87d31e28",
    "cifar10-pgdat-snet-8-0.8": "e71aeeb6",
    "cifar10-pgdat-snet-8-0.8-wrn": "e58e19d4",
    "cifar10-pgdat-snet-8-0.9": "9021b496",
    "cifar10-pgdat-snet-8-0.9-wrn": "99308fc4",
    "cifar10-pgdat-snet-16-0.7": "8b03c857",
    "cifar10-pgdat-snet-16-0.7-wrn": "58edeefb",
    "cifar10-pgdat-snet-16-0.8": "414a80a3",
    "cifar10-pgdat-snet-16-0.8-wrn": "be2abee1",
    "cifar10-pgdat-snet-16-0.9": "68590c24",
    "cifar10-pgdat-snet-16-0.9-wrn": "90965021",
    "cifar10-pgdat-snet-32-0.7": "8c6406f6",
    "cifar10-pgdat-snet-32-0.7-wrn": "30f98df0",
    "cifar10-pgdat-snet-32-0.8": "d9d7dfa8",
    "cifar10-pgdat-snet-32-0.8-wrn": "b8c19614",
    "cifar10-pgdat-snet-32-0.9": "3b73d676",
    "cifar10-pgdat-snet-32-0.9-wrn": "32315a9f",
    "cifar100-standard": "a05b5d0f",
    "cifar100-standard-wrn": "94304323",
    "cifar100-pgdat": "3c3284f5",
    "cifar100-pgdat-wrn": "dba5e304",
    "cifar100-pgdat-rr": "e50f82d2",
    "cifar100-pgdat-rr-wrn": "acfe5dcc",
    "cifar100-pgdat-ebd": "25dbb627",
    "cifar100-pgdat-ebd-wrn": "7d4824aa",
    "cifar100-pgdat-snet": "e7e853c6",
    "cifar100-pgdat-snet-wrn": "2f3e5504",
    "cifar100-pgdat-atro": "ab65ac96",
    "cifar100-pgdat-atro-wrn": "1b7297c6",
    "cifar100-pgdat-carl": "970a10fe",
    "cifar100-pgdat-carl-wrn": "7507d507",
    "cifar100-trades": "da4d1353",
    "cifar100-trades-wrn": "566b8c10",
    "cifar100-trades-rr": "d4cf8cc8",
    "cifar100-trades-rr-wrn": "bda91758",
    "cifar100-ccat": "04b1e96f",
    "cifar100-ccat-wrn": "691570b3",
    "cifar100-ccat-rr": "f5b2affb",
    "cifar100-ccat-rr-wrn": "ba747df0",
    "cifar100-ccat-reference": "9d455cf2",
    "cifar100-ccat-reference-wrn": "4aa3ece8",
    "cifar100-ccat-reference-rr": "f9e4038c",
    "cifar100-ccat-reference-rr-wrn": "86e0b61b",
    "cifar10-standard-short": "ea62057e",
    "cifar10-standard-wrn-short": "4bbc68ec",
    "cifar10-pgdat-short": "3e2bd4e3",
    "cifar10-pgdat-wrn-short": "7d651f2a",
    "cifar10-pgdat-rr-short": "ba192ab1",
    "cifar10-pgdat-rr-wrn-short": "4bcb2492",
    "cifar10-pgdat-ebd-short": "da2176d0",
    "cifar10-pgdat-ebd-wrn-short": "68ddc3f9",
    "cifar10-pgdat-snet-short": "012a9e60",
    "cifar10-pgdat-snet-wrn-short": "7567a6b2",
    "cifar10-pgdat-atro-short": "2ec5a0b8",
    "cifar10-pgdat-atro-wrn-short": "488f3c5e",
    "cifar10-pgdat-carl-short": "4941d53c",
    "cifar10-pgdat-carl-wrn-short": "3591ac9d",
    "cifar10-trades-short": "5859388a",
    "cifar10-trades-wrn-short": "21e71d79",
    "cifar10-trades-rr-short": "42b15897",
    "cifar10-trades-rr-wrn-short": "e0cdc613",
    "cifar10-ccat-short": "4301117c",
    "cifar10-ccat-wrn-short": "32d77a44",
    "cifar10-ccat-rr-short": "1f2d7287",
    "cifar10-ccat-rr-wrn-short": "4c2a2ecf",
    "cifar10-ccat-reference-short": "b3acf8ff",
    "cifar10-ccat-reference-wrn-short": "9c220cd6",
    "cifar10-ccat-reference-rr-short": "c999c90a",
    "cifar10-ccat-reference-rr-wrn-short": "35616f96",
    "cifar10-pgdat-ebd-6-0-short": "eecbfc18",
    "cifar10-pgdat-ebd-6-0-wrn-short": "7a019a5a",
    "cifar10-pgdat-ebd-swapped-short": "3eb93ff7",
    "cifar10-pgdat-ebd-swapped-wrn-short": "e880b9e2",
    "cifar10-pgdat-snet-8-0.8-short": "cfeec259",
    "cifar10-pgdat-snet-8-0.8-wrn-short": "e598f4b1",
    "cifar10-pgdat-snet-8-0.9-short": "a9d28ea0",
    "cifar10-pgdat-snet-8-0.9-wrn-short": "91f7cf35",
    "cifar10-pgdat-snet-16-0.7-short": "0bffd80e",
    "cifar10-pgdat-snet-16-0.7-wrn-short": "6cf075e2",
    "cifar10-pgdat-snet-16-0.8-short": "bf8f0778",
    "cifar10-pgdat-snet-16-0.8-wrn-short": "12a8874d",
    "cifar10-pgdat-snet-16-0.9-short": "424ac46f",
    "cifar10-pgdat-snet-16-0.9-wrn-short": "7d796315",
    "cifar10-pgdat-snet-32-0.7-short": "d2d69a8d",
    "cifar10-pgdat-snet-32-0.7-wrn-short": "cecc0b19",
    "cifar10-pgdat-snet-32-0.8-short": "9fec0f20",
    "cifar10-pgdat-snet-32-0.8-wrn-short": "48e5a500",
    "cifar10-pgdat-snet-32-0.9-short": "08309c31",
    "cifar10-pgdat-snet-32-0.9-wrn-short": "99c15172",
    "cifar100-standard-short": "77b00a76",
    "cifar100-standard-wrn-short": "ef8972e6",
    "cifar100-pgdat-short": "774e9768",
    "cifar100-pgdat-wrn-short": "55a88f47",
    "cifar100-pgdat-rr-short": "dbe5a60c",
    "cifar100-pgdat-rr-wrn-short": "3a358cc7",
    "cifar100-pgdat-ebd-short": "feeaa5e1",
    "cifar100-pgdat-ebd-wrn-short": "332d17ed",
    "cifar100-pgdat-snet-short": "6766c06f",
    "cifar100-pgdat-snet-wrn-short": "e3e0d624",
    "cifar100-pgdat-atro-short": "d8fb5d30",
    "cifar100-pgdat-atro-wrn-short": "348aae46",
    "cifar100-pgdat-carl-short": "00568bb0",
    "cifar100-pgdat-carl-wrn-short": "d83ded38",
    "cifar100-trades-short": "d606d486",
    "cifar100-trades-wrn-short": "35744874",
    "cifar100-trades-rr-short": "4ec90ef5",
    "cifar100-trades-rr-wrn-short": "82a3c0d3",
    "cifar100-ccat-short": "8acad321",
    "cifar100-ccat-wrn-short": "dccaeebb",
    "cifar100-ccat-rr-short": "c964c552",
    "cifar100-ccat-rr-wrn-short": "f92011d5",
    "cifar100-ccat-reference-short": "e09a1109",
    "cifar100-ccat-reference-wrn-short": "49411846",
    "cifar100-ccat-reference-rr-short": "4b0b6cc2",
    "cifar100-ccat-reference-rr-wrn-short": "fb00b49c",
    "cifar10-best": "764a8ac6",
    "clean": "d02a4cc7",
    "pgd-10": "fad07944",
    "pgd-20": "c6def910",
    "pgd-100": "0d282e50",
    "pgd-500": "678b5dd4",
    "pgd-1000": "dd396320",
    "pgd-10-l2": "859caa11",
    "pgd-100-l2": "7dea4c66",
    "adaptive": "c7f2f0e6",
    "adaptive-apgd": "4641bf34",
    "multi-target": "ce09abaa",
    "gama-pgd": "a46d1db6",
    "gama-fw": "4e5dbd1f",
    "xi": "a629ce37",
    "autoattack": "c9db90e2",
    "autoattack-l2": "bd4012ea",
    "reject-autoattack": "abbc53fd",
    "force-refusal": "f9fd78e2",
    "cw": "dabae53d",
    "cw-linf": "7ccec47a",
    "cw-linf-adam": "348e0c41",
    "cw-adaptive": "ab4a6c59",
    "cw-adaptive-linf": "007d687a",
    "adaptive-ce-trust": "d21979f2",
    "adaptive-ce-rr": "c602ebaf",
    "adaptive-con-rr": "25e423d9",
    "adaptive-con-trust": "092dddd5",
    "adaptive-targets-rr": "4803da41",
    "adaptive-ce-score": "5d603fc9",
    "adaptive on a plain net": "e60a6d20",
    "slips": "fb97ce09",
    "refused": "b4407105",
    "slips at a risk": "344e5d56",
    "refused at a coverage": "d80e8490",
    "energy": "2f9a3efb",
    "goals": "37890277",
    "goals of heads": "ea9e7920",
    "scores of heads": "354d2b6d",
    "a difference": "069f4fcb",
    "a rule against A": "1d1e99c1",
    "rr in full": "df7af79d",
    "rr apart": "5aaeb7dd",
    "a wrapped recipe": "432568ae",
    "a retrofit": "44e724f0",
    "piecewise": "12f20b83",
    "crop": "a8c86774",
    "cifar10": "369bc955",
    "cifar100": "9d8c50b8",
    "Con": "0883908e",
    "R-Con": "f34ba368",
    "Con+R-Con": "b50310c5",
    "A": "cf1bf3bf",
    "Energy": "6aa36b4b",
    "Margin": "f3655b01",
    "Entropy": "0a044fb9",
    "MaxLogit": "b7db7f80",
    "KD": "7ffefbfc",
    "LID": "92f49c00",
    "kNN": "6dce35c2",
    "GDA": "f7b2e7f1",
    "GDA*": "244f1e7e",
    "GMM": "25221b02",
    "ViM": "69ac00f3",
    "coverage": "56af9254",
    "risk": "344e5d56",
    "apgd": "dab7bbaa",
    "fab": "42becde2",
    "square": "0790c001",
    "chain": "e187d89d",
    "balanced": "b8e85d4f",
    "orthogonal": "73312ffa",
    "passing": "cb943980",
    "dlr sum": "ba22a960",
}
