"""Blocks as the payload of a message: bytes in main memory, or blocks in the memory of a device where the
connection reaches into it."""

import msgspec

from common import messages
from common.device_blocks import DeviceBlocks
from common.messages import Blocks
from kv_transfer.checksum import digest_for
from kv_transfer.memory import size_of
from kv_transfer.transport import Connection

Payload = list[memoryview] | DeviceBlocks


async def send(connection: Connection, message: Blocks, payload: Payload, checksums: bool) -> None:
    """``message`` as it is without a checksum."""
    if isinstance(payload, DeviceBlocks):
        assert connection.on_device is not None
        if checksums:
            message = msgspec.structs.replace(message, checksum=payload.checksum())
        await connection.on_device.send_tensors(messages.encode(message), payload.tensors)
    elif checksums:
        digest = digest_for(size_of(payload))

        def header() -> bytes:
            return messages.encode(msgspec.structs.replace(message, checksum=digest.digest()))

        await connection.send(header, payload, digest)
    else:
        await connection.send(messages.encode(message), payload)


async def receive(connection: Connection, message: Blocks, place: Payload, block_bytes: int) -> bool:
    """Whether what has come into ``place`` is what was sent, by the sender's kind of checksum."""
    if isinstance(place, DeviceBlocks):
        assert connection.on_device is not None
        await connection.on_device.receive_tensors(place.tensors)
    elif message.checksum is None or message.on_device:
        await connection.receive_payload(place)
    else:
        digest = digest_for(size_of(place))
        await connection.receive_payload(place, digest)
        return digest.digest() == message.checksum
    if message.checksum is None:
        return True
    blocks = place if isinstance(place, DeviceBlocks) else DeviceBlocks.of(place, block_bytes)
    return blocks.checksum() == message.checksum
