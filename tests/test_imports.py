"""Which part may import which, and that the front ends stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "kernels",
    "common",
    "kv_transfer",
    "prefill_worker",
    "decode_worker",
    "proxy",
    "control_plane",
    "benchmarks",
)
# What a package may import besides itself. Benchmarks may look at everything.
ARROWS = {
    "kernels": set(),
    "common": {"kernels"},
    "kv_transfer": {"common", "kernels"},
    "prefill_worker": {"kv_transfer", "common", "kernels"},
    "decode_worker": {"kv_transfer", "common", "kernels"},
    "proxy": {"common"},
    "control_plane": {"common"},
    "benchmarks": set(PACKAGES),
}
# The control plane starts processes: it knows configuration and where models are, not how they run.
CONTROL_PLANE_MAY_KNOW = {
    "config",
    "cores",
    "hosts",
    "logs",
    "messages",
    "model_config",
    "model_source",
    "notice",
    "options",
    "secret",
}
HEAVY = ("torch", "numpy", "gguf", "ucxx")
LIGHT_MODULES = (
    "proxy",
    "control_plane",
    "common.options",
    "common.messages",
    "common.model_source",
    "common.tokenizer",
)


def imports(path: Path) -> Iterator[str]:
    """Every module named in an import statement of the file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_every_package_is_looked_at() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert found == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in imports(path)
        if name.split(".")[0] in set(PACKAGES) | {"tests"}
        and name.split(".")[0] not in ARROWS[package] | {package}
    ]
    assert wrong == []


def test_the_control_plane_knows_configuration_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("control_plane")
        for name in imports(path)
        if name.startswith("common.") and name.split(".")[1] not in CONTROL_PLANE_MAY_KNOW
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["proxy", "control_plane"])
def test_importing_all_of_a_front_end_loads_no_numeric_library(package: str) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files(package)
        if path.name not in ("__main__.py", "launch.py")
    ]
    assert loaded_by(names) == ""


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_no_numeric_library(module: str) -> None:
    assert loaded_by([module]) == ""


def loaded_by(names: list[str]) -> str:
    """The heavy modules that a fresh interpreter has after importing ``names``."""
    program = f"import sys, {', '.join(names)}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()
