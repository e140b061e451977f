"""A proxy and workers, each on a node of its own, that share a secret, and somebody who asks them."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from common.secret import Secret
from tests.faults.client import Client, Reply, Verdict, body_of, events, judge, take_object
from tests.faults.cluster import POLL_S, Cluster
from tests.faults.oracle import Case, Oracle
from tests.faults.support import cases
from tests.faults.waiting import eventually
from tests.netns.network import Network

OPTIONS = (
    "--num-blocks=512",
    "--max-model-len=1024",
    "--max-num-batched-tokens=128",
    "--max-num-seqs=16",
    "--piece-bytes=16384",  # one block
    "--heartbeat-interval-s=0.1",
)
# Whoever has least to do is taken: measured links do not decide who is.
PROXY_OPTIONS = ("--worker-wait-s=15", "--router-policy=least_loaded")
PAIRS = (("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2"))
NOTICED_WITHIN_S = 20.0
USED_WITHIN_S = 60.0
NUM_CASES = 60


PAIR = re.compile(r"prefill=(\S+) decode=(\S+)")


class Told(NamedTuple):
    case: Case
    reply: Reply
    verdict: Verdict
    route: str  # whom the proxy chose first
    workers: tuple[str, ...]  # who sampled the last token of each chunk

    @property
    def pair(self) -> tuple[str, ...]:
        found = PAIR.search(self.route)
        return found.groups() if found else ()

    @property
    def everyone(self) -> set[str]:
        return {*self.pair, *self.workers}

    @property
    def stayed(self) -> bool:
        """Right, and all of it by whom it was first given to."""
        return self.verdict is Verdict.EQUAL and set(self.workers) <= set(self.pair)


class Town:
    def __init__(self, directory: Path, oracle: Oracle, model: Path) -> None:
        self.oracle = oracle
        self._secret = directory / "baton.secret"
        Secret.new().save(str(self._secret))
        self.network = Network()
        self.cluster = Cluster(
            directory, str(model), 2, 2, OPTIONS, proxy_options=PROXY_OPTIONS, placed=self._placed
        )
        self.cluster.url = f"http://{self.network.home('proxy').address}:{self.cluster.http_port}"

    def _placed(self, name: str, argv: list[str]) -> list[str]:
        home, proxy = self.network.home(name), self.network.home("proxy")
        argv = [word.replace("tcp://127.0.0.1:", f"tcp://{proxy.address}:") for word in argv]
        if name == "proxy":
            addresses = [f"--host={home.address}", f"--control-host={home.address}"]
        else:
            addresses = ["--bind-host=0.0.0.0", f"--advertise-host={home.address}"]
        inside = ["-m", "tests.netns.inside", home.namespace]
        return [*inside, *argv[1:], *addresses, f"--secret-file={self._secret}"]

    def close(self) -> None:
        self.cluster.close()
        self.network.close()

    def move(self, name: str) -> str:
        """The worker starts again where its node has another address, which is returned."""
        process = self.cluster[name]
        process.kill()
        old, new = self.network.home(name), self.network.move(name)
        process.argv = [word.replace(f"={old.address}", f"={new.address}") for word in process.argv]
        process.start()
        return new.address

    async def knows(self, name: str) -> bool:
        """Whether the proxy would give this worker something to do."""
        worker = (await self.cluster.workers()).get(name)
        return worker is not None and worker["state"] == "ready"

    async def loses(self, name: str) -> None:
        async def lost() -> bool:
            return not await self.knows(name)

        await eventually(lost, NOTICED_WITHIN_S, f"{name} is missed", POLL_S)


class Visitor:
    """Somebody who asks, and remembers what the town said."""

    def __init__(self, town: Town, client: Client) -> None:
        self._town = town
        self._client = client
        self.told: list[Told] = []

    async def ask(self, asked: Case) -> Told:
        reply, workers = Reply(), list[str]()
        body = body_of(asked, stream=True) | {"return_workers": True}
        route = ""
        try:
            async with (
                asyncio.timeout(self._client.timeout_s),
                self._client.http.stream("POST", "/v1/completions", json=body) as response,
            ):
                reply.status, route = response.status_code, response.headers.get("X-Baton-Route", "")
                if reply.status != 200:
                    take_object(reply, json.loads(await response.aread()))
                async for event in events(response):
                    take_object(reply, event)
                    workers += [choice["worker"] for choice in event.get("choices", ()) if "worker" in choice]
        except TimeoutError:
            reply.hung = True
        except httpx.TransportError as error:
            reply.error = f"{type(error).__name__}: {error}"
        verdict = judge(reply, self._town.oracle.reference(asked))
        self.told.append(Told(asked, reply, verdict, route, tuple(dict.fromkeys(workers))))
        return self.told[-1]

    @asynccontextmanager
    async def asking(self, seed: int, at_once: int = 6) -> AsyncIterator[None]:
        """One request after the other, ``at_once`` at a time, for as long as the block lasts; all are over
        when it ends."""
        wanted = cases(NUM_CASES, (100, 600), 40, seed)
        self._town.oracle.references(wanted)
        going_on, turn = True, itertools.cycle(wanted)

        async def ask_on() -> None:
            while going_on:
                await self.ask(next(turn))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(ask_on())
            try:
                yield
            finally:
                going_on = False

    async def is_told(self, more: int) -> None:
        """So many more answers come."""
        enough = len(self.told) + more
        await eventually(lambda: len(self.told) >= enough, USED_WITHIN_S, f"{more} more answers", POLL_S)

    async def meets(self, *pairs: tuple[str, str], seed: int) -> None:
        """Each of these pairs serves, sooner or later, and all that is said meanwhile is right."""
        left, seeds = set(pairs), itertools.count(seed)

        async def met() -> bool:
            wanted = cases(8, (40, 90), 4, next(seeds))
            self._town.oracle.references(wanted)
            told = await asyncio.gather(*(self.ask(each) for each in wanted))
            left.difference_update(each.pair for each in told if each.stayed)
            return not left

        await eventually(met, USED_WITHIN_S, f"{pairs} serve", POLL_S)


def assert_equal(told: Sequence[Told]) -> None:
    assert all(each.verdict is Verdict.EQUAL for each in told), describe(told)


def assert_others_undisturbed(told: Sequence[Told], *names: str) -> None:
    """What had nothing to do with these workers, or with all but one of them: right, and it stayed where it
    was. The rest: right, or one clear error."""
    allowed = (Verdict.EQUAL, Verdict.ERROR)
    assert all(each.verdict in allowed for each in told), describe(told)
    others = [each for each in told if not each.everyone.issuperset(names)]
    assert others and all(each.stayed for each in others), describe(others)


def describe(told: Sequence[Told]) -> str:
    return "\n".join(
        f"{each.verdict.value}: by {' '.join(each.workers) or 'nobody'}, {each.route}; {each.reply.status}"
        f" {each.reply.error!r}, {len(each.reply.token_ids)} of {each.case.max_tokens} tokens"
        for each in told
        if not each.stayed
    )
