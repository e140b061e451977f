import asyncio
import sys
import threading

import pytest

import kv_transfer
from common.config import ConfigError, WorkerConfig
from kv_transfer import transport
from kv_transfer.addresses import listen_address
from kv_transfer.transport import AddressError, Connection, Limits, available

TIMEOUT_S = 30.0


async def echo(connection: Connection) -> None:
    while True:
        header, payload_bytes = await connection.receive()
        payload = bytearray(payload_bytes)
        await connection.receive_payload([memoryview(payload)])
        await connection.send(header, [payload])


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://127.0.0.1:7001", "unknown transport 'tcp'"),
        ("127.0.0.1:7001", "not a transfer address"),
        ("zmq+tcp://", "not a transfer address"),
        ("zmq+tcp://127.0.0.1", "must end in host:port"),
        ("zmq+tcp://127.0.0.1:http", "must end in host:port"),
        ("zmq+tcp://127.0.0.1:70000", "must end in host:port"),
        ("zmq+tcp://:7001", "must end in host:port"),
    ],
)
async def test_an_address_that_makes_no_sense_is_refused_by_name(address: str, text: str) -> None:
    for attempt in (transport.connect(address, 1.0), transport.listen(address, echo)):
        with pytest.raises(AddressError, match=text) as raised:
            await attempt
        assert repr(address) in str(raised.value)


async def test_ucx_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ucx", "ucx_engine"):
        monkeypatch.delitem(sys.modules, f"kv_transfer.{name}", raising=False)
        monkeypatch.delattr(kv_transfer, name, raising=False)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)  # importing it fails
    with pytest.raises(AddressError, match="needs the package ucxx"):
        await transport.connect("ucx://127.0.0.1:7001", 1.0)


async def test_a_host_that_does_not_resolve_is_an_error_and_not_a_wait() -> None:
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises((ConnectionError, TimeoutError)):
            await transport.connect("zmq+tcp://no-such-host.invalid:7001", 2.0)
        with pytest.raises(OSError, match=r"no-such-host\.invalid"):
            await transport.listen("zmq+tcp://no-such-host.invalid:7001", echo)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_hosts_may_be_numbers_of_both_kinds_and_names(host: str) -> None:
    listener = await transport.listen(f"zmq+tcp://{host}:0", echo)
    async with asyncio.timeout(TIMEOUT_S):
        connection = await transport.connect(listener.address, TIMEOUT_S)
        await connection.send(b"hello")
        assert await connection.receive() == (b"hello", 0)
        await connection.close()
    await listener.close()


async def test_peers_are_told_the_advertised_host_and_the_port_that_was_bound() -> None:
    listener = await transport.listen("zmq+tcp://127.0.0.1:0", echo, advertise_host="localhost")
    address = listener.address
    assert address.startswith("zmq+tcp://localhost:")
    async with asyncio.timeout(TIMEOUT_S):
        await (await transport.connect(address, TIMEOUT_S)).close()
    await listener.close()


@pytest.mark.parametrize(
    "limits",
    [{"window_bytes": 1000}, {"ping_interval_s": 0.0}, {"ping_interval_s": 3.0, "silence_timeout_s": 3.0}],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


def test_two_threads_with_a_loop_each_can_talk_in_process() -> None:
    bound, done = threading.Event(), threading.Event()

    async def serve() -> None:
        listener = await transport.listen("inproc://two threads", echo)
        bound.set()
        await asyncio.to_thread(done.wait, TIMEOUT_S)
        await listener.close()

    async def ask() -> tuple[bytes, int]:
        connection = await transport.connect("inproc://two threads", TIMEOUT_S)
        for _ in range(50):
            await connection.send(b"hello", [bytes(1_000_000)])
            answer = await connection.receive()
        await connection.close()
        return answer

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert bound.wait(TIMEOUT_S)
        assert asyncio.run(ask()) == (b"hello", 1_000_000)
    finally:
        done.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.skipif("ucx" not in available(), reason="needs ucxx")
def test_ucx_leaves_loopback_only_on_a_network_that_was_declared_trusted() -> None:
    inside, outside = WorkerConfig(), WorkerConfig(bind_host="0.0.0.0")
    assert listen_address("ucx", inside, "i") == "ucx://127.0.0.1:0"
    with pytest.raises(ConfigError, match="--trusted-network"):
        listen_address("ucx", outside, "i")
    assert listen_address("ucx", outside, "i", trusted_network=True) == "ucx://0.0.0.0:0"
