"""Clients and a load tool that know nothing of this server, each in an environment of its own."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.environments import install
from common.model_source import resolve
from tests.system.server import Server, clean_environment

CLIENTS = Path(__file__).parent / "clients"
RUN_S = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def run(*command: str | Path) -> str:
    environment = clean_environment() | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [os.fspath(word) for word in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("requirement", "script"),
    [("langchain-openai==1.7.4", "with_langchain.py"), ("litellm==1.110.2", "with_litellm.py")],
)
def test_what_other_clients_offer_works(system: Server, requirement: str, script: str) -> None:
    run(install(requirement, "python"), CLIENTS / script, f"{system.url}/v1")


def test_a_load_tool_runs_unchanged(system: Server, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={system.url},model=default",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "tokenizer": f"kind=huggingface_auto,model={resolve('smollm2-135m-instruct').directory}",
        "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "output": f"kind=json,path={output}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    same_torch = f"torch=={version('torch')}"  # it would fetch the one with gigabytes of CUDA
    run(install("guidellm==0.8.1", "guidellm", same_torch), "run", *words, "--disable-console-interactive")
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert made["errored"] == made["incomplete"] == 0, made
    assert made["successful"] >= 4, made  # of six: it does not count all that are under way when it stops
