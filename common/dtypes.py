"""What ``auto`` means for ``--dtype`` and ``--quantization``."""

import torch

from common.config import Dtype, Quantization


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


def resolve_quantization(choice: Quantization, dtype: Dtype, compiled: bool) -> Quantization:
    """``auto`` stays where weights are to be kept as whole numbers, each as its file has it.

    That is where kernels gain by it (``compiled``: the ones in C compute), and where nobody has said what to
    compute in: who asks for float32 wants the exact model.
    """
    if choice != "auto":
        return choice
    return "auto" if compiled and dtype == "auto" else "none"
