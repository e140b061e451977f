"""From a deployment to the commands that ``baton serve`` runs, each with its options, cores and GPU."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from common import cores, options
from common.config import ConfigError
from control_plane import gpus
from control_plane.child import Command
from control_plane.deployment import Deployment, WorkerSet, control_address

PROXY_STAGE, WORKER_STAGE = (
    0,
    1,
)  # proxies are stopped first: they finish their requests with the workers' help


def commands(deployment: Deployment, environment: Mapping[str, str]) -> list[Command]:
    """The processes to start, proxies first."""
    child_environment = _child_environment(environment)
    workers = [(group, index) for group in deployment.workers for index in range(group.count)]
    shares = _shares([group.worker.cores for group, _ in workers])
    found = _proxies(deployment, child_environment)
    found_by_etcd = bool(deployment.network.discovery)
    addresses = () if found_by_etcd else tuple(map(control_address, deployment.proxies))
    devices = [
        gpus.spread(group.engine.device, position, deployment.num_gpus)
        for position, (group, _) in enumerate(workers)
    ]
    for position, ((group, index), share) in enumerate(zip(workers, shares, strict=True)):
        worker = replace(
            group.worker,
            name="-".join(part for part in (group.worker.name, group.role, str(index)) if part),
            cores=share,
            proxies=addresses,
            metrics_port=group.worker.metrics_port and group.worker.metrics_port + position,
        )
        utilization = gpus.share(group.engine.gpu_memory_utilization, devices, devices[position])
        engine = replace(group.engine, device=devices[position], gpu_memory_utilization=utilization)
        placed = replace(group, worker=worker, engine=engine)
        found.append(_worker(placed, (deployment.trace, deployment.network), child_environment))
    return found


def _shares(asked: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Cores for each worker, given what it asks for. Workers that ask for the same cores divide them; those
    that leave it open divide what nobody asks for, or all cores if nothing is left."""
    allowed = cores.allowed()
    missing = sorted({core for some in asked for core in some} - set(allowed))
    if missing:
        raise ConfigError(f"--cores: this process may not use {', '.join(map(str, missing))}")
    free = tuple(core for core in allowed if not any(core in some for some in asked)) or allowed
    pools = [some or free for some in asked]
    shares = {pool: iter(cores.split(pool, pools.count(pool))) for pool in set(pools)}
    return [next(shares[pool]) for pool in pools]


def _proxies(deployment: Deployment, environment: dict[str, str]) -> list[Command]:
    found, shared = [], (deployment.trace, deployment.network)
    for index, proxy in enumerate(deployment.proxies):
        name = "proxy" if len(deployment.proxies) == 1 else f"proxy-{index}"
        argv = (*_python("proxy"), *options.to_argv(deployment.engine, proxy, deployment.stop, *shared))
        found.append(Command(name, argv, environment | options.to_environment(proxy), stage=PROXY_STAGE))
    return found


def _worker(group: WorkerSet, shared: tuple[object, ...], environment: dict[str, str]) -> Command:
    worker = group.worker
    given = options.to_argv(worker, group.engine, group.transfer, group.stop, *shared)
    argv = (*_python(f"{group.role}_worker"), *given)
    threads = cores.thread_variables(len(worker.cores))
    return Command(worker.name, argv, environment | threads, worker.cores, WORKER_STAGE, forkable=True)


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module)


def _child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Options go to children by command line; those in the environment were taken into account already."""
    root = str(Path(__file__).parent.parent)  # so that a checkout works that was not installed
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith("BATON_") or (name in options.OTHER_VARIABLES and name != "BATON_CONFIG")
    }
    path = os.pathsep.join(part for part in (root, kept.get("PYTHONPATH", "")) if part)
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
