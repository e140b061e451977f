"""The cluster file: options in YAML, with sections for single roles.

model: smollm2-135m-instruct
max-model-len: 4096
prefill:
  workers: 2                      # how many of them baton serve starts; so in proxy and decode
  max-num-batched-tokens: 2048
decode:
  max-num-seqs: 128
"""

from pathlib import Path
from typing import Any

import yaml

from common.config import ALL_CONFIGS, ConfigError, ProxyConfig, ServeConfig, TransferConfig, WorkerConfig
from common.option_values import options_of

# The roles, and what no process of theirs takes.
ROLES: dict[str, tuple[type, ...]] = {
    "proxy": (TransferConfig, WorkerConfig, ServeConfig),
    "prefill": (ProxyConfig, ServeConfig),
    "decode": (ProxyConfig, ServeConfig),
}


def load(path: str, role: str = "") -> dict[str, Any]:
    """Options for a process of ``role`` by field name; without a role those outside all sections."""
    document = _read(path)
    parts = {key: value for key, value in document.items() if key in ROLES and isinstance(value, dict)}
    values = _named(path, {key: value for key, value in document.items() if key not in parts})
    sections = {key: _named(path, value, key) for key, value in parts.items()}
    for name, section in sections.items():
        if "workers" in section:
            values["proxy_workers" if name == "proxy" else name] = section.pop("workers")
    return values | sections.get(role, {})


def _read(path: str) -> dict[Any, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.safe_load(text)
        _check_keys(path, yaml.compose(text, yaml.SafeLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {path} is not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config: {path} must hold options by name")
    return document


def _check_keys(path: str, document: yaml.Node) -> None:
    """Of two values of one key YAML's reader takes the last, without a word."""
    if not isinstance(document, yaml.MappingNode):
        return
    for part in (document, *(value for _, value in document.value if isinstance(value, yaml.MappingNode))):
        keys = [key for key, _ in part.value]
        for index, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:index]]:
                where = f"line {key.start_mark.line + 1} of {path}"
                raise ConfigError(f"--config: {key.value!r} in {where} is there twice")


def _named(path: str, options: dict[Any, Any], section: str = "") -> dict[str, Any]:
    """Keys as field names; a key that is no option there, or has no value, is refused."""
    known = options_of(ALL_CONFIGS)
    named = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        where = f"{section}.{key}" if section else str(key)
        if name not in known and not (name == "workers" and section):
            raise ConfigError(f"--config: {where} in {path} is no option")
        if value is None:
            raise ConfigError(f"--config: {where} in {path} has no value")
        if section and name in options_of(ROLES[section]):
            raise ConfigError(f"--config: {where} in {path} is no option of a process of that role")
        if name in named:
            raise ConfigError(f"--config: {where} in {path} is there twice, once with - and once with _")
        named[name] = value
    return named
