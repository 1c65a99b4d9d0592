"""Signed guards and archives: what a signature finds that digests cannot, by the real package."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("model_signing") is None:
    pytest.skip("model_signing is not installed", allow_module_level=True)

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from demur import verify
from demur.attacks import Clean
from demur.errors import BadInput
from demur.evaluate import LoadedRun, RecordOptions, archive, pack, run_attack
from demur.files.checked_files import PASSWORD, check_private_key, check_signature, sign_folder
from demur.guards import Guard
from tests.conftest import Command
from tests.damages import FORGED, edit_config, put
from tests.test_cli import expect_error


def write_keys(folder: Path, name: str, curve: ec.EllipticCurve, password: bytes = b"") -> None:
    """Write a private and a public key."""
    key = ec.generate_private_key(curve)
    cipher: serialization.KeySerializationEncryption = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, cipher)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder, "own", ec.SECP256R1())
    write_keys(folder, "other", ec.SECP384R1())
    write_keys(folder, "bitcoin", ec.SECP256K1())
    write_keys(folder, "locked", ec.SECP256R1(), b"secret")
    return folder


@pytest.fixture
def signed(tiny_guard: Guard, keys: Path, tmp_path: Path) -> Path:
    return tiny_guard.save(tmp_path / "guard", sign=keys / "own.pem")


def test_a_signed_guard_is_loaded_and_verified(signed: Path, keys: Path) -> None:
    Guard.load(signed, public_key=keys / "own.pub")
    found = verify(signed, key=keys / "own.pub")
    assert (found.findings, found.checked["signatures"]) == ([], 1)
    assert verify(signed).unchecked["model.sig: no public key is given"] == 1
    with pytest.raises(BadInput, match="does not hold: Key mismatch"):
        Guard.load(signed, public_key=keys / "other.pub")
    assert len(verify(signed, key=keys / "other.pub").findings) == 1


@pytest.mark.parametrize(
    "forged", [one for one in FORGED if one.what == "guard" and not one.found], ids=lambda f: f.name
)
def test_forgeries_that_verify_cannot_find_break_the_signature(
    forged: object, signed: Path, keys: Path
) -> None:
    forged.change(signed)  # type: ignore[attr-defined]
    assert verify(signed).findings == []
    with pytest.raises(BadInput, match="does not hold: Signature mismatch"):
        check_signature(signed, keys / "own.pub")


def test_files_added_removed_or_linked_break_the_signature(signed: Path, keys: Path) -> None:
    public = keys / "own.pub"
    (signed / ".lock").touch()
    check_signature(signed, public)
    for change, undo in (
        ((signed / "x").touch, (signed / "x").unlink),
        (lambda: (signed / "x").symlink_to("README.md"), (signed / "x").unlink),
        (lambda: (signed / "README.md").rename(signed.parent / "r"),
         lambda: (signed.parent / "r").rename(signed / "README.md")),
    ):  # fmt: skip
        change()
        with pytest.raises(BadInput, match="does not hold"):
            check_signature(signed, public)
        undo()
        check_signature(signed, public)
    for content in (b"", b"{}", b"[" * 5000, (signed / "model.sig").read_bytes()[:-9], b"\xff"):
        (signed / "model.sig").write_bytes(content)
        with pytest.raises(BadInput, match="does not hold") as error:
            check_signature(signed, public)
        assert "\n" not in str(error.value)
    (signed / "model.sig").unlink()
    with pytest.raises(BadInput, match=r"is not signed: model\.sig is missing"):
        check_signature(signed, public)


def test_keys_that_cannot_sign_are_named_before_any_work(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for name in ("bitcoin.pem", "own.pub", "locked.pem"):
        with pytest.raises(BadInput, match="is not a private elliptic-curve key"):
            check_private_key(keys / name)
    with pytest.raises(BadInput, match="is missing; name a private key"):
        check_private_key(keys / "none.pem")
    monkeypatch.setenv(PASSWORD, "secret")
    check_private_key(keys / "locked.pem")
    (tmp_path / "folder").mkdir()
    sign_folder(tmp_path / "folder", keys / "own.pem")
    for name in ("bitcoin.pub", "own.pem"):
        with pytest.raises(BadInput, match="is not a public elliptic-curve key"):
            check_signature(tmp_path / "folder", keys / name)
    words = ("export", "nothing", "--sign", str(keys / "own.pub"))
    expect_error(command(*words), "is not a private elliptic-curve key")


def test_archives_and_packs_are_signed(own_source: LoadedRun, keys: Path, tmp_path: Path) -> None:
    run_attack(own_source, "clean", Clean(), RecordOptions(n=30))
    archive(own_source, tmp_path / "archive", only=["R-Con"], sign=keys / "own.pem")
    pack(own_source, tmp_path / "pack", 10, sign=keys / "own.pem")
    for name in ("archive", "pack"):
        assert verify(tmp_path / name, key=keys / "own.pub").findings == []
    assert len(verify(own_source.run.path, n=0, key=keys / "own.pub").findings) == 1


def test_the_service_demands_the_signature(signed: Path, keys: Path, command: Command) -> None:
    edit_config(signed, put(3.0, "temperature"))
    words = ("serve", str(signed), "--require-signature", str(keys / "own.pub"))
    expect_error(command(*words), "does not hold: Signature mismatch")
