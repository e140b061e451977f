"""Keys, certificates, origins, and what the log does not tell."""

import logging
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from common.config import ConfigError, ProxyConfig
from proxy.served_model import ServedModel
from proxy.server import check_certificate
from tests.proxy.conftest import System, system_of
from tests.proxy.scripted import speaks
from tests.proxy.test_process import free_port, start, until_alive

BODY = {"prompt": "say", "max_tokens": 2}
ORIGIN = "https://pages.example"


async def status_with(system: System, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return (await system.client.post("/v1/completions", json=BODY, headers=headers)).status_code


async def test_keys_come_from_a_file_too(model: ServedModel, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\none\n\n  two  \n")
    async with system_of(model, ProxyConfig(api_key=("three",), api_key_file=str(path))) as system:
        await system.worker("decode", speaks(b"ok"))
        assert [await status_with(system, key) for key in ("one", "two", "three")] == [200] * 3
        assert [await status_with(system, key) for key in ("# of the team", "#", "four")] == [401] * 3


@pytest.mark.parametrize("content", [None, "", "# only a comment\n", "\n\n"])
def test_a_server_that_is_meant_to_be_closed_is_never_open(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        ProxyConfig(api_key_file=str(path)).all_keys()


async def test_pages_of_other_origins_are_refused_unless_they_are_allowed(
    system: System, model: ServedModel
) -> None:
    ask = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in (await system.client.get("/live", headers=ask)).headers
    config = ProxyConfig(allowed_origins=(ORIGIN,), api_key=("key",))
    async with system_of(model, config) as open_system:
        client = open_system.client
        asked = await client.options("/v1/completions", headers=ask)  # without a key, as browsers do
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        refused = await client.post("/v1/completions", json=BODY, headers={"Origin": ORIGIN})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        other = await client.get("/live", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_the_log_holds_neither_prompts_nor_keys(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with system_of(model, ProxyConfig(api_key=("sesame",))) as system:
        await system.worker("decode", speaks(b"answer"))
        headers = {"Authorization": "Bearer sesame", "X-Request-Id": "mine"}
        secret = {"prompt": "confidential", "max_tokens": 6, "seed": 1}
        for body in (secret, secret | {"stream": True}, secret | {"n": 0}, secret | {"guided_regex": "("}):
            await system.client.post("/v1/completions?user=hidden", json=body, headers=headers)
        await system.client.post(
            "/v1/completions", json=secret, headers={"Authorization": "Bearer wrong-key"}
        )
    ours = "\n".join(
        r.getMessage() for r in caplog.records if r.name.startswith(("proxy", "common", "uvicorn"))
    )
    assert "/v1/completions 200" in ours
    assert "'mine'" in ours
    for word in ("sesame", "wrong-key", "confidential", "answer", "hidden"):
        assert word not in ours


def certificate(directory: Path) -> tuple[str, str]:
    """Of this machine, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return str(certificate), str(key)


async def test_speaks_https_where_there_is_a_certificate(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    port = free_port()
    process = await start(
        "--port", str(port), "--control-port", str(free_port()), "--ssl-certfile", chain, "--ssl-keyfile", key
    )
    trust = ssl.create_default_context(cafile=chain)
    try:
        async with httpx.AsyncClient(
            base_url=f"https://localhost:{port}", verify=trust, timeout=60
        ) as client:
            await until_alive(process, client)
            assert (await client.get("/version")).status_code == 200
        async with httpx.AsyncClient(base_url=f"http://localhost:{port}") as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/live")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_is_told_by_name(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--ssl-certfile {path}"):
        check_certificate(ProxyConfig(ssl_certfile=os.fspath(path)))
