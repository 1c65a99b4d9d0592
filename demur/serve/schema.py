"""The form of requests and answers, for the OpenAPI description."""

from typing import Any

from pydantic import BaseModel, Field

from demur.serve.decoder import DTYPES


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
