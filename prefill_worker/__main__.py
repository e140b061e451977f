"""``python -m prefill_worker``: one prefill worker process."""

import sys

from common import gpu, startup
from common.loop_thread import LoopThread
from common.service import Service
from common.tracing import tracer_of
from prefill_worker.worker import PrefillWorker


async def serve(setup: startup.Setup) -> None:
    tracer = tracer_of(setup.trace, setup.role, setup.name)
    engine = startup.build_engine(setup)
    transfers = LoopThread("transfers")
    transfers.call(gpu.use_beside_steps, engine.cache.device)
    worker = PrefillWorker(
        engine, transfers, setup.transfer, setup.incarnation, setup.name, tracer, setup.secret
    )
    worker.service = Service(
        setup.worker, setup.stop, setup.incarnation, worker, engine, setup.secret, setup.network.discovery
    )
    engine.start(worker.on_step, worker.watch)
    try:
        await startup.serve_until_drained(worker.service, setup.worker)
    finally:
        engine.stop()
        await transfers.run(worker.close())
        transfers.close()
        if tracer is not None:
            tracer.close()


if __name__ == "__main__":
    sys.exit(startup.main("prefill", serve))
