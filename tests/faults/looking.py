"""What a cluster is doing, as its workers report it, or as the proxy knows at once."""

from collections.abc import Mapping

from tests.faults.cluster import Cluster
from tests.faults.waiting import eventually

SEEN_S = 20.0


async def load_of(cluster: Cluster, role: str) -> dict[str, Mapping[str, int]]:
    """Reports: a heartbeat old."""
    return {n: w["load"] for n, w in (await cluster.workers()).items() if w["role"] == role}


async def runs_on(cluster: Cluster, role: str) -> str:
    """A worker of this role that the proxy has given a request to, which it has not ended yet."""

    async def busy() -> str | None:
        workers = (await cluster.workers()).items()
        return next((name for name, w in workers if w["role"] == role and w["attempts"]), None)

    return str(await eventually(busy, SEEN_S, f"a {role} worker has work"))


async def receives(cluster: Cluster) -> str:
    """A decode worker that has a transfer under way."""

    async def receiving() -> str | None:
        loads = await load_of(cluster, "decode")
        return next((name for name, load in loads.items() if load["num_receiving"]), None)

    return str(await eventually(receiving, SEEN_S, "a decode worker receives"))


async def total(cluster: Cluster, counter: str, role: str) -> float:
    workers = (await cluster.workers()).values()
    return sum(float(worker["counters"].get(counter, 0)) for worker in workers if worker["role"] == role)


async def counters_of(cluster: Cluster, name: str) -> Mapping[str, float]:
    return dict((await cluster.workers())[name]["counters"])
