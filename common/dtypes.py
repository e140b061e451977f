"""What ``auto`` means for ``--dtype`` and ``--quantization``."""

import torch

from common.config import Dtype, Quantization

MULTIPLY_BYTES = ("avx512", "avx512_bf16")  # instruction sets of kernels.native


def resolve_dtype(saved: str, device: torch.device) -> torch.dtype:
    """The type to compute in, for weights that were saved in ``saved``.

    On a CPU bfloat16 is twice or several times as fast as float32 where the processor multiplies it, and
    slower elsewhere, so it is taken only there, and only where it loses nothing of the weights. The answer
    follows from the processor and is not timed anew: two workers that came to different answers could not
    exchange blocks.
    """
    dtype: torch.dtype = getattr(torch, saved)
    if device.type != "cpu":
        return dtype
    multiplies = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if multiplies and dtype == torch.bfloat16 else torch.float32


def resolve_quantization(choice: Quantization, dtype: Dtype, instruction_set: str | None) -> Quantization:
    """``auto`` stays where weights are to be kept as whole numbers, each as its file has it, and becomes int8
    on processors that multiply bytes faster than they unpack what is smaller.

    That is where kernels gain by it (``instruction_set``: of the ones in C, None if others compute), and
    where nobody has said what to compute in: who asks for float32 wants the exact model.
    """
    if choice != "auto":
        return choice
    if instruction_set is None or dtype != "auto":
        return "none"
    return "int8" if instruction_set in MULTIPLY_BYTES else "auto"
