"""An event loop in a thread of its own, for work that must not wait for another loop's work."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """Started by the constructor; ``close`` ends it. ``call`` and ``run`` may be used from any other
    thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a plain function in the loop soon; calls keep their order. Nothing happens once the loop has
        ended."""
        try:
            self.loop.call_soon_threadsafe(lambda: function(*args, **kwargs))
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs in the loop, awaited in the caller's."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs in the loop and end the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()
