"""Compiles ``csrc`` into one shared library, the first time it is needed.

The library's name in the cache directory (``BATON_CACHE_DIR``, or ``baton`` in the user's cache) is a hash of
the sources, the compiler and the options, so that it is rebuilt exactly when one of them changes. ``isa.c``
is compiled once for each instruction set; which of them runs is decided by the processor when the library is
loaded. ``python -m kernels.native`` does the same ahead of time; with the name of a directory it puts the
library there, where ``BATON_NATIVE_DIR`` lets it be found without a compiler."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

SOURCES = Path(__file__).parent / "csrc"
COMMON_FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
)
AVX512_FLAGS = (
    "-DISA_AVX512",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mavx512vnni",
    "-mfma",
    "-mf16c",
)
AVX512_BF16_FLAGS = ("-DISA_BF16", *AVX512_FLAGS, "-mavx512bf16")
X86_SETS = {
    "avx2": ("-DISA_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512_FLAGS,
    "avx512_bf16": AVX512_BF16_FLAGS,
    "amx": ("-DISA_AMX", *AVX512_BF16_FLAGS, "-mavx512fp16", "-mamx-tile", "-mamx-bf16"),
}
DIRECTORY_VARIABLE = "BATON_NATIVE_DIR"
FLAGS_VARIABLE = "BATON_NATIVE_CFLAGS"  # added to the others, for sanitizers and experiments
COMPILE_TIMEOUT_S = 600.0  # a busy small machine needs about one minute

logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """There is no library: no compiler, or it failed; the text says which and why."""


class Unit(NamedTuple):
    name: str
    source: str
    flags: tuple[str, ...]
    required: bool


def units() -> list[Unit]:
    sets = X86_SETS if platform.machine() in ("x86_64", "AMD64") else {}
    return [
        Unit("dispatch", "dispatch.c", (), True),
        Unit("pool", "pool.c", (), True),
        Unit("decoder", "decoder.c", (), True),
        Unit("portable", "isa.c", ("-DISA_NAME=portable",), True),
        *(Unit(name, "isa.c", (f"-DISA_NAME={name}", *flags), False) for name, flags in sets.items()),
    ]


@cache
def compiler() -> str:
    candidates = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("no C compiler found (cc, gcc or clang; CC names another)")
    return found


def library() -> Path:
    """The compiled library, made if it is not in the cache yet. ``BuildError`` when it cannot be made."""
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        return prepared(Path(directory))
    extra_flags = tuple(os.environ.get(FLAGS_VARIABLE, "").split())
    try:
        path = cache_directory() / f"kernels-{fingerprint(extra_flags)}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock", timeout=COMPILE_TIMEOUT_S):
                if not path.exists():
                    build(path, extra_flags)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"kernels cannot be compiled: {error}") from error
    return path


def prepared(directory: Path) -> Path:
    """The library that was made beforehand; its name tells of which sources: another one would crash."""
    path = directory / f"kernels-{source_hash()}.so"
    if not path.is_file():
        raise BuildError(f"{DIRECTORY_VARIABLE}={directory} has no kernels of this version ({path.name})")
    return path


def prepare(directory: Path) -> None:
    """Make what ``prepared`` finds. ``BuildError`` when it cannot be made."""
    directory.mkdir(parents=True, exist_ok=True)
    build(directory.absolute() / f"kernels-{source_hash()}.so", ())


def cache_directory() -> Path:
    chosen = os.environ.get("BATON_CACHE_DIR")
    parent = (
        Path(chosen).expanduser()
        if chosen
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "baton"
    )
    return parent.expanduser() / "native"


def fingerprint(extra_flags: tuple[str, ...]) -> str:
    version = subprocess.run(
        [compiler(), "--version"], check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S
    ).stdout
    digest = hashlib.sha256(version)
    digest.update(repr((COMMON_FLAGS, extra_flags, units(), platform.machine())).encode())
    digest.update(source_hash().encode())
    return digest.hexdigest()[:20]


def source_hash() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def build(path: Path, extra_flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as name:
        directory = Path(name)
        objects = compile_units(directory, extra_flags)
        whole = directory / path.name
        link = run([compiler(), "-shared", *extra_flags, "-o", str(whole), *objects, "-lpthread", "-lm"])
        if link is not None:
            raise BuildError(f"kernels cannot be linked: {link}")
        whole.rename(path)  # nobody ever sees half a library


def compile_units(directory: Path, extra_flags: tuple[str, ...]) -> list[str]:
    """Object files of the units. An instruction set that this compiler does not know is left out."""

    def compile_unit(unit: Unit) -> str | None:
        source, target = str(SOURCES / unit.source), str(directory / f"{unit.name}.o")
        return run([compiler(), *COMMON_FLAGS, *unit.flags, *extra_flags, "-c", source, "-o", target])

    with ThreadPoolExecutor(max_workers=2) as threads:
        failures = list(threads.map(compile_unit, units()))
    objects = []
    for unit, failure in zip(units(), failures, strict=True):
        if failure is None:
            objects.append(str(directory / f"{unit.name}.o"))
        elif unit.required:
            raise BuildError(f"kernels cannot be compiled: {failure}")
        else:
            logger.warning("%s compiles no %s kernels: %s", compiler(), unit.name, failure)
    return objects


def run(command: list[str]) -> str | None:
    """The first line that the compiler complains with, None when it succeeds."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return next(
        (line for line in lines if "error" in line), lines[0] if lines else f"exit code {done.returncode}"
    )
