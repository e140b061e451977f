"""From what a user calls a model to files on this machine.

    smollm2-135m-instruct   the built-in default; fetched once into the cache directory
    path/to/directory       Hugging Face layout: config.json, tokenizer.json, *.safetensors
    path/to/file.gguf       its metadata is exported once into the cache directory, in that same layout
    organisation/name       a model of the Hugging Face hub, fetched into the hub's own cache

Imports neither torch nor numpy, and leaves what takes much memory to a process that ends: the proxy calls
this too.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import xxhash

from common.cache_directory import cache_directory, once
from common.config import DEFAULT_MODEL
from common.default_model import default_model_file
from common.model_config import ModelConfig, ModelError, read_json

EXPORT_VERSION = 2  # part of an export's key: raise it when the exported files change
EXPORT_TIMEOUT_S = 600.0
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED_FROM_HUB = ["*.json", "*.jinja", "*.safetensors"]
UNWANTED_FROM_HUB = ["consolidated*", "*/*"]  # the weights a second time, in other formats


@dataclass(frozen=True, slots=True)
class ModelFiles:
    name: str
    directory: Path  # config.json, tokenizer.json, tokenizer_config.json
    weights: tuple[Path, ...]  # safetensors files, or one GGUF file
    fingerprint: str  # equal on every host that has the same weights and the same configuration


def resolve(model: str) -> ModelFiles:
    """Find or fetch ``model``. ``ModelError`` when there is no such model or one that cannot be served."""
    if model == DEFAULT_MODEL:
        return gguf_files(DEFAULT_MODEL, default_model_file())
    path = Path(model).expanduser()
    if path.is_dir():
        return directory_files(path.resolve().name, path.resolve())
    if path.is_file() and path.suffix == ".gguf":
        return gguf_files(path.stem, path.resolve())
    if path.exists():
        raise ModelError(f"{model}: neither a model directory nor a .gguf file")
    if HUB_ID.fullmatch(model):
        return directory_files(model.rpartition("/")[2], hub_directory(model))
    raise ModelError(
        f"{model}: no such directory, .gguf file or hub id (the built-in model is {DEFAULT_MODEL})"
    )


def directory_files(name: str, directory: Path) -> ModelFiles:
    config = ModelConfig.load(directory)
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            f"{directory / 'tokenizer.json'}: no such file (the one tokenizer format that is read)"
        )
    weights = safetensors_files(directory)
    return ModelFiles(name, directory, weights, fingerprint(config, weights))


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    index = directory / "model.safetensors.index.json"
    whole = (
        directory / "model.safetensors"
    )  # some repositories hold the weights a second time, under other names
    if whole.is_file():
        return (whole,)
    if not index.is_file():
        found = tuple(sorted(directory.glob("*.safetensors")))
        if len(found) != 1:
            raise ModelError(
                f"{directory}: {len(found)} *.safetensors files and no {index.name}; one file or an index"
            )
        return found
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    found = tuple(directory / shard for shard in sorted(set(shards.values())))
    for path in found:
        if path.parent != directory or not path.is_file():
            raise ModelError(f"{path}: no such file, though {index.name} names it")
    return found


def gguf_files(name: str, path: Path) -> ModelFiles:
    key = f"{file_hash(path)}-{EXPORT_VERSION}"
    directory = once(cache_directory() / "gguf" / key, lambda target: export_gguf(path, target))
    config = ModelConfig.load(directory)
    return ModelFiles(name, directory, (path,), fingerprint(config, (path,)))


def export_gguf(path: Path, directory: Path) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "common.gguf_model", str(path), str(directory)]
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{path}: reading the metadata took over {EXPORT_TIMEOUT_S:.0f} s") from None
    if result.returncode:
        raise ModelError(result.stderr.strip() or f"{path}: reading the metadata failed")


def hub_directory(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, allow_patterns=WANTED_FROM_HUB, ignore_patterns=UNWANTED_FROM_HUB)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no such directory, and it could not be fetched from the hub: {error}"
        ) from error


def fingerprint(config: ModelConfig, weights: Iterable[Path]) -> str:
    digest = xxhash.xxh3_128(msgspec.json.encode(asdict(config), order="sorted"))
    for path in weights:
        digest.update(file_hash(path).encode())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """Hash of what is in ``path``; remembered by path, size and modification time, as large files take
    minutes."""
    status = path.stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    entry = cache_directory() / "hashes" / xxhash.xxh3_128(identity.encode()).hexdigest()
    return (once(entry, lambda target: write_hash(path, target)) / "hash").read_text()


def write_hash(path: Path, directory: Path) -> None:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    (directory / "hash").write_text(digest.hexdigest())
