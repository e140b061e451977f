"""Blocks as the payload of a message: bytes in main memory, or blocks in the memory of a device where the
connection reaches into it."""

from common import messages
from common.device_blocks import DeviceBlocks
from common.messages import Blocks
from kv_transfer.checksum import Checksum, checksum
from kv_transfer.transport import Connection

Payload = list[memoryview] | DeviceBlocks


def checksum_of(payload: Payload) -> int:
    return payload.checksum() if isinstance(payload, DeviceBlocks) else checksum(payload)


async def send(connection: Connection, message: Blocks, payload: Payload) -> None:
    header = messages.encode(message)
    if not isinstance(payload, DeviceBlocks):
        return await connection.send(header, payload)
    assert connection.on_device is not None
    await connection.on_device.send_tensors(header, payload.tensors)


async def receive(connection: Connection, message: Blocks, place: Payload, block_bytes: int) -> bool:
    """Whether what has come into ``place`` is what was sent, by the sender's kind of checksum."""
    digest = Checksum()
    if isinstance(place, DeviceBlocks):
        assert connection.on_device is not None
        await connection.on_device.receive_tensors(place.tensors)
    elif message.checksum is None or message.on_device:
        await connection.receive_payload(place)
    else:
        await connection.receive_payload(place, digest.update)
    if message.checksum is None:
        return True
    if message.on_device:
        blocks = place if isinstance(place, DeviceBlocks) else DeviceBlocks.of(place, block_bytes)
        return blocks.checksum() == message.checksum
    return digest.intdigest() == message.checksum
