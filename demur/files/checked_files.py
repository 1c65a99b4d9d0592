"""Files written whole and checked when read: bounded reads, digests, locks, signatures.

A kill leaves the old file or the new one; BadInput names a file whose bytes changed. Weights may be
stored with 8 bits a number: a large tensor becomes int8 with one scale for each output channel,
every other one fp16. A digest finds accidents. Only a signature (`model.sig`, by OpenSSF
model-signing) shows that a folder is from the owner of a key.
"""

import errno
import hashlib
import json
import math
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.lib import format
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from demur.errors import BadInput, bad_input, first_line, import_optional, shorten
from demur.files.output_paths import STANDARD_OUTPUT, is_standard_output, is_stream

SCALE = ".int8_scale"  # suffix of the name of the scales of a tensor


def restore(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with every int8 one that has scales in fp32 again; a copy without the scales."""
    full = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, tensor in full.items():
        scale = tensors.get(name + SCALE)
        if scale is not None and scale.shape == tensor.shape[:1]:
            full[name] = tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))
    return full


MEGABYTE = 1 << 20
MAPPED = 16 * MEGABYTE  # bytes of an array from which on it is read into a temporary file
TEMPORARY_FILES = ".*.tmp"
MAX_JSON = 8 * MEGABYTE
MAX_HEADER = MEGABYTE  # of a safetensors file
NUMBER_BYTES = 8  # of the largest type
MAX_STEM = 50  # characters of the target's name in a temporary name, which must not be too long
FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # each on some systems only
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def read_regular_file(path: Path, limit: int, remedy: str) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; BadInput ends with `remedy`."""
    with open_regular_file(path, limit, remedy) as file:
        return file.read()


@contextmanager
def open_regular_file(path: Path, limit: int, remedy: str) -> Iterator[IO[bytes]]:
    """Open a regular file of at most `limit` bytes; BadInput ends with `remedy`."""
    try:
        # a plain open of a pipe waits for a writer
        handle = os.open(path, os.O_RDONLY | FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path} is missing; {remedy}") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
            raise BadInput(f"{path} is {kind} and not a file; {remedy}")
        if found.st_size > limit:
            raise BadInput(
                f"{path} has {found.st_size:,} bytes and may have at most {limit:,}; {remedy}"
            )
        with os.fdopen(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def raise_unreadable(error: OSError) -> None:
    """Raise BadInput for a folder that os.walk cannot read, which it would skip in silence."""
    reason = (error.strerror or "it cannot be read").lower()
    raise BadInput(f"{error.filename}: {reason}; change its permissions or remove it")


def write_bytes(path: Path, content: bytes) -> str:
    """Write content to path atomically and return its digest.

    A symbolic link stays and its target is written. Pipes and devices are written to directly.
    """
    if is_standard_output(path):  # append
        sys.stdout.flush()
        with os.fdopen(os.dup(STANDARD_OUTPUT), "wb") as stream:
            stream.write(content)
    elif is_stream(path):
        path.write_bytes(content)
    else:
        with atomic_file(path) as file:
            file.write(content)
    return content_digest(content)


def move_file(path: Path, folder: Path) -> None:
    """Move a complete file into another folder and make the move durable."""
    path.replace(folder / path.name)
    _sync_folder(folder)


@contextmanager
def replace_folder(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (temporary folder to fill, resolved target); move it to the target on success.

    Only one process may replace a target at a time. An existing target is replaced, and is
    restored if the replacement fails. A symbolic link stays and its target is replaced.
    """
    resolved = target.resolve()
    if not resolved.name:
        raise BadInput(f"{target} is in the way; name a folder that does not exist yet")
    beside = resolved.with_name(f".{resolved.name}.making")
    half, old = beside / "half", beside / "old"
    with exclusive_lock(beside):
        try:
            _restore_and_clean(resolved, half, old)
            yield half, resolved
            if resolved.exists():
                resolved.replace(old)
            half.replace(resolved)
        finally:
            _restore_and_clean(resolved, half, old)
            (beside / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # not empty: somebody else put a file there
                beside.rmdir()


def _restore_and_clean(target: Path, half: Path, old: Path) -> None:
    """Restore the old folder if the target is missing, then delete temporary folders."""
    if old.exists() and not target.exists():
        old.replace(target)
    for leftover in (half, old):
        shutil.rmtree(leftover, ignore_errors=True)


def content_digest(content: bytes) -> str:
    """SHA-256 of the bytes as 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def write_text(path: Path, text: str) -> str:
    """Write text to path atomically and return its digest."""
    return write_bytes(path, text.encode())


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to path as safetensors, atomically, and return the file's digest."""
    return write_bytes(path, bytes_of({k: v.contiguous().cpu() for k, v in tensors.items()}))


def write_json(path: Path, metadata: dict[str, Any], indent: int = 2) -> None:
    """Write a JSON document atomically, with a digest of itself as `metadata_digest`."""
    document = metadata | {"metadata_digest": _metadata_digest(metadata)}
    write_text(path, json.dumps(document, indent=indent) + "\n")


def tensor_digest(named: Mapping[str, Tensor], text: str = "") -> bytes:
    """Return the SHA-256 of a text and of tensors with names, dtypes and shapes."""
    hasher = hashlib.sha256(text.encode())
    for name, tensor in named.items():
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        for part in in_pieces(tensor) if tensor.ndim else (tensor,):
            flat = part.detach().cpu().contiguous().flatten()
            hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.digest()


def read_checked(path: Path, digest: str, remedy: str, limit: int) -> bytes:
    """Bytes of a file of at most `limit` bytes; BadInput if it is missing or damaged."""
    content = read_regular_file(path, limit, remedy)
    check_digest(path, digest, content_digest(content), remedy)
    return content


def file_digest(file: Any) -> str:
    """SHA-256 of an open file, from its beginning, as 64 hex digits."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(
    path: Path, digest: str, remedy: str, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors of a safetensors file that have the names, kinds of numbers and shapes of `like`.

    Quantised tensors are restored.
    """
    numbers = sum(tensor.numel() for tensor in like.values())
    content = read_checked(path, digest, remedy, NUMBER_BYTES * numbers + MAX_HEADER)
    kinds = (SafetensorError, KeyError, ValueError, RuntimeError)  # KeyError: an unknown type
    with bad_input(f"{path} is damaged: it is not a safetensors file; {remedy}", kinds):
        tensors = restore(tensors_of(content))
    for name in [*like, *tensors]:
        expected, found = (_describe_tensor(some.get(name)) for some in (like, tensors))
        if expected != found:
            raise BadInput(
                f"{path} does not fit the recipe: {name[:80]} is {found}, not {expected}; {remedy}"
            )
    return tensors


def read_array(stream: IO[bytes], size: int) -> NDArray[Any]:
    """One array without objects of an npy stream of `size` bytes; ValueError if it needs more.

    A large array is mapped from a temporary file.
    """
    headers = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
    shape, fortran, dtype = headers[format.read_magic(stream)](stream)
    length = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or length > size:
        raise ValueError
    if length < MAPPED:
        flat = np.frombuffer(bytearray(stream.read(length)), dtype)
    else:
        with TemporaryFile() as file:
            for start in range(0, length, MEGABYTE):
                file.write(stream.read(min(MEGABYTE, length - start)))
            file.flush()
            flat = np.memmap(file, dtype, "c")
    return flat.reshape(shape, order="F" if fortran else "C")


def tensor_of(array: NDArray[Any]) -> Tensor:
    """The array as a tensor; `release` knows the file that it is mapped from."""
    tensor = torch.from_numpy(array)
    tensor.mapping = array  # type: ignore[attr-defined]
    return tensor


def mapped(path: Path, *shape: int) -> Tensor:
    """Numbers of 32 bits that stay in a file until they are used."""
    is_empty = not path.stat().st_size
    flat = np.empty(0, np.float32) if is_empty else np.memmap(path, np.float32, "c")
    return tensor_of(flat.reshape(shape))


def release(values: Tensor | NDArray[Any] | None) -> None:
    """Let go of the pages of a mapped file, which the next access reads again.

    What NumPy wrote to a copy on write is lost; a tensor that torch has changed keeps its pages.
    """
    if isinstance(values, Tensor) and not values.is_inference() and values._version:
        return
    base: Any = getattr(values, "mapping", values)
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        base.madvise(mmap.MADV_DONTNEED)


def in_pieces(values: Tensor) -> Iterator[Tensor]:
    """Yield rows of about a megabyte together; those of a mapped file are released."""
    for part in values.split(max(1, MEGABYTE // max(1, values[:1].nbytes))):
        yield part
        release(values)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Contents of a JSON file that write_json wrote, after its own digest is checked."""
    content = read_regular_file(path, MAX_JSON, remedy)
    try:
        metadata: dict[str, Any] = json.loads(content.decode())
        expected = metadata.pop("metadata_digest")
        json.dumps(metadata, ensure_ascii=False).encode()  # raises for half a surrogate pair
        found = _metadata_digest(metadata)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise BadInput(f"{path} is damaged: it contains no digest; {remedy}") from None
    except (RecursionError, MemoryError):
        raise BadInput(f"{path} is damaged: it is nested too deeply; {remedy}") from None
    check_digest(path, str(expected), found, remedy)
    return metadata


def delete_temporary_files(folder: Path) -> None:
    """Delete the temporary files that interrupted writes left in a folder."""
    for half in folder.glob(TEMPORARY_FILES):
        half.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a folder; the operating system releases it if the process dies.

    If another process holds it, `on_wait` is called before waiting; without it BadInput is raised.
    A process may take a lock that it already holds.
    """
    lock = FileLock(folder.resolve() / ".lock", is_singleton=True)
    timeout = 0.0  # then for ever
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout)
            break
        except FileNotFoundError:  # another process has deleted the folder at this moment
            continue
        except Timeout:
            if on_wait is None:
                text = f"another process is writing {folder}; wait until it has ended"
                raise BadInput(text) from None
            on_wait()
            timeout = -1.0
        except OSError as error:
            error.filename = str(folder)  # the user named the folder, not the lock file
            raise
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file beside the target, then rename it; an OSError names the target."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # realpath stops at a link that leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    half = target.with_name(f".{target.name[:MAX_STEM]}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with half.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        half.replace(target)
    except BaseException as error:
        with suppress(OSError):
            half.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(half)):
            error.filename = str(path)
        raise
    _sync_folder(target.parent)


def check_digest(path: Path, expected: str, found: str, remedy: str) -> None:
    """Raise BadInput unless the digest of a file is the expected one."""
    if found != expected:
        raise BadInput(
            f"{path} is damaged: expected digest {expected[:16]}, found {found[:16]}; {remedy}"
        )


def _describe_tensor(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    kind = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(tensor.shape)}"  # a net trained in fp64 is stored in fp64


def _metadata_digest(metadata: dict[str, Any]) -> str:
    return content_digest(json.dumps(metadata, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power failure before files that it replaces are deleted."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
