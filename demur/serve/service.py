"""The web application: which requests are taken (token, number, time), routes and answers.

Each request is counted, checked for its token, its Host and its Origin, read within limits and
queued for the model. What is wrong with a request is answered with a 4xx and one sentence.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

import demur
from demur.attacks import PGD
from demur.attacks.balls import Linf
from demur.errors import BadInput
from demur.guards.core import Guard
from demur.guards.decision import GuardResult
from demur.images import png_url
from demur.serve.decoder import RequestError
from demur.serve.monitoring import DriftMonitor, LineWriter, Metrics, make_logger, request_id
from demur.serve.requests import (
    BODY,
    HEADER_PROBLEMS,
    LOOPBACK,
    PROBLEMS,
    AttackReport,
    Health,
    ImageReader,
    Predictions,
    Problem,
    Problems,
    Settings,
    refusal,
)
from demur.serve.workers import TOO_LATE, Batcher, Overloaded, Rows, result_rows, retry

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
OPEN_PATHS = ("/health", "/ready", *PAGE)  # without a token
COUNTED_PATHS = (  # others are counted together
    "/predict", "/attack", "/metrics", "/drift/reset", "/openapi.json", *OPEN_PATHS,
)  # fmt: skip
FORWARDED = ("forwarded", "x-forwarded-for", "via")  # headers of a proxy


class Service:
    """A guard with its queue, its counters and its limits."""

    def __init__(self, guard: Guard, settings: Settings) -> None:
        self.guard, self.settings = guard, settings
        calibration = guard.calibration
        histogram = calibration["score_edges"], calibration["score_counts"]
        monitor = DriftMonitor(*histogram, settings.mean_run_length)
        accepted = (calibration.get("coverage") or {"value": 1.0})["value"]
        self.metrics = Metrics(monitor, 1 - accepted, guard.identity)
        self.lines = LineWriter()
        self.log = make_logger(self.lines, settings.log_format, settings.log_level, guard.identity)
        self.batcher = Batcher(guard, settings.max_batch, settings.max_queue, self._count)
        self.reader = ImageReader(guard, settings)
        self.attacker = ThreadPoolExecutor(1, thread_name_prefix="attack")
        self.requests = self.attacks = 0  # in progress

    def _count(self, result: GuardResult) -> None:
        if self.metrics.count_result(result):
            state = self.metrics.drift()
            names = ("first_alarm", "images", "statistic", "false_alarms")
            self.log.error("drift alarm", **{name: state[name] for name in names})

    @property
    def ready(self) -> bool:
        """Whether a request with images would be queued now."""
        return not self.batcher.closed and self.batcher.waiting < self.settings.max_queue

    def close(self) -> None:
        self.reader.pool.close()
        self.batcher.close()
        self.attacker.shutdown()
        self.lines.close()

    def check_headers(self, headers: Headers, path: str) -> None:
        """Raise RequestError unless the token (in constant time), Host and Origin are right."""
        if self.settings.token is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.encode(), self.settings.token.encode())
            if scheme.lower() != "bearer" or not same:
                raise RequestError(
                    401,
                    "the bearer token is missing or wrong; send Authorization: Bearer TOKEN",
                    {"WWW-Authenticate": "Bearer"},
                )
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else None
        if refused := refusal(host, headers.get("origin"), self.settings.hosts):
            raise RequestError(*refused)

    def reset_drift(self, request: Request) -> dict[str, Any]:
        """Start the drift test anew; without a token only for a client on this machine."""
        is_here = request.client is not None and request.client.host in LOOPBACK
        is_forwarded = any(name in request.headers for name in FORWARDED)
        if self.settings.token is None and (is_forwarded or not is_here):
            raise RequestError(
                403, "only a client on this machine may reset it; start the service with --token"
            )
        self.log.warning("drift test reset", images=self.metrics.drift()["images"])
        return self.metrics.reset_drift()

    async def predict(self, request: Request) -> Rows:
        if self.batcher.waiting >= self.settings.max_queue:  # before the work of decoding
            raise Overloaded(self.batcher.retry_after)
        deadline = time.monotonic() + self.settings.timeout
        batch, names = await self.reader.read(request, deadline)
        future = self.batcher.submit(batch.x, batch.notes, deadline - time.monotonic())
        rows = await self._answer(future)
        request.scope["decisions"] = {
            "accepted": [row["accepted"] for row in rows],
            "scores": [row["scores"] for row in rows],
        }
        return [{"file": name, **row} for name, row in zip(names, rows, strict=True)]

    async def attack(self, request: Request) -> dict[str, Any]:
        if not self.settings.attack:
            raise RequestError(404, "attacks are switched off (demur serve --no-attack)")
        if self.attacks >= MAX_ATTACKS:
            raise Overloaded(1)
        self.attacks += 1
        try:
            deadline = time.monotonic() + self.settings.timeout
            batch, _ = await self.reader.read(request, deadline)
            if len(batch.x) != 1:
                raise RequestError(422, "an attack takes one image; send one")
            future = self.attacker.submit(attack_image, self.guard, batch.x, batch.notes[0])
            return await self._answer(future)
        except BadInput as error:
            raise RequestError(422, f"this model cannot be attacked: {error}") from None
        finally:
            self.attacks -= 1

    async def _answer(self, future: "Future[T]") -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # by the batcher, or by the limit in `handle`
            raise RequestError(503, TOO_LATE, retry(1)) from None
        except RuntimeError as error:
            raise RequestError(503, f"the model failed on this request ({error})") from None

    async def handle(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request, check its headers, and answer it or what is wrong with it in time."""
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        start, self.requests, code = time.monotonic(), self.requests + 1, 0
        headers, reason = Headers(scope=scope), None
        number = request_id(headers.get("x-request-id"))
        path = scope["path"]  # not a Request's URL: Starlette may build it from the Host header
        limit = asyncio.timeout(self.settings.timeout)

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                own = (b"x-request-id", number.encode())
                message["headers"] = [*message["headers"], *SECURITY, own]
                with suppress(RuntimeError):  # it is over
                    limit.reschedule(None)  # the server closes connections that do not read
            await send(message)

        try:
            async with limit:
                self.check_headers(headers, path)
                if self.requests > self.settings.max_requests and path not in OPEN_PATHS:
                    raise Overloaded(self.batcher.retry_after)
                await app(scope, receive, counted)
        except RequestError as error:
            reason = error.detail
            await problem(error)(scope, receive, counted)
        except TimeoutError:
            reason = TOO_LATE
            if code == 0:
                await problem(RequestError(503, TOO_LATE, retry(1)))(scope, receive, counted)
        finally:
            self.requests -= 1
            label = path if path in COUNTED_PATHS else "other"
            code, seconds = code or 500, time.monotonic() - start
            self.metrics.count_request(label, code, seconds)
            values = {"request": number, "path": path, "code": code, "ms": round(1e3 * seconds, 1)}
            if code >= 400:
                write = self.log.error if code >= 500 else self.log.warning
                reason = reason or ("an error of demur" if code >= 500 else HTTPStatus(code).phrase)
                write("not answered", reason=reason, **values)
            elif "decisions" in scope or self.settings.access_log:
                self.log.info("answered", **values, **scope.get("decisions", {}))

    def health(self) -> dict[str, Any]:
        drift, guard = self.metrics.drift(), self.guard
        return {
            "status": "drift" if drift["alarm"] else "ok",
            "version": demur.__version__,
            "guard": guard.identity,
            "classes": len(guard.class_names),
            "summary": guard.summary,
            "images": self.metrics.images,
            "rejection_rate": self.metrics.rejection_rate,
            "calibration_rejection_rate": self.metrics.calibration_rejection_rate,
            "drift": drift,
            "shape": list(guard.shape),
            "resize": guard.resize,
            "rule": [
                {"score": part.name, "threshold": part.threshold if part.rejects else None}
                for part in guard.scores
            ],
            "attack": self.settings.attack,
            "token": self.settings.token is not None,
        }  # fmt: skip


def problem(error: RequestError) -> JSONResponse:
    """The answer to a request that cannot be fulfilled."""
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
    app.add_middleware(lambda app: partial(service.handle, app))
    _add_routes(app, service)
    for path, (name, kind) in PAGE.items():
        page = Response(files("demur.serve").joinpath(name).read_bytes(), media_type=kind)
        app.router.routes.append(Route(path, page, methods=["GET"], include_in_schema=False))
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    guard = service.guard
    post = partial(app.post, openapi_extra={"requestBody": BODY})
    switched_off: Problems = {404: {"model": Problem, "description": "Switched off."}}

    @post("/predict", response_model=Predictions, responses=PROBLEMS)
    async def predict(request: Request) -> Any:
        """Classify images and accept or reject each prediction."""
        return {"guard": guard.identity, "predictions": await service.predict(request)}

    @post("/attack", response_model=AttackReport, responses=PROBLEMS | switched_off)
    async def attack(request: Request) -> Any:
        """Attack one image by PGD and report the decisions before and after."""
        return await service.attack(request)

    @app.post("/drift/reset", responses=HEADER_PROBLEMS)
    async def reset_drift(request: Request) -> dict[str, Any]:
        """Start the drift test anew, after its alarm was looked into."""
        return service.reset_drift(request)

    @app.get("/health", response_model=Health, responses=HEADER_PROBLEMS)
    async def health() -> Any:
        """Return the state of the service, the rejection rate and the drift test."""
        return service.health()

    @app.get("/ready", responses=HEADER_PROBLEMS)
    async def ready() -> dict[str, bool]:
        """Return whether images are taken now; 503 where the queue is full or the service ends."""
        if not service.ready:
            raise RequestError(503, "no image is taken now", retry(1))
        return {"ready": True}

    @app.get("/metrics", response_class=PlainTextResponse, responses=HEADER_PROBLEMS)
    async def metrics() -> Any:
        """Return counters in the text format of Prometheus."""
        text = service.metrics.text(service.batcher.waiting)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)


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
    shown = {"before": x, "after": rounded, "difference": difference}
    return {
        "attack": f"PGD in the Linf ball of radius {eps * 255:.3g}/255, {STEPS} steps",
        "before": result_rows(before)[0],
        "after": result_rows(after)[0],
        "images": {name: png_url(one[0]) for name, one in shown.items()},
        "gain": gain,
    }
