"""Limits and switches of the service."""

from dataclasses import dataclass

from demur.errors import BadInput
from demur.field_types import Positive, PositiveInt
from demur.regular_file import MEGABYTE
from demur.spec import Spec


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
