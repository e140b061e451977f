"""What ``baton serve`` was asked to run: proxies, and sets of prefill and decode workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from common import options
from common.config import (
    ALL_CONFIGS,
    ConfigError,
    EngineConfig,
    NetworkConfig,
    ProxyConfig,
    ServeConfig,
    StopConfig,
    TraceConfig,
    TransferConfig,
    WorkerConfig,
)
from common.hosts import reachable


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of one role."""

    role: str  # prefill or decode
    count: int
    engine: EngineConfig
    transfer: TransferConfig
    worker: WorkerConfig
    stop: StopConfig


@dataclass(frozen=True, slots=True)
class Deployment:
    serve: ServeConfig
    engine: EngineConfig  # as the proxies see it
    proxies: tuple[ProxyConfig, ...]  # one per process; they differ in their ports
    workers: tuple[WorkerSet, ...]  # prefill first
    trace: TraceConfig
    network: NetworkConfig
    stop: StopConfig  # of the proxies
    control_port_given: bool
    num_gpus: int

    @property
    def proxy(self) -> ProxyConfig:
        """What all proxies have in common; its own ports are those of the first."""
        return self.proxies[0]

    @property
    def engines(self) -> list[EngineConfig]:
        """One per worker."""
        return [group.engine for group in self.workers for _ in range(group.count)]


def read(argv: Sequence[str], environment: Mapping[str, str], num_gpus: int = 0) -> Deployment:
    """The deployment that the command line, the environment and the cluster file ask for."""
    parser = options.command_line(ALL_CONFIGS, "baton serve", positional="model")
    shared = options.collect(parser, argv, environment)
    serve = options.build(ServeConfig, shared)
    for_proxy = options.collect(parser, argv, environment, "proxy")
    counts = {"prefill": 0 if serve.colocated else serve.prefill, "decode": serve.decode}
    proxy = options.build(ProxyConfig, for_proxy)
    workers = tuple(
        _worker_set(role, count, options.collect(parser, argv, environment, role))
        for role, count in counts.items()
        if count
    )
    _require_audible(proxy, workers)
    return Deployment(
        serve=serve,
        engine=options.build(EngineConfig, for_proxy),
        proxies=_proxies(proxy, serve.proxy_workers),
        workers=workers,
        trace=options.build(TraceConfig, shared),
        network=options.build(NetworkConfig, shared),
        stop=options.build(StopConfig, for_proxy),
        control_port_given="control_port" in for_proxy,
        num_gpus=num_gpus,
    )


def _proxies(proxy: ProxyConfig, count: int) -> tuple[ProxyConfig, ...]:
    """With ports that follow one another, where ports were given."""
    if count > 1 and proxy.port == 0:
        raise ConfigError(f"--port: {count} proxies can only share a port that is given, not 0")

    def after(port: int, index: int) -> int:
        return port + index if port else 0

    return tuple(
        replace(proxy, control_port=after(proxy.control_port, index), own_port=after(proxy.own_port, index))
        for index in range(count)
    )


def _require_audible(proxy: ProxyConfig, workers: tuple[WorkerSet, ...]) -> None:
    """Workers that speak less often than the proxy listens for would be taken for dead again and again."""
    slowest = max(group.worker.heartbeat_interval_s for group in workers)
    if proxy.dead_after_s < 2 * slowest:
        raise ConfigError(
            f"--dead-after-s: {proxy.dead_after_s:g} is less than two --heartbeat-interval-s of {slowest:g}"
        )


def _worker_set(role: str, count: int, given: Mapping[str, options.Given]) -> WorkerSet:
    worker = options.build(WorkerConfig, given)
    if worker.transfer_port and count > 1:
        raise ConfigError(f"--transfer-port: {count} {role} workers cannot share port {worker.transfer_port}")
    engine, transfer = options.build(EngineConfig, given), options.build(TransferConfig, given)
    return WorkerSet(role, count, engine, transfer, worker, options.build(StopConfig, given))


def http_url(deployment: Deployment) -> str:
    """Where clients of this machine reach the API."""
    proxy = deployment.proxy
    return f"{_scheme(proxy)}://{reachable(proxy.host)}:{proxy.port}"


def own_url(deployment: Deployment, proxy: ProxyConfig) -> str:
    """Where ``proxy`` and no other answers."""
    if len(deployment.proxies) == 1:
        return http_url(deployment)
    return f"{_scheme(proxy)}://{reachable(proxy.host)}:{proxy.own_port}"


def _scheme(proxy: ProxyConfig) -> str:
    return "https" if proxy.ssl_certfile else "http"


def control_address(proxy: ProxyConfig) -> str:
    """Where workers of this machine reach a proxy."""
    return f"tcp://{reachable(proxy.control_host)}:{proxy.control_port}"
