"""What ``--dtype auto`` means."""

import torch


def resolve_dtype(saved: str, device: torch.device) -> torch.dtype:
    """The type to compute in, for weights that were saved in ``saved``.

    On a CPU bfloat16 is several times faster than float32 with AMX tiles and slower without them, so it is
    taken only there, and only where it loses nothing of the weights. The answer follows from the processor
    and is not timed anew: two workers that came to different answers could not exchange blocks.
    """
    dtype: torch.dtype = getattr(torch, saved)
    if device.type != "cpu":
        return dtype
    tiles = torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if tiles and dtype == torch.bfloat16 else torch.float32
