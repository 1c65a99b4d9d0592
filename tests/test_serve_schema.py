"""The OpenAPI description, and requests that schemathesis derives from it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from demur import Guard
from demur.serve import Settings, create_app


def test_every_answer_is_as_described(tiny_guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    import schemathesis  # takes seconds, and one worker needs it
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    required = [
        not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
        checks.response_schema_conformance,
    ]  # fmt: skip
    app = create_app(tiny_guard, Settings(max_body=50_000, hosts=("testserver",)))
    service, close = app.state.service, app.state.service.close
    # schemathesis 4.0 starts and ends the app with every request
    monkeypatch.setattr(service, "close", lambda: None)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    paths, codes = set(), set()
    for found in schema.get_all_operations():
        operation: Any = found.ok()
        paths.add(operation.path)

        @given(case=operation.as_strategy())
        @settings(
            max_examples=5, deadline=None, derandomize=True, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def check(case: Any) -> None:
            answer = case.call()
            codes.add(answer.status_code)
            case.validate_response(answer, checks=required)

        check()
    close()
    assert paths == {"/predict", "/attack", "/health", "/ready", "/metrics", "/drift/reset"}
    assert codes >= {200, 422}
