import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import option_docs, options
from common.config import (
    ALL_CONFIGS,
    ConfigError,
    EngineConfig,
    ProxyConfig,
    ServeConfig,
    TransferConfig,
    WorkerConfig,
)

ROOT = Path(__file__).parent.parent.parent


def load(
    cls: type[Any], argv: Sequence[str] = (), environment: Mapping[str, str] | None = None, role: str = ""
) -> Any:
    parser = options.command_line([cls], "test")
    return options.build(cls, options.collect(parser, argv, environment or {}, role))


def cluster_file(directory: Path, text: str) -> str:
    path = directory / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_without_anything_given_defaults_hold() -> None:
    for cls in ALL_CONFIGS:
        assert load(cls) == cls()


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, "max-num-seqs: 3\nblock-size: 8\ndtype: float16\n")
    environment = {"BATON_MAX_NUM_SEQS": "4", "BATON_BLOCK_SIZE": "32"}
    config = load(EngineConfig, ["--config", path, "--max-num-seqs", "5"], environment)
    assert (config.max_num_seqs, config.block_size, config.dtype) == (5, 32, "float16")
    assert config.max_waiting_seqs == EngineConfig().max_waiting_seqs


def test_a_section_of_the_file_holds_for_its_role_alone(tmp_path: Path) -> None:
    text = "max-num-seqs: 3\nprefill: {workers: 2, max-num-seqs: 7}\ndecode: {block-size: 32}\n"
    path = cluster_file(tmp_path, text)
    argv = ["--config", path]
    assert load(EngineConfig, argv, role="prefill").max_num_seqs == 7
    decode = load(EngineConfig, argv, role="decode")
    assert (decode.max_num_seqs, decode.block_size) == (3, 32)
    assert load(ServeConfig, argv).prefill == 2
    assert load(EngineConfig, [*argv, "--max-num-seqs", "9"], role="prefill").max_num_seqs == 9


def test_the_file_may_be_named_by_the_environment_and_give_just_a_number_of_workers(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, "prefill: 3\n")
    assert load(ServeConfig, environment={"BATON_CONFIG": path}).prefill == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 3", "max-num-seq in .* is no option"),
        ("prefill: {max-num-seq: 3}", r"prefill\.max-num-seq in .* is no option"),
        ("prefill: {port: 3}", r"prefill\.port in .* is no option of a process of that role"),
        ("proxy: {transfer-port: 3}", r"proxy\.transfer-port in .* is no option of a process of that role"),
        ("port:", "port in .* has no value"),
        ("- 1", "must hold options by name"),
        ("a: [", "is not YAML"),
        ("port: 1\nport: 2", "'port' in line 2 of .* is there twice"),
        ("prefill: {workers: 1, workers: 2}", "'workers' in line 1 of .* is there twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs in .* is there twice"),
        ("port: [1, 2]", "--port: expected one value"),
        ("port: many", "--port: expected a whole number, not 'many' in "),
    ],
)
def test_a_bad_cluster_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ProxyConfig, ["--config", cluster_file(tmp_path, text)])


def test_a_missing_cluster_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read nowhere\.yaml"):
        load(ProxyConfig, ["--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("cls", "argv", "message"),
    [
        (EngineConfig, ["--max-num-seqs", "many"], "--max-num-seqs: expected a whole number, not 'many'"),
        (EngineConfig, ["--max-num-seqs", "1e3"], "--max-num-seqs: expected a whole number"),
        (EngineConfig, ["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (EngineConfig, ["--max-num-seqs"], "--max-num-seqs: expected one argument"),
        (EngineConfig, ["--dtype", "int3"], "--dtype: expected one of auto, float32, bfloat16, float16"),
        (
            EngineConfig,
            ["--kv-cache-memory-bytes", "lots"],
            "--kv-cache-memory-bytes: expected a number of bytes",
        ),
        (TransferConfig, ["--stall-timeout-s", "nan"], "--stall-timeout-s: expected a number"),
        (TransferConfig, ["--stall-timeout-s", "inf"], "--stall-timeout-s: expected a number"),
        (WorkerConfig, ["--cores", "0-x"], "--cores: expected numbers or ranges"),
        (WorkerConfig, ["--cores", "0,5-2"], "--cores: expected the lower number first, not '5-2'"),
        (ProxyConfig, ["--port", "7000"], "--control-port must be another than --port, 7000"),
        (
            WorkerConfig,
            ["--proxies", "a:7000"],
            "--proxies must be addresses such as tcp://host:7000, not 'a:7000'",
        ),
        (ProxyConfig, ["--port", "70000"], "--port must lie in 0..65535"),
        (ProxyConfig, ["--prot", "1"], r"unknown option --prot \(did you mean --port\?\)"),
        (ProxyConfig, ["--por", "1"], "unknown option --por"),
        (ProxyConfig, ["stray"], "unexpected argument stray"),
    ],
)
def test_a_bad_command_line_is_refused_by_name(cls: type[Any], argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(cls, argv)


def test_a_bad_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--port: expected a whole number, not 'x' from BATON_PORT"):
        load(ProxyConfig, environment={"BATON_PORT": "x"})
    with pytest.raises(
        ConfigError, match="--checksums: expected true or false, not 'maybe' from BATON_CHECKSUMS"
    ):
        load(TransferConfig, environment={"BATON_CHECKSUMS": "maybe"})


def test_a_variable_that_matches_no_option_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(
            EngineConfig,
            environment={"BATON_PROT": "1", "BATON_PORT": "1", "BATON_CACHE_DIR": "x", "PATH": ""},
        )
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable BATON_PROT matches no option (did you mean BATON_PORT?)"
    ]


def test_switches_lists_and_sizes_read_as_people_write_them() -> None:
    assert load(TransferConfig, ["--no-checksums"]).checksums is False
    assert load(TransferConfig, ["--checksums"], {"BATON_CHECKSUMS": "false"}).checksums is True
    assert load(WorkerConfig, ["--cores", "0-2,5", "--cores=7"]).cores == (0, 1, 2, 5, 7)
    assert load(WorkerConfig, environment={"BATON_PROXIES": "tcp://a:1, tcp://b:2"}).proxies == (
        "tcp://a:1",
        "tcp://b:2",
    )
    assert load(EngineConfig, ["--kv-cache-memory-bytes", "1.5GiB"]).kv_cache_memory_bytes == 3 << 29
    assert load(EngineConfig, ["--kv-cache-memory-bytes", "2GB"]).kv_cache_memory_bytes == 2 * 10**9


def test_a_list_in_the_file_is_a_yaml_list(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, "cores: [1, 2]\nchecksums: no\n")
    assert load(WorkerConfig, ["--config", path]).cores == (1, 2)
    assert load(TransferConfig, ["--config", path]).checksums is False


def test_the_model_may_be_given_by_position_once() -> None:
    parser = options.command_line([EngineConfig], "test", positional="model")
    assert options.build(EngineConfig, options.collect(parser, ["a.gguf"], {})).model == "a.gguf"
    assert options.build(EngineConfig, options.collect(parser, ["--check-invariants", "b"], {})).model == "b"
    with pytest.raises(ConfigError, match="both name the model"):
        options.collect(parser, ["a.gguf", "--model", "b.gguf"], {})


words = st.text(alphabet=st.characters(categories=("L", "N", "P", "S"), exclude_characters=","), min_size=1)
engines = st.builds(
    EngineConfig,
    model=words,
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    max_num_seqs=st.integers(1, 10**9),
    kv_cache_memory_bytes=st.integers(0, 10**17),
    enable_prefix_caching=st.booleans(),
)
workers = st.builds(
    WorkerConfig,
    proxies=st.lists(st.integers(1, 65535).map("tcp://a-host:{}".format), min_size=1).map(tuple),
    cores=st.lists(st.integers(0, 9999)).map(tuple),
    heartbeat_interval_s=st.floats(min_value=1e-6, max_value=1e9),
)


@settings(max_examples=50, deadline=None)
@given(engine=engines, worker=workers)
def test_a_child_builds_what_its_parent_had(engine: EngineConfig, worker: WorkerConfig) -> None:
    parser = options.command_line((EngineConfig, WorkerConfig), "test")
    collected = options.collect(parser, options.to_argv(engine, worker), {})
    assert options.build(EngineConfig, collected) == engine
    assert options.build(WorkerConfig, collected) == worker


def test_secrets_reach_a_child_by_environment_and_not_by_command_line() -> None:
    config = ProxyConfig(api_key=("secret-1", "secret-2"), port=9000)
    argv = options.to_argv(config)
    assert argv == ["--port=9000"]
    assert load(ProxyConfig, argv, options.to_environment(config)) == config


def test_a_process_that_cannot_work_says_one_line_and_ends_with_code_2() -> None:
    program = "from common import config, options; options.parse((config.ProxyConfig,), prog='proxy')"
    for argv in (["--port", "x"], ["--max-attempts", "0"], ["--nonsense"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("proxy: error: ")
        assert argv[0] in done.stderr
        assert done.stderr.count("\n") == 1


def test_help_describes_every_option() -> None:
    text = options.command_line(ALL_CONFIGS, "test").format_help()
    for cls in ALL_CONFIGS:
        for field in fields(cls):
            assert "--" + field.name.replace("_", "-") in text


def test_the_page_in_the_docs_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == option_docs.page(), (
        "run: python -m common.option_docs > docs/configuration.md"
    )
