"""Shared by all tests: nothing of the machine's own settings reaches them."""

import os
import shutil

import pytest

# Set before torch is imported anywhere: test processes share a small machine with the processes they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:  # Triton asks where kernels are defined: here it interprets them
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is set in the developer's environment must not change what is tested."""
    for name in list(os.environ):
        if name.startswith("BATON_") and name not in ("BATON_CACHE_DIR", "BATON_NATIVE_ISA"):
            monkeypatch.delenv(name)
