"""Back-pressure between two processes: how much a peer may have under way to us, and we to it."""

import asyncio

MESSAGE_COST = 4096  # added to the size of each message, so that a window bounds the number of small ones too
MIN_WINDOW_BYTES = 64 << 10


class Window:
    """Room that the peer has for our messages. Both sides count a message with the same ``cost``: the sender
    when it goes out, the receiver when it was read, who then returns it as credit."""

    def __init__(self) -> None:
        self.size = 0  # not known before the peer has answered
        self._room = 0
        self._is_shut = False
        self._num_waiting = 0
        self._changed = asyncio.Event()

    def open(self, size: int) -> None:
        self.size = self._room = size

    def cost(self, message_bytes: int) -> int:
        """Half of the window at most. Up to a quarter of it is credit not returned yet, and a message of any
        size must find room in the rest."""
        return min(message_bytes + MESSAGE_COST, self.size // 2)

    async def take(self, amount: int) -> None:
        """Wait for room; returns at once when shut."""
        self._num_waiting += 1
        try:
            while self._room < amount and not self._is_shut:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._num_waiting -= 1
        self._room -= amount

    def try_take(self, amount: int) -> bool:
        """False where ``take`` would wait, or somebody waits in it."""
        if self._num_waiting or self._is_shut or self._room < amount:
            return False
        self._room -= amount
        return True

    def give(self, amount: int) -> None:
        self._room = min(self._room + amount, self.size)
        self._changed.set()

    def shut(self) -> None:
        """Nobody will give credit any more."""
        self._is_shut = True
        self._changed.set()
