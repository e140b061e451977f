"""The composition against the specification's schema, and against the options that there are."""

from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from compose_pydantic import ComposeSpecification

from common.config import ALL_CONFIGS
from common.option_values import options_of
from common.options import OTHER_VARIABLES

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
OVERRIDES = sorted((ROOT / "deploy" / "compose").glob("*.yaml"))


def load(path: Path) -> dict[str, Any]:
    """Without extensions, which the schema allows under names that begin with x-."""
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: value for name, value in document.items() if not name.startswith("x-")}


@pytest.mark.parametrize("path", [COMPOSE, *OVERRIDES], ids=lambda path: path.name)
def test_a_composition_is_what_the_specification_allows(path: Path) -> None:
    ComposeSpecification.model_validate(load(path))


@pytest.mark.parametrize(
    ("key", "value"), [("helthcheck", {}), ("ports", 8000), ("deploy", {"resources": {"limit": {}}})]
)
def test_a_mistake_would_be_found(key: str, value: object) -> None:
    document = load(COMPOSE)
    document["services"]["proxy"][key] = value
    with pytest.raises(pydantic.ValidationError):
        ComposeSpecification.model_validate(document)


@pytest.mark.parametrize("path", [COMPOSE, *OVERRIDES], ids=lambda path: path.name)
def test_only_variables_that_mean_something_are_set(path: Path) -> None:
    known = {option.variable for option in options_of(ALL_CONFIGS).values()} | set(OTHER_VARIABLES)
    for name, service in load(path)["services"].items():
        unknown = set(service.get("environment", {})) - known
        assert not unknown, f"{name} sets {unknown}"


def test_overrides_are_of_services_that_there_are() -> None:
    services = set(load(COMPOSE)["services"])
    assert len(OVERRIDES) == 3
    assert all(set(load(path)["services"]) <= services for path in OVERRIDES)


def test_workers_of_every_kind_can_be_on_hosts_of_their_own() -> None:
    services = load(ROOT / "deploy" / "compose" / "worker-host.yaml")["services"]
    assert set(services) == set(load(COMPOSE)["services"]) - {"proxy"}
    assert all("BATON_ADVERTISE_HOST" in service["environment"] for service in services.values())
    for name in ("decode", "decode-gpu"):
        port = services[name]["environment"]["BATON_TRANSFER_PORT"]
        assert services[name]["ports"] == [f"{port}:{port}"]


def test_services_drain_before_they_are_killed_and_run_without_privileges() -> None:
    for service in load(COMPOSE)["services"].values():
        assert int(service["stop_grace_period"].removesuffix("s")) > 30
        assert service["cap_drop"] == ["ALL"]
        assert "healthcheck" in service
    assert "USER baton" in (ROOT / "Dockerfile").read_text()


def test_nothing_but_loopback_is_published_unless_asked_for() -> None:
    for path in (COMPOSE, ROOT / "deploy" / "compose" / "proxy-host.yaml"):
        for service in load(path)["services"].values():
            assert all(":-127.0.0.1:" in port for port in service.get("ports", []))
