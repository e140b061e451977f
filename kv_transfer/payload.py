"""Blocks as the payload of a message: bytes in main memory, or blocks in the memory of a device where the
connection reaches into it."""

from collections.abc import Callable

import msgspec

from common import messages
from common.device_blocks import DeviceBlocks
from common.messages import Blocks
from kv_transfer.transport import Connection

Payload = list[memoryview] | DeviceBlocks


async def send(
    connection: Connection, message: Blocks, payload: Payload, checksums: bool, released: Callable[[], None]
) -> None:
    """``released``: see ``Connection.send``."""
    if not isinstance(payload, DeviceBlocks):
        return await connection.send(messages.encode(message), payload, checksums, released)
    assert connection.on_device is not None
    if checksums:
        try:
            message = msgspec.structs.replace(message, checksum=payload.checksum())
        except BaseException:
            released()
            raise
    await connection.on_device.send_tensors(messages.encode(message), payload.tensors, released)


async def receive(connection: Connection, message: Blocks, place: Payload, block_bytes: int) -> bool:
    """Whether what has come into ``place`` is what was sent, as far as checksums tell."""
    if isinstance(place, DeviceBlocks):
        assert connection.on_device is not None
        await connection.on_device.receive_tensors(place.tensors)
    elif not await connection.receive_payload(place):
        return False
    if message.checksum is None:
        return True
    blocks = place if isinstance(place, DeviceBlocks) else DeviceBlocks.of(place, block_bytes)
    return blocks.checksum() == message.checksum
