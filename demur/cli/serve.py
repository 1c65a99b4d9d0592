"""demur serve."""

from functools import partial
from typing import Annotated

from demur.cli.app import Device, app, number, option
from demur.cli.export import Bundle
from demur.errors import BadInput

Host = Annotated[str, option("Address to listen on; 0.0.0.0 lets other machines in.")]
Port = Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)]
Token = Annotated[
    str | None, option("Bearer token that requests must carry.", envvar="DEMUR_TOKEN", shown="none")
]
AllowHost = Annotated[
    list[str] | None, option("Another name of this machine, as in its address; may be repeated.")
]
PublicKey = Annotated[
    str | None, option("Public key (PEM) that must have signed the guard.", shown="none")
]
Attack = Annotated[bool, option("Let the page attack an image by PGD.", "--attack/--no-attack")]
LogLevel = Annotated[str, option("debug, info (predictions), warning (bad requests) or error.")]
AccessLog = Annotated[bool, option("Log requests without images, too.", "--access-log")]


@app.command()
def serve(
    bundle: Bundle,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    allow_host: AllowHost = None,
    attack: Attack = True,
    max_body: Annotated[float, number("Megabytes of a request.")] = 8.0,
    max_pixels: Annotated[float, number("Megapixels of one image.")] = 16.0,
    max_images: Annotated[int, option("Images of one request.")] = 64,
    max_queue: Annotated[int, option("Images that may wait for the model.")] = 256,
    timeout: Annotated[float, number("Seconds until a request is given up.")] = 10.0,
    require_signature: PublicKey = None,
    workers: Annotated[int, option("Processes that share the port.", min=1)] = 1,
    log_level: LogLevel = "info",
    log_format: Annotated[str, option("text or json.")] = "text",
    access_log: AccessLog = False,
    device: Device = "auto",
) -> None:
    """Serve a guard over HTTP: /predict, /health, /metrics, and a page to try it at /.

    Example: demur serve guard --port 8000
    """
    from demur.cli.progress import on_message
    from demur.guards import Guard

    try:
        from demur.serve import Settings, server
    except ImportError as error:
        if error.name is None or error.name.startswith("demur"):
            raise
        raise BadInput(
            f"the service needs {error.name}; install it with pip install 'demur[serve]'"
        ) from None
    settings = Settings(
        max_body=round(max_body * 2**20), max_pixels=round(max_pixels * 1e6),
        max_images=max_images, max_queue=max_queue, timeout=timeout, attack=attack, token=token,
        hosts=tuple(name.lower() for name in allow_host or ()), log_level=log_level,
        log_format=log_format, access_log=access_log,
    )  # fmt: skip
    load = partial(Guard.load, bundle, device=device, public_key=require_signature)
    guard: Guard = load()

    def on_ready(address: str) -> None:
        on_message(f"serving at {address}")
        on_message(f"guard: {guard.identity}")
        if not guard.calibration.get("chance_test", {}).get("passed", True):
            on_message(f"warning: {guard.summary}")
        if host not in ("127.0.0.1", "::1", "localhost") and token is None:
            on_message("warning: other machines can reach this service, and it has no --token")

    if workers > 1:
        server.serve_many(load, settings, host, port, on_ready, workers)
    else:
        server.serve(guard, settings, host, port, on_ready)
    on_message("stopped")
