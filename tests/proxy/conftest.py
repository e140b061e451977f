import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from common.channel import WorkerChannel
from common.chat_template import ChatTemplate
from common.config import ProxyConfig
from common.grammar import Grammars
from common.messages import Role
from common.tokenizer import Tokenizer, byte_alphabet, bytes_of_tokens
from proxy.app import build_app
from proxy.frontend import Frontend
from proxy.served_model import ServedModel
from proxy.server import build
from tests.proxy.scripted import MODEL, WAIT_S, Script, ScriptedWorker, running

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 256  # a special token


def byte_tokenizer() -> Tokenizer:
    """Token 65 is the byte 65, so that tests can write tokens as bytes, and characters split over tokens."""
    alphabet = byte_alphabet()
    library = tokenizers.Tokenizer(models.BPE(vocab=dict(alphabet), merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    return Tokenizer(library, bytes_of_tokens(library, Path("bytes")), {"eos_token": "<end>"})


@pytest.fixture(scope="session")
def model() -> ServedModel:
    tokenizer = byte_tokenizer()
    return ServedModel(
        name="tiny",
        names=frozenset({"tiny", "default"}),
        fingerprint=MODEL.fingerprint,
        tokenizer=tokenizer,
        template=ChatTemplate({"default": TEMPLATE}, {}),
        vocab_size=MODEL.vocab_size,
        max_model_len=MODEL.max_model_len,
        longest_token=5,
        grammars=Grammars.of(tokenizer, MODEL.vocab_size, [END]),
    )


class System:
    """A proxy over real sockets, and the workers that tests give it."""

    def __init__(
        self, frontend: Frontend, control: str, client: httpx.AsyncClient, stack: AsyncExitStack
    ) -> None:
        self.frontend = frontend
        self.control = control
        self.client = client
        self._stack = stack

    async def worker(self, role: Role, script: Script | None = None, **status: object) -> ScriptedWorker:
        """Started, and welcome."""
        worker = await self.start_worker(role, script, **status)
        await worker.until(lambda: worker.is_welcome)
        return worker

    async def start_worker(
        self, role: Role, script: Script | None = None, **status: object
    ) -> ScriptedWorker:
        return await self._stack.enter_async_context(
            running(ScriptedWorker(self.control, role, script, **status))
        )

    async def stream(self, body: dict[str, Any], seen: asyncio.Event) -> None:
        """A completion, of which the client says when it has ``seen`` the first token."""
        async with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    seen.set()

    async def settled(self) -> None:
        """Nothing is under way any more; fails when something stays."""
        async with asyncio.timeout(WAIT_S):
            while self.frontend.dispatcher.num_attempts or self.frontend.admission.num_admitted:
                await asyncio.sleep(0.01)
        assert not any(worker.charges for worker in self.frontend.registry)


@asynccontextmanager
async def system_of(model: ServedModel, config: ProxyConfig) -> AsyncIterator[System]:
    channel = WorkerChannel("tcp://127.0.0.1:0")
    frontend = build(config, model, channel)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(frontend),
            lifespan="off",
            log_config=None,
            access_log=False,
            http="httptools",
            ws="none",
        )
    )
    tasks = [
        asyncio.create_task(frontend.dispatcher.run()),
        asyncio.create_task(server.serve(sockets=[listener])),
    ]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client, AsyncExitStack() as stack:
            system = System(frontend, channel.address, client, stack)
            yield system
            await system.settled()
    finally:
        server.should_exit = True
        await asyncio.wait_for(tasks[1], WAIT_S)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        channel.close()


@pytest.fixture
async def system(model: ServedModel) -> AsyncIterator[System]:
    async with system_of(model, ProxyConfig()) as system:
        yield system
