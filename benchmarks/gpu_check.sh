#!/usr/bin/env bash
# Checks and times the GPU path on this machine's GPU, and prints one table: every kernel against the specification, its
# time against its floor and against PyTorch's own, blocks between two processes by ZeroMQ and by UCX, the engine on models
# of the shapes of Llama 3 1B and 8B, a hand-over.
#
#   benchmarks/gpu_check.sh [WHEELS]      under 8 minutes; OUT=FOLDER also writes FOLDER/gpu.md
#
# Needs PyTorch and Triton for a GPU, and Python 3.11 or later, but no package index: packages that are missing here are
# installed from the folder WHEELS. On a machine with an index, for Python 3.12 on x86-64, it is filled (25 MB) by
#
#   pip download --only-binary=:all: --no-deps --python-version 3.12 --dest WHEELS \
#     --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
#     numpy==2.4.6 msgspec==0.23.0 xxhash==4.1.0 psutil==7.2.2 safetensors==0.8.0 tokenizers==0.23.3 llguidance==1.9.1 \
#     pyzmq==27.3.0
#
# What goes by ZeroMQ or UCX is left out where pyzmq or ucxx is missing; the wheels of ucxx are larger.
# Rows are written as they come, and each part is a process of its own: what fails, crashes or hangs is told and costs the
# other parts nothing. PART='large model' runs one alone. ARGS are passed on: ARGS=--tiny runs all of it without a
# GPU, in Triton's interpreter (TRITON_INTERPRET=1).
set -euo pipefail
WHEELS=${1:+$(realpath "$1")}
OUT=${OUT:+$(realpath "$OUT")}
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
PACKAGES=$(mktemp -d)
trap 'rm -rf "$PACKAGES"' EXIT
export PYTHONPATH="$PWD:$PACKAGES${PYTHONPATH:+:$PYTHONPATH}"

for name in numpy msgspec xxhash psutil safetensors tokenizers llguidance; do
  if ! "$PYTHON" -c "import $name" 2>/dev/null; then
    test -n "$WHEELS" || { echo "$name is missing: name a folder of wheels, see the head of $0" >&2; exit 2; }
    "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" --target "$PACKAGES" "$name"
  fi
done

if test -n "$WHEELS" && ! "$PYTHON" -c 'import zmq' 2>/dev/null; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --find-links "$WHEELS" --target "$PACKAGES" pyzmq || true
fi

# shellcheck disable=SC2086
timeout 480 "$PYTHON" -m benchmarks.gpu ${OUT:+--out "$OUT/gpu.md"} ${PART:+--part "$PART"} ${ARGS:-}
