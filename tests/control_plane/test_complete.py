"""``baton complete`` against a small HTTP server that answers with scripted events."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from control_plane import complete


@contextmanager
def server(answer: bytes, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every POST with ``answer``; its URL, and the requests it got."""
    seen: list[dict[str, Any]] = []

    class Scripted(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers.get("Authorization"), "body": body})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    socketserver.TCPServer.allow_reuse_address = True
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", seen
        finally:
            http.shutdown()
            thread.join()


def events(*chunks: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return (
        b": a comment\n\n"
        + b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
        + end
    )


def test_shows_the_text_of_a_completion(capsys: pytest.CaptureFixture[str]) -> None:
    answer = events(
        {"choices": [{"text": "Par"}]}, {"choices": [{"text": "is \u00e9"}]}, {"choices": [], "usage": {}}
    )
    with server(answer) as (url, seen):
        assert complete.main(["The capital is", "--url", url, "--max-tokens", "4", "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "Paris \u00e9\n"
    assert seen == [
        {
            "path": "/v1/completions",
            "key": "Bearer k",
            "body": {"model": "default", "max_tokens": 4, "stream": True, "prompt": "The capital is"},
        }
    ]


def test_shows_the_answer_of_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    answer = events(
        {"choices": [{"delta": {"role": "assistant"}}]}, {"choices": [{"delta": {"content": "Hi"}}]}
    )
    with server(answer) as (url, seen):
        assert complete.main(["Hello", "--chat", "--temperature", "0", "--url", url + "/"]) == 0
    assert capsys.readouterr().out == "Hi\n"
    assert seen[0]["path"] == "/v1/chat/completions"
    assert seen[0]["body"]["messages"] == [{"role": "user", "content": "Hello"}]
    assert seen[0]["body"]["temperature"] == 0


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (b'{"error": {"message": "no such model"}}', 404, "no such model (HTTP 404)"),
        (b"<html>", 502, "HTTP 502 Bad Gateway"),
        (events({"error": {"message": "worker lost"}}), 200, "worker lost"),
        (events({"choices": [{"text": "half"}]}, end=b""), 200, "the answer broke off"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], answer: bytes, status: int, message: str
) -> None:
    with server(answer, status) as (url, _):
        assert complete.main(["text", "--url", url]) == 1
    assert capsys.readouterr().err == f"baton complete: error: {message}\n"


def test_without_a_server_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with server(b"") as (url, _):
        pass
    assert complete.main(["text", "--url", url]) == 1
    assert "start one with: baton serve" in capsys.readouterr().err
