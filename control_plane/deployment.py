"""What ``baton serve`` runs: a proxy, prefill and decode workers, each a command with options and cores."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common import cores, options
from common.config import ConfigError, EngineConfig, ProxyConfig, ServeConfig, TransferConfig, WorkerConfig
from control_plane.child import Command

PROXY_STAGE, WORKER_STAGE = (
    0,
    1,
)  # the proxy goes first when stopping: it finishes its requests, the workers help
CLASSES = (EngineConfig, TransferConfig, WorkerConfig, ProxyConfig, ServeConfig)


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of one role."""

    role: str  # prefill or decode
    count: int
    engine: EngineConfig
    transfer: TransferConfig
    worker: WorkerConfig


@dataclass(frozen=True, slots=True)
class Deployment:
    serve: ServeConfig
    engine: EngineConfig  # as the proxy sees it
    proxy: ProxyConfig
    workers: tuple[WorkerSet, ...]  # prefill first
    control_port_given: bool

    @property
    def engines(self) -> list[EngineConfig]:
        """One per worker."""
        return [group.engine for group in self.workers for _ in range(group.count)]


def read(argv: Sequence[str], environment: Mapping[str, str]) -> Deployment:
    """The deployment that the command line, the environment and the cluster file ask for."""
    parser = options.command_line(CLASSES, "baton serve", positional="model")
    shared = options.collect(parser, argv, environment)
    serve = options.build(ServeConfig, shared)
    for_proxy = options.collect(parser, argv, environment, "proxy")
    counts = {"prefill": 0 if serve.colocated else serve.prefill, "decode": serve.decode}
    return Deployment(
        serve=serve,
        engine=options.build(EngineConfig, for_proxy),
        proxy=options.build(ProxyConfig, for_proxy),
        workers=tuple(
            _worker_set(role, count, options.collect(parser, argv, environment, role))
            for role, count in counts.items()
            if count
        ),
        control_port_given="control_port" in for_proxy,
    )


def _worker_set(role: str, count: int, given: Mapping[str, options.Given]) -> WorkerSet:
    worker = options.build(WorkerConfig, given)
    if worker.transfer_port and count > 1:
        raise ConfigError(f"--transfer-port: {count} {role} workers cannot share port {worker.transfer_port}")
    return WorkerSet(
        role, count, options.build(EngineConfig, given), options.build(TransferConfig, given), worker
    )


def commands(deployment: Deployment, environment: Mapping[str, str]) -> list[Command]:
    """The processes to start, proxy first."""
    names = [(group, f"{group.role}-{index}") for group in deployment.workers for index in range(group.count)]
    allowed = cores.allowed()
    usable = tuple(core for core in allowed if core in _cores_asked_for(deployment, allowed))
    shares = cores.split(usable, len(names))
    proxy = proxy_command(deployment, environment)
    return [proxy] + [
        worker_command(group, name, share, deployment.proxy, environment)
        for (group, name), share in zip(names, shares, strict=True)
    ]


def _cores_asked_for(deployment: Deployment, allowed: tuple[int, ...]) -> tuple[int, ...]:
    asked = deployment.workers[0].worker.cores
    missing = sorted(set(asked) - set(allowed))
    if missing:
        raise ConfigError(f"--cores: this process may not use {', '.join(map(str, missing))}")
    return asked or allowed


def proxy_command(deployment: Deployment, environment: Mapping[str, str]) -> Command:
    proxy, engine = deployment.proxy, deployment.engine
    return Command(
        "proxy",
        (*_python("proxy"), *options.to_argv(engine, proxy)),
        _child_environment(environment) | options.to_environment(proxy),
        stage=PROXY_STAGE,
    )


def worker_command(
    group: WorkerSet, name: str, share: tuple[int, ...], proxy: ProxyConfig, environment: Mapping[str, str]
) -> Command:
    worker = replace(
        group.worker,
        name=f"{group.worker.name}-{name}" if group.worker.name else name,
        cores=share,
        proxies=(control_address(proxy),),
    )
    argv = (*_python(f"{group.role}_worker"), *options.to_argv(worker, group.engine, group.transfer))
    threads = cores.thread_variables(len(share))
    return Command(name, argv, _child_environment(environment) | threads, share, WORKER_STAGE)


def control_address(proxy: ProxyConfig) -> str:
    """Where workers of this machine reach the proxy."""
    return f"tcp://{reachable(proxy.control_host)}:{proxy.control_port}"


def reachable(host: str) -> str:
    """``host`` as part of a URL that this machine can connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


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
