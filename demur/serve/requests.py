"""Settings of the service, and requests to images: bounded reading of the body, and its forms.

multipart/form-data        one or several image files
image/*                    one image file as the body
application/json           {"images": H, W, C or N, H, W, C numbers, "dtype": "uint8" | "float32"}
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect, Request

from demur.errors import BadInput, shorten
from demur.files.atomic import MEGABYTE
from demur.guards.core import Guard
from demur.guards.inputs import Batch, read_images
from demur.spec import Spec
from demur.spec.field_types import Positive, PositiveInt

DTYPES = ("uint8", "float32")
FORMS = "multipart/form-data with image files, an image, or application/json with arrays"


@dataclass(frozen=True)
class Settings(Spec):
    """Limits and switches of the service.

    Attributes:
        max_body: Bytes of a request.
        max_pixels: Pixels of one image before it is resized.
        max_images: Images of one request.
        max_batch: Images of one forward pass.
        max_queue: Images that may wait for the model.
        max_requests: Requests that are handled at the same time.
        timeout: Seconds for reading a request, and again for answering it.
        attack: Whether an image may be attacked.
        token: Bearer token that requests must carry; None needs none.
        mean_run_length: Images between false drift alarms, on average at least.
    """

    max_body: PositiveInt = 8 * MEGABYTE
    max_pixels: PositiveInt = 16_000_000
    max_images: PositiveInt = 64
    max_batch: PositiveInt = 64
    max_queue: PositiveInt = 256
    max_requests: PositiveInt = 64
    timeout: Positive = 10.0
    attack: bool = True
    token: str | None = None
    mean_run_length: PositiveInt = 100_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise BadInput("the token must consist of printable ASCII characters")
        if self.token == "":
            raise BadInput("the token is empty; give a long random word")
        if self.max_queue < self.max_images:
            raise BadInput(
                f"the queue holds {self.max_queue} images, fewer than a request may have; raise it "
                f"to {self.max_images}, or lower max_images"
            )


class RequestError(Exception):
    """A request that is answered with a status code of 400 to 599 and a reason."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


async def images_of(request: Request, guard: Guard, settings: Settings) -> tuple[Batch, list[str]]:
    """Return the images of a request and the names of their files, "" for arrays."""
    try:
        body = await asyncio.wait_for(read_body(request, settings.max_body), settings.timeout)
    except TimeoutError:
        raise RequestError(408, "the body did not arrive in time; send it faster") from None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        files = await _multipart(request.headers, body, settings)
        return await run_in_threadpool(_read_files, files, guard, settings)
    if kind.startswith("image/") or kind == "application/octet-stream":
        return await run_in_threadpool(_read_files, [("", body)], guard, settings)
    if kind == "application/json":
        batch = await run_in_threadpool(_read_arrays, body, guard, settings)
        return batch, [""] * len(batch.x)
    raise RequestError(415, f"the content type is {shorten(kind)!r}; send {FORMS}")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body; RequestError 413 as soon as it is known to be larger than `limit`."""
    too_large = RequestError(
        413, f"the body may have at most {limit:,} bytes; send fewer or smaller images"
    )
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        raise RequestError(400, "content-length is not a number")
    if int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise RequestError(400, "the connection was closed before the end of the body") from None
    return bytes(body)


async def _multipart(headers: Headers, body: bytes, settings: Settings) -> list[tuple[str, bytes]]:
    """Names and contents of the files of a multipart body."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        headers, stream(), max_files=settings.max_images, max_fields=0,
        max_part_size=settings.max_body,
    )  # fmt: skip
    try:
        form = await parser.parse()
    except Exception as error:  # the parser of a stranger's bytes
        reason = shorten(getattr(error, "message", "") or "it is damaged")
        raise RequestError(
            400,
            f"the multipart body cannot be read: {reason}; send at most {settings.max_images} "
            "files and no other fields",
        ) from None
    try:
        return [
            (_printable(value.filename or ""), await value.read())
            for _, value in form.multi_items()
            if isinstance(value, UploadFile)
        ]
    finally:
        await form.close()


def _printable(name: str) -> str:
    """The name of a file without control characters, for answers in one line."""
    return shorten("".join(letter for letter in name if letter.isprintable()))


def _read_files(
    files: list[tuple[str, bytes]], guard: Guard, settings: Settings
) -> tuple[Batch, list[str]]:
    if not files:
        raise RequestError(422, "the request holds no image; send at least one file")
    batches = []
    for name, content in files:
        try:
            batches.append(read_images(content, guard.shape, guard.resize, settings.max_pixels))
        except BadInput as error:
            where = f"{name}: " if name else ""
            raise RequestError(422, f"{where}{error}") from None
    notes = tuple(batch.notes[0] for batch in batches)
    return Batch(torch.cat([batch.x for batch in batches]), notes), [name for name, _ in files]


def _read_arrays(body: bytes, guard: Guard, settings: Settings) -> Batch:
    document = _parse_json(body)
    unknown = sorted(set(document) - {"images", "dtype"})
    if unknown or "images" not in document:
        raise RequestError(422, 'the document must hold "images" and "dtype" and nothing else')
    dtype = document.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise RequestError(422, f'"dtype" must be one of {", ".join(DTYPES)}')
    array = _array(document["images"], dtype)
    if array.ndim == 4 and len(array) > settings.max_images:
        raise RequestError(
            413, f"a request may hold at most {settings.max_images} images; send several requests"
        )
    try:
        return read_images(array, guard.shape, guard.resize, settings.max_pixels)
    except BadInput as error:
        raise RequestError(422, str(error)) from None


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError, MemoryError):
        raise RequestError(400, "the body is not JSON") from None
    if not isinstance(document, dict):
        raise RequestError(422, 'the document must be an object with "images" and "dtype"')
    return document


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
