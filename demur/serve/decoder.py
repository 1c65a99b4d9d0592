"""The process that parses request bodies, decodes images, limits their number; it may be killed.

`demur.serve.workers` starts it by its path, so that neither `demur.serve` nor torch is imported:
it starts in 0.2 s and takes 30 MB. It gets a job (JSON) and a body, and answers with a JSON
document and the images, uint8 or float64 N, H, W, C.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demur.errors import BadInput, lack, shorten
from demur.files.image_files import count_pixels, load_pixels

DTYPES = ("uint8", "float32")
FORMS = "multipart/form-data with image files, an image, or application/json with arrays"
IN_MEMORY = 1 << 40  # bytes of an uploaded file that are not written to the disk
TOO_MANY = "a request may hold at most {} images; send several requests"
Files = list[tuple[str, bytes]]  # names and contents
Decoded = tuple[NDArray[Any], list[str], list[str]]  # images, names of files, notes


class RequestError(Exception):
    """A request that is answered with a status code of 400 to 599 and a reason."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


def kind_of(content_type: str) -> str:
    """The content type in lower case, without parameters; RequestError 415 if it is unknown."""
    kind = content_type.partition(";")[0].strip().lower()
    known = ("multipart/form-data", "application/json", "application/octet-stream")
    if kind not in known and not kind.startswith("image/"):
        raise RequestError(415, f"the content type is {printable(kind)!r}; send {FORMS}")
    return kind


def decode(job: dict[str, Any], body: bytes) -> Decoded:
    """Return the images of a body, N, H, W, C, the names of their files, and what was done to each.

    The job has `content_type`, `shape` and `resize` of the guard, and the limits `max_images`,
    `max_pixels` of one image and `request_pixels` of all. RequestError has status and reason.
    """
    kind = kind_of(job["content_type"])
    if kind == "application/json":
        array = read_arrays(body, job["max_images"])
        names = [""] * (len(array) if array.ndim == 4 else 1)
        return array, names, names
    is_form = kind == "multipart/form-data"
    files = read_form(job["content_type"], body, job["max_images"]) if is_form else [("", body)]
    if not files:
        raise RequestError(422, "the request holds no image; send at least one file")
    total = sum(_of_each(lambda content: count_pixels(content, job["max_pixels"]), files))
    if total > job["request_pixels"]:
        raise RequestError(
            413,
            f"the images have {total:,} pixels together and may have {job['request_pixels']:,}; "
            "send several requests, or smaller images",
        )
    shape, resize = tuple(job["shape"]), job["resize"]
    loaded = _of_each(lambda content: load_pixels(content, shape, resize, job["max_pixels"]), files)
    return np.stack([one for one, _ in loaded]), [n for n, _ in files], [note for _, note in loaded]


def _of_each(function: Callable[[bytes], Any], files: Files) -> list[Any]:
    """The values of a function of each file; a RequestError names the file that is wrong."""
    found = []
    for name, content in files:
        try:
            found.append(function(content))
        except BadInput as error:
            if lack(error):
                raise MemoryError from None
            raise RequestError(422, f"{name}: {error}" if name else str(error)) from None
    return found


def read_form(content_type: str, body: bytes, max_images: int) -> Files:
    """Names and contents of the files of a multipart body."""
    from python_multipart.multipart import FormParser, parse_options_header

    files: Files = []

    def on_field(field: Any) -> None:
        raise ValueError("it has a field that is no file")

    def on_file(file: Any) -> None:
        if len(files) == max_images:
            raise RequestError(413, TOO_MANY.format(max_images))
        content = file.file_object
        content.seek(0)
        name = (file.file_name or b"").decode("utf-8", "replace")
        files.append((printable(name), content.read()))

    try:
        kind, options = parse_options_header(content_type)
        parser = FormParser(
            kind.decode(), on_field, on_file, boundary=options.get(b"boundary"),
            config={"MAX_MEMORY_FILE_SIZE": IN_MEMORY},
        )  # fmt: skip
        parser.write(body)
        parser.finalize()
    except RequestError:
        raise
    except Exception as error:  # the parser of a stranger's bytes
        reason = str(error) if type(error) is ValueError else "it is damaged"
        raise RequestError(
            400,
            f"the multipart body cannot be read: {reason}; send at most {max_images} files and no "
            "other fields",
        ) from None
    return files


def printable(name: str) -> str:
    """A stranger's text without control characters, for answers in one line."""
    return shorten("".join(letter for letter in name if letter.isprintable()))


def read_arrays(body: bytes, max_images: int) -> NDArray[Any]:
    """The images of a JSON document as they are, H, W, C or N, H, W, C."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError, MemoryError):
        raise RequestError(400, "the body is not JSON") from None
    if not isinstance(document, dict):
        raise RequestError(422, 'the document must be an object with "images" and "dtype"')
    if document.keys() - {"images", "dtype"} or "images" not in document:
        raise RequestError(422, 'the document must hold "images" and "dtype" and nothing else')
    dtype = document.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise RequestError(422, f'"dtype" must be one of {", ".join(DTYPES)}')
    array = _array(document["images"], dtype)
    if array.ndim == 4 and len(array) > max_images:
        raise RequestError(413, TOO_MANY.format(max_images))
    return array


def _array(images: Any, dtype: str) -> NDArray[Any]:
    """Nested lists of numbers as an array; integers from 0 to 255 for uint8."""
    wrong = RequestError(
        422, '"images" must hold nested lists of numbers of shape H, W, C or N, H, W, C'
    )
    try:
        array = np.asarray(images) if isinstance(images, list) else None
    except (ValueError, OverflowError, RecursionError, MemoryError):
        raise wrong from None
    if array is None or array.ndim not in (3, 4) or array.size == 0:
        raise wrong
    if dtype == "uint8":
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
            raise RequestError(422, 'with "dtype": "uint8" values are integers from 0 to 255')
        return array.astype(np.uint8)
    if array.dtype.kind not in "iuf":
        raise wrong
    return array.astype(np.float64)


def main(handle: int, memory: int) -> None:
    """Answer requests until the pipe ends, with at most `memory` bytes."""
    pipe: Connection[Any, Any] = Connection(handle)
    with suppress(ImportError, OSError, ValueError):  # not every system can
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    while True:
        try:
            job, body = json.loads(pipe.recv_bytes()), pipe.recv_bytes()
        except EOFError:
            return
        head, content = dict[str, Any](), b""
        try:
            array, names, notes = decode(job, body)
            content = array.tobytes()
            head = {"shape": array.shape, "dtype": array.dtype.name, "names": names, "notes": notes}
        except RequestError as error:
            head = {"status": error.status, "detail": error.detail}
        except MemoryError:
            detail = "the images need too much memory; send fewer or smaller ones"
            head = {"status": 413, "detail": detail}
        pipe.send_bytes(json.dumps(head).encode())
        pipe.send_bytes(content)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
