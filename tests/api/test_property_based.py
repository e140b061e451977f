"""Requests made up from the description that the server gives of its API, right ones and wrong ones: none is
answered with a 5xx, nor as the description does not say, and none does harm to a worker."""

import time
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.system.server import START_TIMEOUT_S, Server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FEW_TOKENS = 3
FEW_CHOICES = 4
OUTPUT_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def shorten(body: Any) -> None:
    """Many long outputs would only take time, and a request must not run out of time that it chose itself."""
    if not isinstance(body, dict):
        return
    for name in OUTPUT_LENGTHS:
        if isinstance(body.get(name, FEW_TOKENS), int):
            body[name] = min(body.get(name, FEW_TOKENS), FEW_TOKENS)
    if isinstance(body.get("timeout_s"), int | float) and 0 < body["timeout_s"] <= 86400:
        body["timeout_s"] = START_TIMEOUT_S
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], FEW_CHOICES)


def workers(server: Server) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/workers", timeout=START_TIMEOUT_S, trust_env=False)
    return {worker["name"]: worker for worker in reply.json()["workers"]}


def load_when_idle(server: Server) -> dict[str, tuple[int, int]]:
    """Process id and free blocks of each worker, once nothing is under way and all have said so."""
    until = time.monotonic() + START_TIMEOUT_S
    busy = ("num_running", "num_waiting", "num_receiving", "num_parked_blocks")
    while True:
        found = workers(server)
        if not any(worker["load"][name] for worker in found.values() for name in busy):
            return {
                name: (worker["pid"], worker["load"]["num_free_blocks"]) for name, worker in found.items()
            }
        assert time.monotonic() < until, found
        time.sleep(0.1)


def modes_of(operation: Any) -> tuple[GenerationMode, ...]:
    """Where there is a body, it is tried wrong as well."""
    has_body = "requestBody" in operation.definition.raw
    return (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if has_body else (GenerationMode.POSITIVE,)


def requests_of(operation: Any, mode: GenerationMode, server: Server, count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        shorten(case.body)
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=START_TIMEOUT_S)

    ask()


@pytest.mark.filterwarnings("default")  # of a library that is not ours
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(120, marks=pytest.mark.timeout(600)),
        pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_no_request_that_can_be_made_up_does_harm(system: Server, count: int) -> None:
    before = load_when_idle(system)
    description = httpx.get(f"{system.url}/openapi.json", timeout=START_TIMEOUT_S, trust_env=False).json()
    schema = schemathesis.openapi.from_dict(description)
    operations: list[Any] = [operation for path in schema.values() for operation in path.values()]
    rounds = [(operation, mode) for operation in operations for mode in modes_of(operation)]
    for operation, mode in rounds:
        requests_of(operation, mode, system, count // len(rounds))
    assert system.complete("The capital of France is", 8).startswith(" Paris")
    assert load_when_idle(system) == before
