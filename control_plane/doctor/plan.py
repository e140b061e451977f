"""What `baton serve` would start with these options: can it?"""

from collections import Counter
from collections.abc import Sequence

import httpx

from common import model_source
from common.config import ConfigError
from common.model_config import ModelConfig, ModelError
from control_plane import memory, ports
from control_plane.child import Command
from control_plane.deployment import Deployment, http_url
from control_plane.doctor.findings import Finding


def check(plan: Deployment, processes: Sequence[Command]) -> list[Finding]:
    return [*models(plan), *free_ports(plan), *sharing(processes)]


def models(plan: Deployment) -> list[Finding]:
    """Fetches what is not there yet, as `baton serve` would."""
    found = []
    for model in sorted({engine.model for engine in plan.engines}):
        engines = [engine for engine in plan.engines if engine.model == model]
        try:
            source = model_source.resolve(model)
            config = ModelConfig.load(source.directory)
            memory.require_enough(model, config, engines, memory.available_bytes(), plan.num_gpus)
            needed = sum(memory.worker_bytes(config, engine) for engine in engines) / 2**30
            text = f"{source.name} in {source.directory}; its workers need {needed:.1f} GiB or more"
            found.append(Finding("good", "model", text))
        except (ConfigError, ModelError) as error:
            found.append(Finding("failure", "model", str(error), "see --model in docs/configuration.md"))
    return found


def free_ports(plan: Deployment) -> list[Finding]:
    found = []
    wanted = [("port", plan.proxy.host, plan.proxy.port)]
    wanted += [("control-port", proxy.control_host, proxy.control_port) for proxy in plan.proxies]
    for option, host, port in wanted:
        try:
            ports.require_free(host, port, option)
            found.append(Finding("good", "ports", f"--{option} {port} is free"))
        except ConfigError as error:
            found.append(_taken(plan, option, str(error)))
    return found


def _taken(plan: Deployment, option: str, text: str) -> Finding:
    if option == "control-port" and not plan.control_port_given:
        return Finding("note", "ports", f"{text}; baton serve takes another one by itself")
    if option == "port" and _is_baton(http_url(plan)):
        text = f"{http_url(plan)} is a Baton that runs"
        return Finding("note", "ports", text, "look at it with: baton doctor --server " + http_url(plan))
    return Finding("failure", "ports", text)


def _is_baton(url: str) -> bool:
    try:
        reply = httpx.get(f"{url}/version", timeout=2.0, trust_env=False, verify=False)
        return "protocol_version" in reply.json()
    except (httpx.HTTPError, ValueError, TypeError):
        return False


def sharing(processes: Sequence[Command]) -> list[Finding]:
    """Who gets which cores; thread pools that share cores wait for each other at every step."""
    workers = [process for process in processes if process.cores]
    used = Counter(core for worker in workers for core in worker.cores)
    found = [
        Finding("good", "threads", f"{w.name}: {len(w.cores)} on core {', '.join(map(str, w.cores))}")
        for w in workers
    ]
    shared = [core for core, count in used.items() if count > 1]
    if shared:
        names = [worker.name for worker in workers if set(worker.cores) & set(shared)]
        text = f"{', '.join(names)} share cores {', '.join(map(str, shared))} and slow each other down"
        found.append(Finding("warning", "threads", text, "fewer workers, more cores, or --cores"))
    return found
