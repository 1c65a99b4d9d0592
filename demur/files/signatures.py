"""Signatures of folders by OpenSSF model-signing: `model.sig` signs names and bytes of the files.

A digest finds accidents. Only a signature shows that a file is from the owner of a key.
"""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from demur.errors import BadInput, bad_input, first_line, import_optional, shorten
from demur.files.atomic import MEGABYTE, read_regular_file

SIGNATURE = "model.sig"
UNSIGNED = (SIGNATURE, ".lock")  # the lock file is empty and not read
PASSWORD = "DEMUR_KEY_PASSWORD"
MAX_SIGNATURE = 8 * MEGABYTE
MAX_KEY = MEGABYTE


def check_private_key(name: str | Path | None) -> None:
    """Raise BadInput if a key cannot sign; called before any work."""
    if name is not None:
        _signer(Path(name))


def sign_folder(folder: Path, private_key: str | Path) -> None:
    """Write the signature of all files of a folder into it."""
    signer = _signer(Path(private_key))
    signer.set_hashing_config(_hashing()).sign(folder, folder / SIGNATURE)


def check_signature(folder: Path, public_key: str | Path) -> None:
    """Raise BadInput unless a folder has a signature by this key and no file changed since."""
    signing = _library()
    read_regular_file(Path(public_key), MAX_KEY, "name a public key in a PEM file")
    # cryptography raises its own errors for whatever is no such key
    with bad_input(f"{public_key} is not a public elliptic-curve key in a PEM file; name another"):
        verifier = signing.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    if not (folder / SIGNATURE).exists():
        raise BadInput(f"{folder} is not signed: {SIGNATURE} is missing; ask for a signed copy")
    read_regular_file(folder / SIGNATURE, MAX_SIGNATURE, "ask for a signed copy")
    try:
        with redirect_stdout(sys.stderr):  # it prints warnings, which would spoil JSON
            verifier.set_hashing_config(_hashing()).verify(folder, folder / SIGNATURE)
    except Exception as error:  # of the library, of cryptography, and of parsers of the file
        reason = first_line(error) if isinstance(error, ValueError) else type(error).__name__
        raise BadInput(
            f"the signature of {folder} does not hold: {shorten(reason)}; ask for another copy"
        ) from None


def _signer(private_key: Path) -> Any:
    signing = _library()
    content = read_regular_file(private_key, MAX_KEY, "name a private key in a PEM file")
    password = os.environ.get(PASSWORD, "").encode() if b"ENCRYPTED" in content else None
    with bad_input(
        f"{private_key} is not a private elliptic-curve key (P-256, P-384 or P-521) in a PEM "
        f"file, or {PASSWORD} is not its password; name another"
    ):
        new = signing.signing.Config()
        return new.use_elliptic_key_signer(private_key=private_key, password=password)


def _hashing() -> Any:
    """How files are hashed: all but the signature itself and a lock; a link is an error."""
    return _library().hashing.Config().set_ignored_paths(paths=UNSIGNED)


def _library() -> Any:
    return import_optional("model_signing", "signatures need model-signing", "'demur[sign]'")
