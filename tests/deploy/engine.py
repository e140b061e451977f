"""A Docker engine of the test's own on a node of its own, and images to begin with, made from packages of
the distribution and of the package index: inside the engine there is neither a registry nor an index."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tests.faults.waiting import eventually
from tests.netns import network
from tests.netns.network import NAMESPACES, Home

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("dockerd", "docker", "docker-compose", "debootstrap", "nsenter", "setpriv")
SUITE = "bookworm"
PYTHON = (3, 11)  # of that suite: wheels must be for the same one
PACKAGES = "python3,python3-venv,ca-certificates"
PIP_SETTINGS = "[global]\nno-index = true\nfind-links = /opt/wheels\n"
BASE, BUILD = "baton-test-base:1", "baton-test-build:1"
STARTS_WITHIN_S = 120.0
STOPS_WITHIN_S = 120.0
COMMAND_TIMEOUT_S = 1800.0


def why_not() -> str:
    """What stands against an engine here; empty when nothing does."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}"
    if sys.version_info[:2] != PYTHON:
        return f"the distribution's Python is {PYTHON}, this one is {sys.version_info[:2]}"
    return network.why_not()


class Engine:
    """Everything it keeps is in ``directory``."""

    def __init__(self, directory: Path, home: Home) -> None:
        self._directory = directory
        self._environment = os.environ | {
            "DOCKER_HOST": f"unix://{directory}/docker.sock",
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }
        self._log = (directory / "dockerd.log").open("wb")
        # nsenter, not ip netns exec, which hides the control groups. The engine ends with this process.
        self._process = subprocess.Popen(
            [
                *("nsenter", f"--net={NAMESPACES / home.namespace}", "setpriv", "--pdeathsig", "TERM"),
                *("dockerd", "--storage-driver", "overlay2", "--data-root", str(directory / "data")),
                *("--exec-root", str(directory / "exec"), "--pidfile", str(directory / "pid")),
                *("--host", f"unix://{directory}/docker.sock"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    async def ready(self) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, (self._directory / "dockerd.log").read_text()[-2000:]
            command = ["docker", "version"]
            done = subprocess.run(
                command, env=self._environment, capture_output=True, check=False, timeout=30
            )
            return done.returncode == 0

        await eventually(answers, STARTS_WITHIN_S, "the engine answers", 0.5)

    def docker(self, *arguments: str, more: Mapping[str, str] | None = None) -> str:
        return run("docker", *arguments, environment=self._environment | dict(more or {}))

    def compose(self, *arguments: str, more: Mapping[str, str]) -> str:
        return run("docker-compose", *arguments, environment=self._environment | dict(more))

    def imported(self, tree: Path, name: str) -> None:
        with subprocess.Popen(["tar", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE) as tar:
            command = ["docker", "import", "-", name]
            subprocess.run(
                command, env=self._environment, stdin=tar.stdout, check=True, timeout=COMMAND_TIMEOUT_S
            )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(STOPS_WITHIN_S)
        self._log.close()


def make_images(engine: Engine, directory: Path) -> None:
    """``BASE`` has Python and nothing else; ``BUILD`` a compiler, and wheels, too."""
    tree = directory / "tree"
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(tree))
    engine.imported(tree, BASE)
    run("chroot", str(tree), "apt-get", "install", "-y", "--no-install-recommends", "gcc", "libc6-dev")
    torch = f"torch=={version('torch')}"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(tree / "opt" / "wheels"))
    run(*pip, torch, "setuptools>=77", "wheel", str(ROOT))
    (tree / "etc" / "pip.conf").write_text(PIP_SETTINGS)
    engine.imported(tree, BUILD)
    shutil.rmtree(tree)


def run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {(done.stdout + done.stderr)[-4000:]}"
    return done.stdout
