"""The tasks that serve a listener's connections."""

import asyncio
import logging

from kv_transfer.transport import Connection, ConnectionHandler

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0


class Handlers:
    """One task per accepted connection, which is closed when its handler ends."""

    def __init__(self, handler: ConnectionHandler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, connection: Connection) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            if stuck:
                log.error("%d connection handlers did not end within %g s", len(stuck), CLOSE_TIMEOUT_S)

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._handler(connection)
        except ConnectionError as error:
            log.info("connection ended: %s", error)
        except Exception:
            log.exception("handler of the connection from %s failed", connection.peer)
        finally:
            await connection.close()
