"""Random faults under load, for as long as you like: ``python -m tests.faults.chaos --seconds 600 --seed 1``.

Two prefill and two decode workers serve mixed requests while processes are killed and stopped and connections
are cut, altered, slowed and stalled. The last line of output sums up; the exit code is not 0 when a reply was
wrong, a request hung, or something was not given back.
"""

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tests.faults import schedule, tiny_model
from tests.faults.client import Client, Verdict
from tests.faults.cluster import POLL_S, Cluster, Usage
from tests.faults.load import Load, Mix, Score, draw_cases
from tests.faults.oracle import Case, Oracle
from tests.faults.relay import Faults
from tests.faults.schedule import Fault, Kind
from tests.faults.waiting import eventually

NUM_CASES = 150
RECOVERY_TIMEOUT_S = 60.0
QUIET_TIMEOUT_S = 60.0
FAULTS = {
    Kind.FLIP: Faults(flip_share=0.2, flip_from_bytes=40),
    Kind.FLIP_CONTROL: Faults(flip_share=0.05, flip_from_bytes=40),
    Kind.STALL_CONTROL: Faults(blackhole="stall"),
    Kind.SLOW: Faults(delay_s=0.05, jitter_s=0.1, bytes_per_s=2e6),
    Kind.STALL: Faults(blackhole="stall"),
}
# Growth of a process that is no leak: connections opened on first use, and memory the allocator keeps.
SLACK_FDS, SLACK_THREADS, SLACK_RSS_BYTES = 40, 8, 128 << 20


class Options(argparse.Namespace):
    seconds: float = 60.0
    seed: int = 0
    kill_every_s: float = 5.0
    others_every_s: float = 3.0
    num_clients: int = 8
    transport: str = "zmq"


@dataclass(slots=True)
class Result:
    score: Score
    num_faults: Counter[Kind]
    recoveries_s: list[float]
    leaks: list[str]

    @property
    def passed(self) -> bool:
        verdicts = self.score.verdicts
        return not (verdicts[Verdict.WRONG] or verdicts[Verdict.HUNG] or self.leaks)

    def line(self) -> str:
        verdicts, recoveries = self.score.verdicts, self.recoveries_s or [0.0]
        return (
            f"requests={self.score.num_requests} equal={verdicts[Verdict.EQUAL]}"
            f" errors={verdicts[Verdict.ERROR]} wrong={verdicts[Verdict.WRONG]} hung={verdicts[Verdict.HUNG]}"
            f" leaked={len(self.leaks)}"
            f" recovery_p50_s={median(recoveries):.1f} recovery_max_s={max(recoveries):.1f}"
        )


@dataclass(slots=True)
class Chaos:
    cluster: Cluster
    client: Client
    probe: Case
    num_faults: Counter[Kind] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)

    async def play(self, faults: Sequence[Fault]) -> None:
        """Each fault at its time; returns when all of them are over and healed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(began + fault.at_s - loop.time())
                tasks.create_task(self.strike(fault))

    async def strike(self, fault: Fault) -> None:
        self.num_faults[fault.kind] += 1
        cluster, name = self.cluster, fault.target
        match fault.kind:
            case Kind.KILL:
                await self._kill(name)
            case Kind.STOP:
                await self._stop(name, fault.lasts_s)
            case Kind.CUT:
                cluster.relays[name].cut("reset" if self.num_faults[Kind.CUT] % 2 else "close")
            case Kind.CUT_CONTROL:
                cluster.relays[f"{name}.control"].cut("reset")
            case Kind.SLOW | Kind.STALL | Kind.FLIP:
                await self._relay(name, fault)
            case Kind.FLIP_CONTROL | Kind.STALL_CONTROL:
                await self._relay(f"{name}.control", fault)

    async def _relay(self, name: str, fault: Fault) -> None:
        relay, faults = self.cluster.relays[name], FAULTS[fault.kind]
        relay.set(faults, faults)
        await asyncio.sleep(fault.lasts_s)
        relay.set()

    async def _kill(self, name: str) -> None:
        """Heals when the new process is known as ready and a request is served."""
        killed_at = time.monotonic()
        self.cluster.restart(name)
        pid = self.cluster[name].pid

        async def healed() -> bool:
            if self.cluster[name].pid != pid:
                return True  # killed again: that kill has its own clock
            worker = (await self.cluster.workers()).get(name)
            if worker is None or worker["pid"] != pid or worker["state"] != "ready":
                return False
            return (await self.client.complete(self.probe)).ok

        await eventually(healed, RECOVERY_TIMEOUT_S, f"{name} is back", POLL_S)
        if self.cluster[name].pid == pid:
            self.recoveries_s.append(time.monotonic() - killed_at)

    async def _stop(self, name: str, lasts_s: float) -> None:
        process = self.cluster[name]
        pid = process.pid
        self.cluster.stop(name)
        await asyncio.sleep(lasts_s)
        if process.pid == pid:
            self.cluster.cont(name)


def leaks(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """What processes hold more of than before."""
    found = []
    for name, usage in after.items():
        for what, slack in (
            ("num_fds", SLACK_FDS),
            ("num_threads", SLACK_THREADS),
            ("rss_bytes", SLACK_RSS_BYTES),
        ):
            was, now = getattr(before[name], what), getattr(usage, what)
            if now > was + slack:
                found.append(f"{name}: {what} {was} -> {now}")
    return found


async def run(options: Options, directory: Path) -> Result:
    model = tiny_model.write(directory / "model")
    oracle = Oracle(model)
    cluster = Cluster(
        directory / "logs",
        str(model),
        prefill=2,
        decode=2,
        options=["--num-blocks=256", "--max-num-seqs=16", "--max-model-len=1024"],
        transport=options.transport,
        relayed=options.transport == "zmq",
        relayed_control=True,
    )
    try:
        cluster.start()
        await cluster.ready()
        async with Client(cluster.url) as client:
            return await storm(options, cluster, client, oracle)
    finally:
        cluster.close()


async def storm(options: Options, cluster: Cluster, client: Client, oracle: Oracle) -> Result:
    mix = Mix()
    cases = draw_cases(options.seed, NUM_CASES, mix)
    oracle.references(cases)
    await warm_up(client, cases)
    await cluster.quiet()
    before = cluster.usage()
    kinds = schedule.OTHERS if options.transport == "zmq" else schedule.WITHOUT_RELAY
    faults = schedule.draw(
        options.seed,
        options.seconds,
        cluster.workers_named,
        options.kill_every_s,
        options.others_every_s,
        kinds,
    )
    chaos = Chaos(cluster, client, Case(tuple(b"are you there?"), 2))
    load = Load(client, oracle, cases, mix, options.num_clients, options.seed)
    ends_at = time.monotonic() + options.seconds
    await chaos.play(faults)
    await asyncio.sleep(ends_at - time.monotonic())
    score = await load.stop()
    held = await what_is_held(cluster)
    return Result(score, chaos.num_faults, chaos.recoveries_s, held or leaks(before, cluster.usage()))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that so large a ``share`` of them does not exceed; 0 of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else 0.0


async def warm_up(client: Client, cases: Sequence[Case]) -> None:
    for case in cases[:20]:
        await client.complete(case, stream=True)


async def what_is_held(cluster: Cluster) -> list[str]:
    """Blocks and places that do not come back."""
    try:
        await cluster.ready(RECOVERY_TIMEOUT_S)
        await cluster.quiet(QUIET_TIMEOUT_S)
    except AssertionError as error:
        return [str(error)]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="random faults under load")
    for name in ("seconds", "kill_every_s", "others_every_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Options, name))
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--num-clients", type=int, default=Options.num_clients)
    parser.add_argument("--transport", default=Options.transport)
    options = parser.parse_args(namespace=Options())
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        result = asyncio.run(run(options, Path(directory)))
        for text in (*result.score.examples, *result.leaks):
            print(text)
        faults = " ".join(
            f"{kind.value}={count}" for kind, count in sorted(result.num_faults.items(), key=str)
        )
        print(f"faults: {faults}; clients that left: {result.score.num_left}")
        print(
            f"recovery_p99_s={percentile(result.recoveries_s, 0.99):.1f} of {len(result.recoveries_s)} kills"
        )
        print(result.line(), flush=True)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
