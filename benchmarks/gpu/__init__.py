"""What the GPU path does on a GPU, and what it could do at best.

benchmarks/gpu_check.sh           everything on the GPU of this machine, in one table
python -m benchmarks.gpu.paper    the floors of Llama 3 8B on cards whose figures are known
"""
