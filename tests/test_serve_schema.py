"""The OpenAPI description, and requests that schemathesis derives from it."""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from demur import Guard
from demur.serve import Settings, create_app

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
]  # fmt: skip


def test_every_answer_is_as_described(tiny_guard: Guard) -> None:
    app = create_app(tiny_guard, Settings(max_body=50_000))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    paths, codes = set(), set()
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]
        paths.add(operation.path)

        @given(case=operation.as_strategy())
        @settings(
            max_examples=8, deadline=None, derandomize=True, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def check(case: Any) -> None:
            answer = case.call()
            codes.add(answer.status_code)
            case.validate_response(answer, checks=CHECKS)

        check()
    assert paths == {"/predict", "/attack", "/health", "/metrics"}
    assert codes >= {200, 422}
