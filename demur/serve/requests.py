"""Settings of the service, and requests: Host and Origin, bounded reading, the forms of OpenAPI.

multipart/form-data        one or several image files
image/*                    one image file as the body
application/json           {"images": H, W, C or N, H, W, C numbers, "dtype": "uint8" | "float32"}

A page of another origin could send requests to a server on the reader's machine, and read the
answers where its own name was rebound to 127.0.0.1. Browsers name it in Host and Origin.
"""

import asyncio
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request

from demur.errors import BadInput, shorten
from demur.files.checked_files import MEGABYTE
from demur.guards.core import Guard
from demur.guards.inputs import Batch, read_images
from demur.serve.decoder import DTYPES, RequestError, kind_of
from demur.serve.monitoring import FORMATS, LEVELS
from demur.serve.workers import DecoderPool, Overloaded
from demur.spec import Spec
from demur.spec.field_types import Positive, PositiveInt

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")  # to listen on
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::([0-9]{1,5}))?")


def refusal(
    host: str | None, origin: str | None, names: Collection[str] = ()
) -> tuple[int, str] | None:
    """Return the status and the reason to refuse a request, or None if it may be answered.

    `host` and `origin` are headers; `names` those of the server besides the loopback ones. One of
    EVERY_ADDRESS stands for all addresses: a number cannot be rebound.
    """
    name = _name(host or "")
    if name is None:
        return 400, "the Host header is missing or malformed"
    is_address = ":" in name or name.replace(".", "").isdigit()
    if name not in (*LOOPBACK, *names) and not (is_address and {*names} & {*EVERY_ADDRESS}):
        return 421, "the Host header names another server; start this one with --allow-host NAME"
    if origin is None:
        return None
    scheme, _, netloc = origin.lower().partition("://")
    same = netloc == (host or "").lower() or _name(netloc) in names
    if scheme not in ("http", "https") or not same:
        return 403, "a page of another origin may not use this service"
    return None


def _name(netloc: str) -> str | None:
    """The name or address in HOST[:PORT], in lower case; None if it is malformed."""
    found = _HOST.fullmatch(netloc.lower())
    return (found[1] or found[2]) if found else None


BODY_SHARE = 0.8  # of the time limit, for the body to arrive
BODIES = 8  # bodies of the largest size that may be in memory
REQUEST_IMAGES = 2  # images of the largest size that a request may hold
# Bytes that a decoder may need: itself; per pixel, WebP with alpha needs most; per byte of JSON
DECODER_MEMORY, PIXEL_MEMORY, JSON_MEMORY = 80 * MEGABYTE, 16, 32


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
        decoders: Processes that decode images; each decodes one at a time.
        header_timeout: Seconds for the headers of a request, or for the next request of a
            connection, to arrive.
        timeout: Seconds from the headers of a request to its answer.
        attack: Whether an image may be attacked.
        token: Bearer token that requests must carry; None needs none.
        hosts: Names that the service has besides localhost, as in the Host header.
        mean_run_length: Images between false drift alarms, on average at least.
        log_level: Least important lines that are logged: predictions are "info", what is wrong
            with a request "warning", failures and drift alarms "error".
        log_format: Lines as text (logfmt) or as JSON.
        access_log: Whether requests without images are logged, too.
    """

    max_body: PositiveInt = 8 * MEGABYTE
    max_pixels: PositiveInt = 16_000_000
    max_images: PositiveInt = 64
    max_batch: PositiveInt = 64
    max_queue: PositiveInt = 256
    max_requests: PositiveInt = 64
    decoders: PositiveInt = 2
    header_timeout: Positive = 5.0
    timeout: Positive = 10.0
    attack: bool = True
    token: str | None = None
    hosts: tuple[str, ...] = ()
    mean_run_length: PositiveInt = 100_000
    log_level: str = "warning"
    log_format: str = "text"
    access_log: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise BadInput("the token must consist of printable ASCII characters")
        if self.token == "":
            raise BadInput("the token is empty; give a long random word")
        for name in self.hosts:
            if not re.fullmatch("[a-z0-9._-]+|[0-9a-f:.]+", name):
                raise BadInput(
                    f"{shorten(name)!r} is not the name of a host; give one such as example.org, "
                    "without http:// and port"
                )
        for name, known in (("log_level", LEVELS), ("log_format", FORMATS)):
            if getattr(self, name) not in known:
                raise BadInput(f"{name} is {getattr(self, name)!r}; give {', '.join(known)}")
        if self.max_queue < self.max_images:
            raise BadInput(
                f"the queue holds {self.max_queue} images, fewer than a request may have; raise it "
                f"to {self.max_images}, or lower max_images"
            )


class ImageReader:
    """Reads the images of requests within the limits; used on one event loop."""

    def __init__(self, guard: Guard, settings: Settings) -> None:
        self.guard, self.settings = guard, settings
        work = max(PIXEL_MEMORY * settings.max_pixels, JSON_MEMORY * settings.max_body)
        self.pool = DecoderPool(settings.decoders, DECODER_MEMORY + work)
        self.in_memory = 0  # bytes of bodies

    async def read(self, request: Request, deadline: float) -> tuple[Batch, list[str]]:
        """Return the images of a request and the names of their files, "" for arrays."""
        content_type = request.headers.get("content-type", "")
        kind_of(content_type)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SHARE * self.settings.timeout):
                await self._read_body(request, body)
            future = self.pool.threads.submit(self._decode, content_type, body, deadline)
            return await asyncio.wrap_future(future)
        except TimeoutError:
            raise RequestError(408, "the body did not arrive in time; send it faster") from None
        finally:
            self.in_memory -= len(body)

    def _decode(
        self, content_type: str, body: bytearray, deadline: float
    ) -> tuple[Batch, list[str]]:
        guard, limits = self.guard, self.settings
        job = {
            "content_type": content_type, "shape": guard.shape, "resize": guard.resize,
            "max_images": limits.max_images, "max_pixels": limits.max_pixels,
            "request_pixels": REQUEST_IMAGES * limits.max_pixels,
        }  # fmt: skip
        array, names, notes = self.pool.decode(job, body, deadline)
        try:
            batch = read_images(array, guard.shape, guard.resize)
        except BadInput as error:
            raise RequestError(422, str(error)) from None
        return Batch(batch.x, tuple(map("".join, zip(notes, batch.notes, strict=True)))), names

    async def _read_body(self, request: Request, body: bytearray) -> None:
        """Append the body; RequestError 413 as soon as it is known to be above its limit."""
        limit = self.settings.max_body
        too_large = RequestError(
            413, f"the body may have at most {limit:,} bytes; send fewer or smaller images"
        )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal():
            raise RequestError(400, "content-length is not a number")
        if int(length[:20]) > limit:
            raise too_large
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise too_large
                if self.in_memory + len(chunk) > BODIES * limit:
                    raise Overloaded(1)
                body += chunk
                self.in_memory += len(chunk)
        except ClientDisconnect:
            raise RequestError(
                400, "the connection was closed before the end of the body"
            ) from None


class Prediction(BaseModel):
    """The decision on one image."""

    file: str = Field(description="Name of the file; empty for arrays.")
    label: int = Field(description="Number of the predicted class.")
    class_: str = Field(alias="class", description="Name of the predicted class.")
    accepted: bool
    confidence: float | None = Field(description="Probability of the predicted class.")
    scores: dict[str, float | None] = Field(description="Score by name; null if infinite.")
    probabilities: dict[str, float] = Field(description="The largest class probabilities.")
    reason: str


class Predictions(BaseModel):
    """The decisions on the images of a request, in order."""

    guard: str = Field(description="Name, version and digest of the guard.")
    predictions: list[Prediction]


class Problem(BaseModel):
    """What is wrong with a request, in one sentence."""

    detail: str


class AttackReport(BaseModel):
    """Decisions before and after an attack, and the images as data URLs."""

    attack: str
    before: dict[str, Any]
    after: dict[str, Any]
    images: dict[str, str]
    gain: float = Field(description="Factor by which the difference image is amplified.")


class Health(BaseModel):
    """State of the service."""

    status: str = Field(description="ok, or drift after an alarm.")
    version: str
    guard: str = Field(description="Name, version and digest of the guard.")
    classes: int
    summary: str = Field(description="Accuracy beside chance, and coverage.")
    images: int
    rejection_rate: float | None = Field(description="Of the last 1,000 images.")
    calibration_rejection_rate: float
    drift: dict[str, Any]
    shape: list[int]
    resize: bool
    rule: list[dict[str, Any]]
    attack: bool
    token: bool = Field(description="Whether other paths need a bearer token.")


FILE = {"type": "string", "format": "binary"}
ARRAY = {
    "type": "array", "items": {"type": "array", "items": {"type": "array"}},
    "description": "H, W, C or N, H, W, C numbers",
}  # fmt: skip
BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object", "required": ["images"],
                "properties": {"images": {"type": "array", "items": FILE}},
            }
        },
        "image/png": {"schema": FILE},
        "image/jpeg": {"schema": FILE},
        "application/json": {
            "schema": {
                "type": "object", "required": ["images", "dtype"], "additionalProperties": False,
                "properties": {
                    "images": ARRAY, "dtype": {"type": "string", "enum": list(DTYPES)},
                },
            }
        },
    },
}  # fmt: skip
Problems = dict[int | str, dict[str, Any]]
PROBLEMS: Problems = {
    code: {"model": Problem, "description": text}
    for code, text in {
        400: "The body cannot be parsed.",
        401: "The bearer token is missing or wrong.",
        403: "A page of another origin sent the request, or the client may not do this.",
        408: "The body did not arrive in time.",
        413: "The body, the number of images or their pixels are above a limit.",
        415: "The content type is not supported.",
        421: "The Host header names another server.",
        422: "An image is damaged, out of range or of another size.",
        429: "The service is overloaded; see Retry-After.",
        503: "The model failed, or the answer took too long.",
    }.items()
}
# of requests without a body
HEADER_PROBLEMS: Problems = {code: PROBLEMS[code] for code in (400, 401, 403, 421, 429, 503)}
