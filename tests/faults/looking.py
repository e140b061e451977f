"""What a cluster is doing, as its workers report it."""

from collections.abc import Mapping

from tests.faults.cluster import Cluster
from tests.faults.waiting import eventually


async def load_of(cluster: Cluster, role: str) -> dict[str, Mapping[str, int]]:
    return {n: w["load"] for n, w in (await cluster.workers()).items() if w["role"] == role}


async def runs_on(cluster: Cluster, role: str, within_s: float = 20.0) -> str:
    """The worker of this role that has a sequence."""

    async def busy() -> str | None:
        loads = await load_of(cluster, role)
        return next((n for n, load in loads.items() if load["num_running"] or load["num_waiting"]), None)

    return str(await eventually(busy, within_s, f"a {role} worker has work"))


async def total(cluster: Cluster, counter: str, role: str) -> float:
    workers = (await cluster.workers()).values()
    return sum(float(worker["counters"].get(counter, 0)) for worker in workers if worker["role"] == role)


async def runs_or_receives(cluster: Cluster, role: str) -> None:
    async def busy() -> bool:
        loads = (await load_of(cluster, role)).values()
        return any(load["num_running"] or load["num_receiving"] or load["num_waiting"] for load in loads)

    await eventually(busy, 20.0, f"a {role} worker has work")


async def counters_of(cluster: Cluster, name: str) -> Mapping[str, float]:
    return dict((await cluster.workers())[name]["counters"])
