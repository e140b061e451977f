"""UCX in an event loop: a context and a worker, progressed when their descriptor says that there is work.

The low level of ``ucxx`` is used. Its asyncio layer waits for a request by asking again and again, which
keeps a core busy as long as anything is expected, and a worker expects something all the time.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

# ucxx itself sets a variable that UCX then reports as unknown to it.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

from torch import Tensor
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from kv_transfer.memory import Buffer
from kv_transfer.transport import AddressError

log = logging.getLogger(__name__)
PROGRESS_BURST = 16  # steps of progress before other tasks get their turn
# UCX cannot always say when there will be something to do, as when the peer's queue in shared memory is full.
# It must then be asked again: at once for a while, and less often when the peer seems to be busy with other
# things.
EAGER_TRIES = 100
PAUSE_S = 0.0005
QUIET_REPORT_S = 5.0
CLOSE_TIMEOUT_NS = 1_000_000_000


class Operation(NamedTuple):
    """A send or receive under way. ``done`` gets a result or a ``ConnectionError`` once UCX has let go of
    ``buffer``."""

    request: Any
    buffer: Array
    done: asyncio.Future[None]


class Engine:
    """Belongs to the event loop that runs when it is made. Raises ``AddressError`` when UCX cannot work
    here."""

    def __init__(self, is_local: bool) -> None:
        try:
            self._context = libucxx.UCXContext(options(is_local))
            self._worker = libucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except libucxx.UCXError as error:
            raise AddressError(
                f"UCX does not start here (its settings are UCX_ variables): {error}"
            ) from error
        self._operations: list[Operation] = []
        self._is_scheduled = False
        self._pause: asyncio.TimerHandle | None = None
        self._num_futile = 0  # tries in a row without progress
        asyncio.get_running_loop().add_reader(self._worker.epoll_file_descriptor, self.progress)
        self.schedule()

    @property
    def version(self) -> str:
        """Of UCX itself. Only equal ones are known to read each other's addresses."""
        return ".".join(str(part) for part in libucxx.get_ucx_version())

    @property
    def address(self) -> bytes:
        return bytes(memoryview(self._worker.address))

    def endpoint(self, address: bytes) -> "Endpoint":
        """Raises ``ConnectionError`` when there is no way to that address."""
        try:
            place = libucxx.UCXAddress.create_from_buffer(address)
            raw = libucxx.UCXEndpoint.create_from_worker_address(self._worker, place, True)
        except libucxx.UCXError as error:
            raise ConnectionError(f"UCX finds no way to the peer: {error}") from error
        return Endpoint(self, raw)

    def start(self, request: Any, buffer: Array) -> Operation:
        """Watch a request that UCX has taken."""
        operation = Operation(request, buffer, asyncio.get_running_loop().create_future())
        self._operations.append(operation)
        self.schedule()
        return operation

    def schedule(self) -> None:
        """Make progress soon, though the descriptor may not say that there is anything to do."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._scheduled)

    def _scheduled(self) -> None:
        self._is_scheduled = False
        self.progress()

    def progress(self) -> None:
        """Do some of what there is to do, and see to it that the rest is done."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        is_idle = any(not self._worker.progress_once() for _ in range(PROGRESS_BURST))
        self._settle()
        self._num_futile = self._num_futile + 1 if is_idle else 0
        if is_idle and self._worker.arm():
            self._num_futile = 0  # the descriptor will tell
        elif self._num_futile < EAGER_TRIES:
            self.schedule()
        else:
            self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self.progress)

    def _settle(self) -> None:
        finished = [operation for operation in self._operations if operation.request.completed]
        if not finished:
            return
        self._operations = [operation for operation in self._operations if operation not in finished]
        for operation in finished:
            try:
                operation.request.check_error()
            except libucxx.UCXError as error:
                operation.done.set_exception(ConnectionError(f"UCX: {error}"))
            else:
                operation.done.set_result(None)


class Endpoint:
    """One peer's worker, as seen from ours."""

    def __init__(self, engine: Engine, raw: Any) -> None:
        self._engine = engine
        self._raw = raw

    def send(self, buffer: Buffer | Tensor, tag: int) -> Operation:
        array = array_of(buffer)
        return self._engine.start(self._raw.tag_send(array, libucxx.UCXXTag(tag)), array)

    def receive(self, buffer: memoryview | Tensor, tag: int) -> Operation:
        array = array_of(buffer)
        return self._engine.start(self._raw.tag_recv(array, libucxx.UCXXTag(tag)), array)

    def progress(self) -> None:
        self._engine.progress()

    def close(self) -> None:
        """Cancel what is under way; it is quiet once its operations are done. Safe to repeat."""
        self._raw.close_blocking(CLOSE_TIMEOUT_NS, 1)
        self._engine.schedule()


def array_of(buffer: Buffer | Tensor) -> Array:
    """A tensor on a device tells its place by itself; one in main memory has to be asked for an array."""
    return Array(buffer.numpy() if isinstance(buffer, Tensor) and not buffer.is_cuda else buffer)


async def quiet(operations: Sequence[Operation]) -> None:
    """Wait until UCX has let go of the operations' buffers, cancelled or not: they must not be used
    before."""
    pending = {operation.done for operation in operations if not operation.done.done()}
    is_cancelled = False
    while pending:
        try:
            _, pending = await asyncio.wait(pending, timeout=QUIET_REPORT_S)
            if pending:
                log.error("UCX holds on to %d buffers of a connection that has ended", len(pending))
        except asyncio.CancelledError:
            is_cancelled = True
    for operation in operations:
        operation.done.exception()  # seen, as the end of the connection is told otherwise
    if is_cancelled:
        raise asyncio.CancelledError


def options(is_local: bool) -> dict[str, str]:
    """What UCX is told. Between processes of one machine shared memory is enough, and opens no port; for
    other machines UCX listens on the devices of ``UCX_NET_DEVICES``. ``UCX_TLS`` in the environment overrides
    both."""
    wanted = {
        # Without this, endpoints that notice errors do without shared memory (the MM transports).
        "MM_ERROR_HANDLING": "y",
        # Room for 8 MiB, so that a sender need not wait for a receiver that is busy with something else.
        "MM_FIFO_SIZE": "1024",
        # A send ends when the receiver has the data and not before, so nothing is lost by closing after it.
        "RNDV_THRESH": "0",
    }
    if is_local and "UCX_TLS" not in os.environ:
        wanted["TLS"] = "^tcp"
    return wanted
