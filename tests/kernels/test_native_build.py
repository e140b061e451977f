"""How the kernels in C come to be: once, from the sources as they are, or not at all and with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 100.0
AVAILABLE = "from kernels import native; print(native.available())"
LIBRARY = "from kernels.native import build; print(build.library())"
PREPARE = "import sys, pathlib; from kernels.native import build; build.prepare(pathlib.Path(sys.argv[1]))"

# Stands for a compiler: writes a line for each object and each library that it is asked for.
RECORDER = """#!/bin/sh
[ "$1" = --version ] && { echo recorder; exit; }
echo "$@" >> "$RECORD"
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def environment(tmp_path: Path, compiler: str, **more: str) -> dict[str, str]:
    return os.environ | {"BATON_CACHE_DIR": str(tmp_path), "CC": compiler, **more}


def start(code: str, env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    return output.strip()


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    path = tmp_path / "recorder"
    path.write_text(RECORDER)
    path.chmod(0o755)
    return path


def test_without_a_compiler_the_reason_says_so(tmp_path: Path) -> None:
    env = environment(tmp_path, "", PATH=str(tmp_path))
    assert "no C compiler found" in finish(start(AVAILABLE, env))


def test_a_compiler_that_fails_is_named_with_its_complaint(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\necho "broken: error: out of ink" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    assert "out of ink" in finish(start(AVAILABLE, environment(tmp_path, str(broken))))


def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path, recorder: Path) -> None:
    (tmp_path / "native").write_text("in the way")
    reason = finish(start(AVAILABLE, environment(tmp_path, str(recorder), RECORD=str(tmp_path / "log"))))
    assert "cannot be compiled" in reason


def test_an_unknown_instruction_set_is_refused_by_name(tmp_path: Path) -> None:
    env = dict(os.environ) | {"BATON_NATIVE_ISA": "abacus"}
    assert "BATON_NATIVE_ISA=abacus" in finish(start(AVAILABLE, env))


def test_an_instruction_set_that_is_named_is_the_one_that_computes() -> None:
    code = (
        "import torch, kernels; from kernels import native;"
        " kernels.select(torch.device('cpu')); print(native.instruction_set())"
    )
    env = dict(os.environ) | {"BATON_NATIVE_ISA": "portable"}
    assert finish(start(code, env)) == "portable"


def test_processes_that_start_at_once_compile_once(tmp_path: Path, recorder: Path) -> None:
    log = tmp_path / "log"
    env = environment(tmp_path, str(recorder), RECORD=str(log))
    paths = {finish(process) for process in [start(LIBRARY, env) for _ in range(3)]}
    assert len(paths) == 1 and Path(paths.pop()).exists()
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1


def test_other_flags_make_another_library(tmp_path: Path, recorder: Path) -> None:
    env = environment(tmp_path, str(recorder), RECORD=str(tmp_path / "log"))
    first = finish(start(LIBRARY, env))
    assert finish(start(LIBRARY, env)) == first
    assert finish(start(LIBRARY, env | {"BATON_NATIVE_CFLAGS": "-DMARK"})) != first
    assert {path.suffix for path in (tmp_path / "native").iterdir()} == {".so", ".lock"}, (
        "nothing half-made stays"
    )


def test_a_library_made_beforehand_needs_no_compiler(tmp_path: Path, recorder: Path) -> None:
    directory = str(tmp_path / "made")
    subprocess.run(
        [sys.executable, "-c", PREPARE, directory],
        cwd=REPOSITORY,
        env=environment(tmp_path, str(recorder), RECORD=str(tmp_path / "log")),
        check=True,
        timeout=TIMEOUT_S,
    )
    env = environment(tmp_path, "", PATH=str(tmp_path), BATON_NATIVE_DIR=directory)
    assert Path(finish(start(LIBRARY, env))).parent == Path(directory)


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "kernels-0123456789abcdef0123.so").touch()
    env = environment(tmp_path, "", BATON_NATIVE_DIR=str(tmp_path))
    assert "no kernels of this version" in finish(start(AVAILABLE, env))


@pytest.mark.skipif(
    "BATON_TEST_SANITIZERS" not in os.environ, reason="takes minutes; asked for by BATON_TEST_SANITIZERS"
)
@pytest.mark.timeout(1800)
def test_nothing_is_read_or_written_astray(tmp_path: Path) -> None:
    """All tests of the kernels again, compiled with the address and undefined-behaviour sanitizers."""
    compiler = os.environ.get("CC", "cc")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    env = environment(tmp_path, compiler, BATON_NATIVE_CFLAGS=flags, LD_PRELOAD=" ".join(libraries))
    tests = ["tests/kernels/test_native.py", "tests/kernels/test_native_decoder.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "--timeout=900", *tests],
        cwd=REPOSITORY,
        env=env | {"ASAN_OPTIONS": "detect_leaks=0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
