"""A worker's own ``/metrics``, for who would rather ask it than its proxies."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric as Family

from common.config import WorkerConfig
from common.exposition import Labelled, families
from common.messages import Status

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class _Own:
    """The worker's report, asked for anew each time, in a thread of the server."""

    def __init__(self, report: Callable[[], Status]) -> None:
        self._report = report

    def collect(self) -> Iterable[Family]:
        status = self._report()
        return families([Labelled(status.name, status)])


@contextmanager
def metrics_served(config: WorkerConfig, report: Callable[[], Status]) -> Iterator[None]:
    """Nothing, without ``--metrics-port``. Raises OSError when that port cannot be had."""
    if not config.metrics_port:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_Own(report))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(config.metrics_port, config.metrics_host, registry)
    except OSError as error:
        place = f"{config.metrics_host} port {config.metrics_port}"
        raise OSError(error.errno, f"--metrics-port: cannot listen on {place}: {error.strerror}") from error
    logger.info("metrics on http://%s:%d/metrics", config.metrics_host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(CLOSE_TIMEOUT_S)
