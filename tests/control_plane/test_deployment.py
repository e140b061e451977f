import contextlib
import os
from pathlib import Path

import pytest

from common import cores, options
from common.config import ConfigError, EngineConfig, ProxyConfig, TransferConfig, WorkerConfig
from control_plane import deployment
from control_plane.child import Command
from control_plane.commands import commands as build_commands
from control_plane.forking import nurseries
from control_plane.serve import with_ports


def commands(*argv: str, environment: dict[str, str] | None = None) -> dict[str, Command]:
    plan = deployment.read(argv, environment or {})
    return {command.name: command for command in build_commands(plan, environment or {})}


def module(command: Command) -> str:
    return command.argv[command.argv.index("-m") + 1]


def parsed(
    command: Command,
) -> tuple[EngineConfig, TransferConfig, WorkerConfig]:
    """The options as the worker itself will read them."""
    argv = command.argv[command.argv.index("-m") + 2 :]
    return options.parse((EngineConfig, TransferConfig, WorkerConfig), argv)


def test_by_default_one_proxy_one_prefill_and_one_decode_worker() -> None:
    found = commands()
    assert {name: module(command) for name, command in found.items()} == {
        "proxy": "proxy",
        "prefill-0": "prefill_worker",
        "decode-0": "decode_worker",
    }
    assert next(iter(found)) == "proxy"
    assert found["proxy"].stage < found["prefill-0"].stage == found["decode-0"].stage


def test_workers_share_a_nursery_when_they_have_equally_many_threads() -> None:
    found = commands("--prefill", "2", "--decode", "2", f"--cores={cores.allowed()[0]}")
    [nursery] = nurseries(found.values())
    assert nursery.clients == set(found) - {"proxy"}
    assert nursery.modules == ("prefill_worker", "decode_worker")


def test_numbers_of_workers_are_options() -> None:
    assert set(commands("--prefill", "2", "--decode=3")) == {
        "proxy",
        *(f"prefill-{index}" for index in range(2)),
        *(f"decode-{index}" for index in range(3)),
    }


def test_colocated_has_no_prefill_workers() -> None:
    assert set(commands("--colocated", "--prefill", "2")) == {"proxy", "decode-0"}
    assert set(commands("--prefill", "0")) == {"proxy", "decode-0"}


def test_workers_get_cores_of_their_own_and_as_many_threads() -> None:
    allowed = cores.allowed()
    found = commands()
    shares = [parsed(found[name])[2].cores for name in ("prefill-0", "decode-0")]
    assert sorted({core for share in shares for core in share}) == sorted(allowed)
    if len(allowed) > 1:
        assert not set(shares[0]) & set(shares[1])
    for name, share in zip(("prefill-0", "decode-0"), shares, strict=True):
        assert found[name].environment["OMP_NUM_THREADS"] == str(len(share))
        assert found[name].cores == share
    assert commands("--colocated")["decode-0"].cores == allowed
    assert found["proxy"].cores == ()


def test_the_cores_to_share_may_be_given() -> None:
    core = cores.allowed()[0]
    found = commands("--cores", str(core))
    assert found["prefill-0"].cores == found["decode-0"].cores == (core,)
    with pytest.raises(ConfigError, match="--cores: this process may not use 4711"):
        commands("--cores", "4711")


def test_roles_may_have_cores_of_their_own(tmp_path: Path) -> None:
    first, *rest = cores.allowed()
    path = tmp_path / "cluster.yaml"
    path.write_text(f"prefill: {{cores: {first}}}\n")
    found = commands("--config", str(path), "--decode", "2")
    assert found["prefill-0"].cores == (first,)
    decoding = {core for index in range(2) for core in found[f"decode-{index}"].cores}
    assert decoding == (set(rest) or {first})


def test_workers_are_told_their_name_and_their_proxy() -> None:
    _, _, worker = parsed(commands("--control-port", "7123", "--control-host", "0.0.0.0")["decode-0"])
    assert worker.name == "decode-0"
    assert worker.proxies == ("tcp://127.0.0.1:7123",)
    _, _, worker = parsed(commands("--name", "left", "--control-host", "::1")["left-decode-0"])
    assert worker.name == "left-decode-0"
    assert worker.proxies == ("tcp://[::1]:7000",)


def test_engine_and_transfer_options_reach_every_worker() -> None:
    found = commands("some/model", "--dtype", "float32", "--transport=zmq", "--no-checksums")
    for name in ("prefill-0", "decode-0"):
        engine, transfer, _ = parsed(found[name])
        assert (engine.model, engine.dtype) == ("some/model", "float32")
        assert (transfer.transport, transfer.checksums) == ("zmq", False)
    assert "--model=some/model" in found["proxy"].argv


def test_a_cluster_file_scales_and_configures_each_role(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "max-num-seqs: 16\n"
        "prefill: {workers: 2, max-num-batched-tokens: 2048}\n"
        "decode: {max-num-seqs: 128}\n"
        "proxy: {port: 9000}\n"
    )
    found = commands("--config", str(path))
    assert set(found) == {"proxy", "prefill-0", "prefill-1", "decode-0"}
    prefill, decode = parsed(found["prefill-1"])[0], parsed(found["decode-0"])[0]
    assert (prefill.max_num_batched_tokens, prefill.max_num_seqs) == (2048, 16)
    assert (decode.max_num_batched_tokens, decode.max_num_seqs) == (
        EngineConfig().max_num_batched_tokens,
        128,
    )
    assert "--port=9000" in found["proxy"].argv


def test_children_do_not_read_options_from_the_environment_again() -> None:
    """The command line beats the environment, also when it gives a default value back."""
    environment = {
        "BATON_MAX_NUM_SEQS": "3",
        "BATON_DTYPE": "float32",
        "BATON_API_KEY": "secret",
        "BATON_CACHE_DIR": "/cache",
        "BATON_UNKNOWN": "x",
        "PATH": os.environ["PATH"],
    }
    default = str(EngineConfig().max_num_seqs)
    found = commands("--max-num-seqs", default, environment=environment)
    worker = found["prefill-0"]
    assert {name for name in worker.environment if name.startswith("BATON_")} == {"BATON_CACHE_DIR"}
    assert parsed(worker)[0] == EngineConfig(dtype="float32")
    assert found["proxy"].environment["BATON_API_KEY"] == "secret"
    assert not any("secret" in word for command in found.values() for word in command.argv)


def test_several_workers_cannot_share_one_fixed_transfer_port() -> None:
    with pytest.raises(ConfigError, match="--transfer-port: 2 decode workers cannot share port 7001"):
        commands("--prefill=0", "--decode=2", "--transfer-port=7001")


def test_a_port_may_be_found_out_beforehand() -> None:
    assert deployment.read([], {}).control_port_given is False
    assert deployment.read(["--control-port", "7000"], {}).control_port_given is True
    assert deployment.read([], {"BATON_CONTROL_PORT": "7000"}).control_port_given is True
    assert deployment.read([], {}).proxy == ProxyConfig()


def test_workers_must_speak_more_often_than_the_proxy_listens() -> None:
    with pytest.raises(
        ConfigError, match=r"--dead-after-s: 0\.3 is less than two --heartbeat-interval-s of 0\.5"
    ):
        commands("--dead-after-s", "0.3")
    with pytest.raises(
        ConfigError, match=r"--dead-after-s: 2 is less than two --heartbeat-interval-s of 1\.5"
    ):
        commands("--heartbeat-interval-s", "1.5")
    assert commands("--dead-after-s", "0.3", "--heartbeat-interval-s", "0.1")


def test_several_proxies_share_the_port_of_clients_and_have_control_ports_of_their_own() -> None:
    found = commands("--proxy-workers", "2", "--port", "8100", "--control-port", "7100")
    assert {name for name in found if name.startswith("proxy")} == {"proxy-0", "proxy-1"}
    for index in range(2):
        argv = found[f"proxy-{index}"].argv
        assert "--port=8100" in argv
        assert f"--control-port={7100 + index}" in argv
    for name in ("prefill-0", "decode-0"):
        assert parsed(found[name])[2].proxies == ("tcp://127.0.0.1:7100", "tcp://127.0.0.1:7101")
    with pytest.raises(ConfigError, match="--port: 2 proxies can only share a port that is given"):
        commands("--proxy-workers", "2", "--port", "0")
    with pytest.raises(ConfigError, match="--proxy-workers must be at least 1"):
        commands("--proxy-workers", "0")


def test_the_cluster_file_says_how_many_proxies_there_are(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("proxy: {workers: 3}\n")
    assert len(deployment.read(["--config", str(path)], {}).proxies) == 3


def test_ports_of_several_proxies_are_found_and_told_to_all() -> None:
    plan = deployment.read(["--proxy-workers", "2"], {})
    with contextlib.ExitStack() as claims:
        first, second = with_ports(plan, claims)
    assert first.port == second.port
    assert first.sibling_ports == second.sibling_ports == (first.own_port, second.own_port)
    assert len({first.control_port, second.control_port, first.own_port, second.own_port}) == 4


def test_port_0_is_replaced_by_a_free_port_that_can_be_told() -> None:
    plan = deployment.read(["--port", "0"], {})
    with contextlib.ExitStack() as claims:
        (proxy,) = with_ports(plan, claims)
    assert proxy.port not in (0, proxy.control_port)


def test_with_an_etcd_workers_are_told_of_no_proxy_and_all_processes_of_it() -> None:
    found = commands("--discovery", "etcd://e:2379/x", "--proxy-workers", "2")
    assert not any(word.startswith("--proxies") for word in found["decode-0"].argv)
    assert all("--discovery=etcd://e:2379/x" in command.argv for command in found.values())
