"""That the kernels are right for a GPU, as far as that shows without one: they become its machine code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # what a program may take of an A100, and of an H100 or H200
KERNELS = {
    "decode_kernel",
    "combine_kernel",
    "prefill_kernel",
    "store_kernel",
    "rotary_kernel",
    "norm_kernel",
    "silu_mul_kernel",
    "quantized_linear_kernel",
    "gather_kernel",
    "scatter_kernel",
    "draw_kernel",
    "count_kernel",
    "penalize_kernel",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, "bfloat16"),
        pytest.param(90, "float16", marks=pytest.mark.slow),
        pytest.param(90, "float32", marks=pytest.mark.slow),
        pytest.param(89, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_for_a_gpu(capability: int, dtype: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu", str(capability), dtype]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in compiled} == KERNELS
    if dtype != "float32":  # whose largest choice of tiles is left out where it does not fit
        assert max(int(shared) for _, shared in compiled) <= SHARED_BYTES.get(capability, 99 << 10)
