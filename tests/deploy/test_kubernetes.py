"""Manifests against the schemas of the API, and against what the processes know."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common import cluster_file
from common.config import ALL_CONFIGS
from common.option_values import options_of
from common.options import OTHER_VARIABLES

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.37"
PODS = {"proxy": "StatefulSet", "prefill": "Deployment", "decode": "Deployment"}


def manifests() -> list[dict[str, Any]]:
    found = []
    for name in PODS:
        found += list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
    return found


def of(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name))


def container(role: str) -> dict[str, Any]:
    (found,) = of(PODS[role], role)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def names(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


@pytest.mark.parametrize("manifest", manifests(), ids=names)
def test_a_manifest_is_what_the_api_takes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_a_mistake_would_be_found() -> None:
    wrong = of("Deployment", "prefill")
    wrong["spec"]["template"]["spec"]["containers"][0]["livnessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_every_file_is_part_of_the_whole() -> None:
    whole = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(whole["resources"]) == {f"{name}.yaml" for name in PODS}
    used = {*whole["resources"], *whole["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert {path.name for path in FOLDER.iterdir()} == used


@pytest.mark.parametrize("role", PODS)
def test_processes_know_their_options(role: str) -> None:
    values = cluster_file.load(str(FOLDER / "cluster.yaml"), role)
    known = {option.variable for option in options_of(ALL_CONFIGS).values()} | set(OTHER_VARIABLES)
    told = {entry["name"] for entry in container(role)["env"]} - {"NODE"}
    assert told <= known
    assert values["bind_host"] == "0.0.0.0"


@pytest.mark.parametrize("role", PODS)
def test_ports_are_those_that_processes_listen_on(role: str) -> None:
    values = cluster_file.load(str(FOLDER / "cluster.yaml"), role)
    ports = {port["name"]: port["containerPort"] for port in container(role)["ports"]}
    expected = {"http": 8000, "control": 7000} if role == "proxy" else {"metrics": values["metrics_port"]}
    if role == "decode":
        expected["transfer"] = values["transfer_port"]
    assert ports == expected
    probed = [container(role)[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe")]
    assert set(probed) <= set(ports)


@pytest.mark.parametrize("role", PODS)
def test_pods_have_time_to_drain(role: str) -> None:
    pod = of(PODS[role], role)["spec"]["template"]["spec"]
    drain_s = cluster_file.load(str(FOLDER / "cluster.yaml"), role)["drain_timeout_s"]
    assert pod["terminationGracePeriodSeconds"] >= drain_s
    assert of("PodDisruptionBudget", role)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_are_scaled_by_metrics_that_exist(role: str) -> None:
    (metric,) = of("HorizontalPodAutoscaler", role)["spec"]["metrics"]
    described = (FOLDER.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"`{metric['pods']['metric']['name']}`" in described


def test_every_proxy_is_told_to_the_workers() -> None:
    proxies = cluster_file.load(str(FOLDER / "cluster.yaml"), "decode")["proxies"]
    stateful = of("StatefulSet", "proxy")["spec"]
    service, count = stateful["serviceName"], stateful["replicas"]
    assert proxies == [f"tcp://proxy-{number}.{service}:7000" for number in range(count)]
