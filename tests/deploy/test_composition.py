"""The image and the composition for real: built, started, used, scaled, hurt and stopped in an engine.

Takes ten minutes or more and some gigabytes; ``-m slow`` asks for it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from common.config import DEFAULT_MODEL
from common.default_model import default_model_file
from tests.deploy import engine
from tests.deploy.engine import BASE, BUILD, Engine
from tests.faults.waiting import eventually
from tests.netns.network import Network

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(3600)]

PROJECT = "baton-test"
CACHE = "/var/cache/baton"
CLUSTER = f"""
model: {DEFAULT_MODEL}
max-model-len: 2048
kv-cache-memory-bytes: 256MiB
proxy:
  disaggregate: always
  router-policy: round_robin
"""
HEALTHY_WITHIN_S = 900.0  # four workers on two cores
USED_WITHIN_S = 300.0
REQUEST_TIMEOUT_S = 300.0
SCALE = {"prefill": 2, "decode": 2}


class Composition(NamedTuple):
    engine: Engine
    url: str
    settings: dict[str, str]

    def compose(self, *arguments: str) -> str:
        return self.engine.compose("--project-name", PROJECT, *arguments, more=self.settings)

    def up(self, **scale: int) -> None:
        counts = [f"--scale={service}={count}" for service, count in (SCALE | scale).items()]
        self.compose("up", "--detach", "--no-recreate", *counts, "proxy", "prefill", "decode")

    def containers(self, *services: str) -> list[dict[str, Any]]:
        """As the engine describes them."""
        found: list[str] = []
        for service in services:
            labels = {"project": PROJECT, "service": service}
            filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
            found += self.engine.docker("ps", "--all", "--quiet", *filters).split()
        described: list[dict[str, Any]] = json.loads(self.engine.docker("inspect", *found))
        return described

    async def healthy(self, count: int) -> None:
        def all_are() -> bool:
            states = [container["State"] for container in self.containers("proxy", "prefill", "decode")]
            well = [
                state
                for state in states
                if state["Status"] == "running" and state["Health"]["Status"] == "healthy"
            ]
            return len(well) == len(states) == count

        try:
            await eventually(all_are, HEALTHY_WITHIN_S, f"{count} containers are healthy", 1.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.compose('logs', '--tail=40')}") from None

    async def used(self, client: httpx.AsyncClient, names: Sequence[str]) -> None:
        """Requests get right replies until each of these workers has served one."""
        left = set(names)

        async def served() -> bool:
            reply = await complete(client)
            left.difference_update(name for name in names if f"={name} " in reply.headers["X-Baton-Route"])
            return not left

        await eventually(served, USED_WITHIN_S, f"{names} are used", 0.1)


def name_of(container: dict[str, Any]) -> str:
    """Of the worker that runs in it."""
    service = container["Config"]["Labels"]["com.docker.compose.service"]
    return f"{service}-{container['Config']['Hostname']}"


async def complete(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, **more}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["choices"][0]["text"]
    return reply


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    if reason := engine.why_not():
        pytest.skip(f"no container engine: {reason}")
    directory = tmp_path_factory.mktemp("engine")
    (directory / "cluster.yaml").write_text(CLUSTER)
    with Network() as network:
        home = network.home("engine")
        docker = Engine(directory, home)
        settings = {
            "BASE_IMAGE": BASE,
            "BUILD_IMAGE": BUILD,
            "EXTRAS": "",
            "BATON_PUBLISH": f"{home.address}:8000",
            "BATON_CLUSTER_FILE": str(directory / "cluster.yaml"),
            "BATON_WORKER_MEMORY": "3g",
        }
        composition = Composition(docker, f"http://{home.address}:8000", settings)
        try:
            asyncio.run(docker.ready())
            build(composition, directory)
            yield composition
        finally:
            docker.close()


def build(composition: Composition, directory: Path) -> None:
    """The image, and a volume with the model: containers have no index to fetch it from."""
    engine.make_images(composition.engine, directory)
    composition.compose("build", "proxy")
    model = default_model_file().parent
    volumes = (f"--volume={PROJECT}_cache:{CACHE}", f"--volume={model}:/model:ro")
    copy = f"mkdir -p {CACHE}/models && cp -r /model {CACHE}/models/{DEFAULT_MODEL}"
    composition.engine.docker("run", "--rm", *volumes, "--entrypoint=sh", "baton:latest", "-c", copy)


@pytest.fixture
async def composition(built: Composition) -> Composition:
    built.up()
    await built.healthy(5)
    return built


@pytest.fixture
async def client(composition: Composition) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=composition.url, timeout=REQUEST_TIMEOUT_S) as client:
        yield client


def test_the_image_has_no_build_tools_and_an_ordinary_user(built: Composition) -> None:
    question = "id -u; command -v cc gcc make ld || echo none"
    said = built.engine.docker("run", "--rm", "--entrypoint=sh", "baton:latest", "-c", question)
    assert said.split() == ["10001", "none"]


async def test_all_containers_serve_through_the_published_port(
    composition: Composition, client: httpx.AsyncClient
) -> None:
    await composition.used(client, [name_of(each) for each in composition.containers("prefill", "decode")])
    assert "kernels: C for" in composition.compose("logs", "prefill"), "nothing was compiled, and C computes"


async def test_a_decode_container_more_is_used(composition: Composition, client: httpx.AsyncClient) -> None:
    before = {each["Id"] for each in composition.containers("decode")}
    composition.up(decode=3)
    await composition.healthy(6)
    (added,) = (each for each in composition.containers("decode") if each["Id"] not in before)
    await composition.used(client, [name_of(added)])


async def test_a_container_that_dies_is_started_again_and_used(
    composition: Composition, client: httpx.AsyncClient
) -> None:
    victim = composition.containers("decode")[0]
    os.kill(victim["State"]["Pid"], signal.SIGKILL)

    def restarted() -> bool:
        (now,) = json.loads(composition.engine.docker("inspect", victim["Id"]))
        return bool(now["RestartCount"] > victim["RestartCount"] and now["State"]["Running"])

    await eventually(restarted, USED_WITHIN_S, "it is started again", 0.5)
    await composition.healthy(5)
    await composition.used(client, [name_of(victim)])


async def test_stopped_containers_finish_what_they_have(
    composition: Composition, client: httpx.AsyncClient
) -> None:
    long = asyncio.create_task(complete(client, max_tokens=200, ignore_eos=True))

    async def runs() -> bool:
        workers = (await client.get("/workers")).json()["workers"]
        return any(worker["load"]["num_running"] for worker in workers if worker["role"] == "decode")

    await eventually(runs, USED_WITHIN_S, "it is under way")
    stopped = composition.containers("decode")
    await asyncio.to_thread(composition.compose, "stop", "decode")
    assert (await long).json()["usage"]["completion_tokens"] == 200
    for each in json.loads(composition.engine.docker("inspect", *(each["Id"] for each in stopped))):
        assert each["State"]["ExitCode"] == 0, composition.compose("logs", "--tail=20", "decode")
