"""The web application: routes, limits and answers; and its server.

    app = create_app(guard, Settings(token="secret"))
    serve(guard, Settings(), "127.0.0.1", 8000, on_ready=print)     # until SIGTERM or Ctrl-C

Each request is counted, checked for its token, read within limits and queued for the model. What
is wrong with a request is answered with a 4xx and one sentence.
"""

import asyncio
import base64
import hmac
import io
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

import demur
from demur.attacks import PGD
from demur.attacks.balls import Linf
from demur.errors import BadInput
from demur.files.image_files import import_pillow
from demur.guards.core import Guard
from demur.serve.batching import Batcher, ModelFailed, Overloaded, Rows, result_rows
from demur.serve.metrics import DriftMonitor, Metrics
from demur.serve.requests import DTYPES, RequestError, Settings, images_of

SHUTDOWN_SECONDS = 30  # for requests in progress
STEPS = 20
T = TypeVar("T")

MAX_ATTACKS = 4  # that run or wait
PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
SECURITY = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; "
     b"connect-src 'self'; img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
     b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)  # fmt: skip
OPEN_PATHS = ("/health", *PAGE)  # without a token
COUNTED_PATHS = ("/predict", "/attack", "/metrics", "/openapi.json", *OPEN_PATHS)  # others together


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
    classes: int
    images: int
    rejection_rate: float | None = Field(description="Of the last 1,000 images.")
    calibration_rejection_rate: float
    drift: dict[str, Any]
    shape: list[int]
    resize: bool
    rule: list[dict[str, Any]]
    attack: bool
    token: bool = Field(description="Whether other paths need a bearer token.")


BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["images"],
                "properties": {
                    "images": {"type": "array", "items": {"type": "string", "format": "binary"}}
                },
            }
        },
        "image/png": {"schema": {"type": "string", "format": "binary"}},
        "image/jpeg": {"schema": {"type": "string", "format": "binary"}},
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["images", "dtype"],
                "additionalProperties": False,
                "properties": {
                    "images": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "array"}},
                        "description": "H, W, C or N, H, W, C numbers",
                    },
                    "dtype": {"type": "string", "enum": list(DTYPES)},
                },
            }
        },
    },
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem, "description": text}
    for code, text in {
        400: "The body cannot be parsed.",
        401: "The bearer token is missing or wrong.",
        408: "The body did not arrive in time.",
        413: "The body or the number of images is above its limit.",
        415: "The content type is not supported.",
        422: "An image is damaged, out of range or of another size.",
        429: "The service is overloaded; see Retry-After.",
        503: "The model failed, or the answer took too long.",
    }.items()
}


class Service:
    """A guard with its queue, its counters and its limits."""

    def __init__(self, guard: Guard, settings: Settings) -> None:
        self.guard, self.settings = guard, settings
        calibration = guard.calibration
        monitor = DriftMonitor(
            calibration["score_edges"], calibration["score_counts"], settings.mean_run_length
        )
        accepted = (calibration.get("coverage") or {"value": 1.0})["value"]
        self.metrics = Metrics(monitor, 1 - accepted)
        self.batcher = Batcher(
            guard, settings.max_batch, settings.max_queue, self.metrics.count_result
        )
        self.attacker = ThreadPoolExecutor(1, thread_name_prefix="attack")
        self.requests = self.attacks = 0  # in progress

    def close(self) -> None:
        """Finish what is queued."""
        self.batcher.close()
        self.attacker.shutdown()

    def check_token(self, request: Request) -> None:
        """Raise RequestError 401 unless the request carries the token; in constant time."""
        # not request.url, which some versions of Starlette build from the Host header
        if self.settings.token is None or request.scope["path"] in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode(), self.settings.token.encode())
        if scheme.lower() != "bearer" or not same:
            raise RequestError(
                401,
                "the bearer token is missing or wrong; send Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    async def predict(self, request: Request) -> Rows:
        """Decide on the images of a request."""
        batch, names = await images_of(request, self.guard, self.settings)
        future = self.batcher.submit(batch.x, batch.notes, self.settings.timeout)
        rows = await self._answer(future)
        return [{"file": name, **row} for name, row in zip(names, rows, strict=True)]

    async def attack(self, request: Request) -> dict[str, Any]:
        """Attack the one image of a request."""
        if not self.settings.attack:
            raise RequestError(404, "attacks are switched off (demur serve --no-attack)")
        if self.attacks >= MAX_ATTACKS:
            raise Overloaded(1)
        self.attacks += 1
        try:
            batch, _ = await images_of(request, self.guard, self.settings)
            if len(batch.x) != 1:
                raise RequestError(422, "an attack takes one image; send one")
            future = self.attacker.submit(attack_image, self.guard, batch.x, batch.notes[0])
            return await self._answer(future)
        except BadInput as error:
            raise RequestError(422, f"this model cannot be attacked: {error}") from None
        finally:
            self.attacks -= 1

    async def _answer(self, future: "Future[T]") -> T:
        """The result of a future within the time limit."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.settings.timeout)
        except (TimeoutError, CancelledError, asyncio.CancelledError):
            raise RequestError(503, "the answer took too long; try again", retry(1)) from None
        except (ModelFailed, RuntimeError) as error:
            raise RequestError(503, f"the model failed on this request ({error})") from None

    async def handle(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request, check its token, and turn it away where too many are in progress."""
        start, self.requests, code = time.monotonic(), self.requests + 1, 500
        request = Request(scope)
        path = scope["path"]

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = [*message["headers"], *SECURITY]
            await send(message)

        try:
            self.check_token(request)
            if self.requests > self.settings.max_requests and path not in OPEN_PATHS:
                raise Overloaded(self.batcher.retry_after)
            await app(scope, receive, counted)
        except (RequestError, Overloaded) as error:
            await problem(error)(scope, receive, counted)
        finally:
            self.requests -= 1
            label = path if path in COUNTED_PATHS else "other"
            self.metrics.count_request(label, code, time.monotonic() - start)

    def health(self) -> dict[str, Any]:
        """State of the service as JSON values."""
        drift, guard = self.metrics.monitor.to_json(), self.guard
        return {
            "status": "drift" if drift["alarm"] else "ok",
            "version": demur.__version__,
            "classes": len(guard.class_names),
            "images": self.metrics.images,
            "rejection_rate": self.metrics.rejection_rate,
            "calibration_rejection_rate": self.metrics.calibration_rejection_rate,
            "drift": drift,
            "shape": list(guard.shape),
            "resize": guard.resize,
            "rule": [
                {"score": part.name, "threshold": None if part.threshold == float("-inf")
                 else part.threshold}
                for part in guard.scores
            ],
            "attack": self.settings.attack,
            "token": self.settings.token is not None,
        }  # fmt: skip


class Gate:
    """Middleware that gives every request to `Service.handle`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.service.handle(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)


def retry(seconds: int) -> dict[str, str]:
    """Header that says when to try again."""
    return {"Retry-After": str(seconds)}


def problem(error: RequestError | Overloaded) -> JSONResponse:
    """The answer to a request that cannot be fulfilled."""
    if isinstance(error, Overloaded):
        detail = f"the service is overloaded; try again in {error.retry_after} s"
        return JSONResponse({"detail": detail}, 429, retry(error.retry_after))
    return JSONResponse({"detail": error.detail}, error.status, error.headers)


def create_app(guard: Guard, settings: Settings = Settings()) -> FastAPI:
    """Return the service of a guard as an ASGI application."""
    service = Service(guard, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="demur", version=demur.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Image classification with rejection.",
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Gate, service=service)
    for kind in (RequestError, Overloaded):
        app.add_exception_handler(kind, _on_problem)
    _add_routes(app, service)
    _add_page(app)
    return app


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | Overloaded)
    return problem(error)


def _add_routes(app: FastAPI, service: Service) -> None:
    extra = {"requestBody": BODY}

    @app.post("/predict", response_model=Predictions, responses=PROBLEMS, openapi_extra=extra)
    async def predict(request: Request) -> Any:
        """Classify images and accept or reject each prediction."""
        return {"predictions": await service.predict(request)}

    @app.post(
        "/attack",
        response_model=AttackReport,
        openapi_extra=extra,
        responses=PROBLEMS | {404: {"model": Problem, "description": "Switched off."}},
    )
    async def attack(request: Request) -> Any:
        """Attack one image by PGD and report the decisions before and after."""
        return await service.attack(request)

    @app.get("/health", response_model=Health)
    async def health() -> Any:
        """Return the state of the service, the rejection rate and the drift test."""
        return service.health()

    @app.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={401: PROBLEMS[401], 429: PROBLEMS[429]},
    )
    async def metrics() -> Any:
        """Return counters in the text format of Prometheus."""
        text = service.metrics.text(service.batcher.waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")  # fmt: skip


def _add_page(app: FastAPI) -> None:
    def route(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = files("demur.serve").joinpath(name).read_bytes()

        async def page() -> Response:
            return Response(content, media_type=kind)

        return page

    for path, (name, kind) in PAGE.items():
        app.add_api_route(path, route(name, kind), include_in_schema=False)


def attack_image(guard: Guard, x: Tensor, note: str) -> dict[str, Any]:
    """Return the decisions on an image (1, C, H, W) and on its adversarial example, as JSON values.

    PGD maximises the cross-entropy of the predicted label. The adversarial example is rounded to 8
    bits, so that the image that is shown is the image that was classified.
    """
    before = guard.decide(x, [note])
    eps = max(guard.eps, 1 / 255)
    label = torch.from_numpy(before.labels).to(guard.device)
    attack = PGD(Linf(eps), steps=STEPS)
    adversarial = attack(guard.as_model(), x.to(guard.device), label).cpu()
    rounded = (adversarial * 255).round() / 255
    after = guard.decide(rounded)
    gain = 1 / (2 * eps)  # black and white are the ends of the ball
    difference = ((rounded - x) * gain + 0.5).clamp(0, 1)
    return {
        "attack": f"PGD in the Linf ball of radius {eps * 255:.3g}/255, {STEPS} steps",
        "before": result_rows(before)[0],
        "after": result_rows(after)[0],
        "images": {"before": _png(x), "after": _png(rounded), "difference": _png(difference)},
        "gain": gain,
    }


def _png(x: Tensor) -> str:
    """An image 1, C, H, W in [0, 1] as a data URL; channels other than RGB are shown as grey."""
    pixels = (x[0] * 255).round().byte().permute(1, 2, 0).numpy()
    if pixels.shape[2] != 3:
        pixels = pixels.mean(2).astype(np.uint8)
    file = io.BytesIO()
    import_pillow().fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Server(uvicorn.Server):
    """uvicorn's server, which ends on SIGTERM and SIGINT without raising them again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.should_exit = True


def serve(
    guard: Guard, settings: Settings, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve a guard; finishes the requests in progress when it is stopped.

    `on_ready` is called with the address as soon as connections are accepted.
    """
    listener = _bound(host, port)
    name, number = listener.getsockname()[:2]
    address = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
    config = uvicorn.Config(
        create_app(guard, settings), log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=5, timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
    )  # fmt: skip
    with listener:
        on_ready(address)
        asyncio.run(Server(config).serve(sockets=[listener]))


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket; BadInput if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only if the protocol is named; else an answer takes 40 ms more
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise BadInput(
            f"{host}:{port} cannot be used: {reason}; choose another --host or --port"
        ) from None
    return listener
