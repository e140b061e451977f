"""What an engine with an HTTP API of its own looks like to a router: streams without a model.

    python -m benchmarks.http_source PORT TOKENS_PER_S

The peer of ``benchmarks.token_source`` for routers that stand in front of whole servers.
"""

import asyncio
import json
import sys

import uvloop

CHUNK = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"default",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
MODELS = b'{"object":"list","data":[{"id":"default","object":"model","created":1,"owned_by":"x"}]}'


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, interval_s: float) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            body = await reader.readexactly(int(fields.get("content-length", "0")))
            if head.startswith("POST") and body:
                await stream(writer, int(json.loads(body).get("max_tokens") or 1), interval_s)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def stream(writer: asyncio.StreamWriter, num_tokens: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    writer.write(STREAM_HEAD)
    due = loop.time()
    for _ in range(num_tokens):
        writer.write(chunked(CHUNK))
        await writer.drain()
        due += interval_s
        await asyncio.sleep(max(0.0, due - loop.time()))
    writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main() -> None:
    interval_s = 1 / float(sys.argv[2]) if float(sys.argv[2]) else 0.0
    server = await asyncio.start_server(lambda r, w: serve(r, w, interval_s), "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
