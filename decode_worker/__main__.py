"""``python -m decode_worker``: one decode worker process."""

import sys

from common import gpu, startup
from common.loop_thread import LoopThread
from common.service import Service
from common.tracing import tracer_of
from decode_worker.worker import DecodeWorker
from kv_transfer.addresses import listen_address
from kv_transfer.transport import Limits, listen


async def serve(setup: startup.Setup) -> None:
    tracer = tracer_of(setup.trace, setup.role, setup.name)
    engine = startup.build_engine(setup)
    transfers = LoopThread("transfers")
    transfers.call(gpu.use_beside_steps, engine.cache.device)
    worker = DecodeWorker(engine, transfers, setup.transfer, setup.incarnation, setup.name, tracer)
    address = listen_address(
        setup.transfer.transport, setup.worker, setup.incarnation, setup.network.trusted_network
    )
    advertised = setup.worker.advertise_host
    limits = Limits(secret=setup.secret)
    listener = await transfers.run(
        listen(address, worker.receiver.serve, advertise_host=advertised, limits=limits)
    )
    worker.address = listener.address
    worker.service = Service(
        setup.worker, setup.stop, setup.incarnation, worker, engine, setup.secret, setup.network.discovery
    )
    engine.start(worker.on_step)
    try:
        await startup.serve_until_drained(worker.service, setup.worker)
    finally:
        engine.stop()
        await transfers.run(listener.close())
        transfers.close()
        if tracer is not None:
            tracer.close()


if __name__ == "__main__":
    sys.exit(startup.main("decode", serve))
