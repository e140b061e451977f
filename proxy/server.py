"""The proxy process: HTTP on one side, workers on the other, until a signal or a failure ends it.

The first SIGTERM or SIGINT stops new connections and lets running requests finish; a second one ends at once.
"""

import asyncio
import logging
import math
import signal
import socket
import ssl
import uuid

import uvicorn
from starlette.types import ASGIApp

from common.channel import WorkerChannel
from common.config import ConfigError, ProxyConfig, StopConfig
from common.notice import tell_ready
from common.secret import Secret
from common.tracing import Tracer
from proxy.admission import Admission
from proxy.app import build_app
from proxy.chooser import Chooser
from proxy.connection import Connection
from proxy.dispatcher import Dispatcher
from proxy.frontend import Frontend
from proxy.live import Live
from proxy.metrics import Metrics
from proxy.observer import Observer
from proxy.registry import Registry
from proxy.router import Router
from proxy.served_model import ServedModel

KEEP_ALIVE_S = 75  # longer than load generators and load balancers pause between two requests

logger = logging.getLogger(__name__)


def listeners(config: ProxyConfig) -> list[socket.socket]:
    """Where clients come in: the port that siblings may share, and the one of this process alone. Raises
    OSError whose text names the address."""
    found = [bind(config.host, config.port, shared=bool(config.sibling_ports))]
    try:
        if config.own_port:
            found.append(bind(config.host, config.own_port))
    except OSError:
        found[0].close()
        raise
    return found


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """The system spreads connections over the processes that listen on a ``shared`` port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def check_certificate(config: ProxyConfig) -> None:
    """Raises ConfigError for one that cannot be used."""
    if not config.ssl_certfile:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {error}") from error


def control_address(config: ProxyConfig) -> str:
    host = f"[{config.control_host}]" if ":" in config.control_host else config.control_host
    return f"tcp://{host}:{config.control_port}"


def found_address(config: ProxyConfig, listening: str) -> str:
    """Where workers that find this proxy reach it, which is ``listening``. Raises ``ConfigError``."""
    host = config.control_advertise_host or config.control_host
    if host in ("", "0.0.0.0", "::"):
        text = f"--control-host {host} is no address that workers can reach"
        raise ConfigError(f"--control-advertise-host: needed with --discovery, {text}")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{listening.rpartition(':')[2]}"


def router_of(config: ProxyConfig) -> Router:
    common = config.router_policy
    prefill = common if config.prefill_policy == "same" else config.prefill_policy
    decode = common if config.decode_policy == "same" else config.decode_policy
    return Router(prefill, decode, config.disaggregate)


def build(
    config: ProxyConfig, model: ServedModel, channel: WorkerChannel, tracer: Tracer | None = None
) -> Frontend:
    registry = Registry(config.dead_after_s, model.fingerprint, config.prefill_fallback)
    metrics = Metrics(registry, model.name if config.vllm_metric_names else "")
    dispatcher = Dispatcher(
        channel,
        registry,
        Chooser(registry, router_of(config), metrics, config.slo_admission == "refuse"),
        metrics,
        uuid.uuid4().hex,
        config.max_attempts,
        config.worker_wait_s,
    )
    admission = Admission(config.max_queued_requests, len(config.all_keys()))
    metrics.in_flight.set_function(lambda: admission.num_admitted)
    live = Live(registry, admission, model.name, config.slo_ttft_s, config.slo_itl_s)
    observer = Observer(metrics, live, config.slo_ttft_s, config.slo_itl_s, tracer)
    return Frontend(config, model, registry, dispatcher, metrics, observer, admission)


async def serve(
    config: ProxyConfig,
    stop: StopConfig,
    model: ServedModel,
    sockets: list[socket.socket],
    tracer: Tracer | None = None,
    secret: Secret | None = None,
    discovery: str = "",
) -> None:
    """``discovery``: as in ``NetworkConfig``. Raises OSError when the control port is taken."""
    channel = WorkerChannel(control_address(config), secret)
    try:
        address = found_address(config, channel.address) if discovery else ""
        frontend = build(config, model, channel, tracer)
        host, port = sockets[0].getsockname()[:2]
        logger.info("HTTP API on %s port %d, workers announce themselves to %s", host, port, channel.address)
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(frontend.dispatcher.run())]
            if discovery:
                from common.discovery import Place, announce  # brings an HTTP client, for those that want it

                others.append(tasks.create_task(announce(Place.parse(discovery), address)))
            await _serve_http(build_app(frontend), sockets, config, stop, frontend.stopping)
            for task in others:
                task.cancel()
    finally:
        channel.close()
        if tracer is not None:
            tracer.close()


async def _serve_http(
    app: ASGIApp,
    sockets: list[socket.socket],
    config: ProxyConfig,
    stop: StopConfig,
    stopping: asyncio.Event,
) -> None:
    """Until a signal; a failure of the conversation with workers cancels it."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who asks is not of interest
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(stop.drain_timeout_s),
            ssl_certfile=config.ssl_certfile or None,
            ssl_keyfile=config.ssl_keyfile or None,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=sockets))
    await asyncio.sleep(0)  # lets uvicorn install its signal handlers, so that ours replace them
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, server, stopping)
    tell_ready()
    await serving


def _stop(server: uvicorn.Server, stopping: asyncio.Event) -> None:
    stopping.set()
    server.force_exit = server.should_exit
    server.should_exit = True
