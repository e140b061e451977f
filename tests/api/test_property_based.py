"""Requests made up from the description that the server gives of its API, right ones and wrong ones: none is
answered with a 5xx, nor as the description does not say, and none does harm to a worker."""

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
OUTPUT_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MODES = {"post": (GenerationMode.POSITIVE, GenerationMode.NEGATIVE), "get": (GenerationMode.POSITIVE,)}


def shorten(body: Any) -> None:
    """Long outputs would only take time; nor may a request run out of a time that it has chosen itself."""
    if not isinstance(body, dict):
        return
    for name in OUTPUT_LENGTHS:
        if isinstance(body.get(name, FEW_TOKENS), int):
            body[name] = min(body.get(name, FEW_TOKENS), FEW_TOKENS)
    if isinstance(body.get("timeout_s"), int | float) and 0 < body["timeout_s"] <= 86400:
        body["timeout_s"] = 60


def workers(server: Server) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/workers", timeout=START_TIMEOUT_S, trust_env=False)
    return {worker["name"]: worker for worker in reply.json()["workers"]}


def idle(server: Server) -> dict[str, Any]:
    """The workers once nothing is under way."""
    while True:
        found = workers(server)
        if not any(
            worker["load"]["num_running"] + worker["load"]["num_waiting"] for worker in found.values()
        ):
            return found


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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [120, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_request_that_can_be_made_up_does_harm(system: Server, count: int) -> None:
    before = idle(system)
    description = httpx.get(f"{system.url}/openapi.json", timeout=START_TIMEOUT_S, trust_env=False).json()
    schema = schemathesis.openapi.from_dict(description)
    operations: list[Any] = [operation for path in schema.values() for operation in path.values()]
    rounds = [(operation, mode) for operation in operations for mode in MODES[operation.method]]
    for operation, mode in rounds:
        requests_of(operation, mode, system, count // len(rounds))
    after = idle(system)
    assert {name: worker["pid"] for name, worker in after.items()} == {
        name: worker["pid"] for name, worker in before.items()
    }
    for name, worker in after.items():
        assert worker["state"] == "ready"
        assert worker["load"]["num_free_blocks"] == before[name]["load"]["num_free_blocks"]
        assert worker["load"]["num_receiving"] == worker["load"]["num_parked_blocks"] == 0
    assert system.complete("The capital of France is", 8).startswith(" Paris")
