"""What an engine on a GPU needs to know of it."""

import torch

from common.config import EngineConfig
from common.model_config import ModelConfig

LIBRARY_BYTES = 512 << 20  # workspaces of cuBLAS, compiled kernels, records of steps
STREAMS_OF_HIDDEN = 8  # of the width of the model, alive at once: residual, input, output, and copies
LOGITS_BYTES = 4 * 4  # float32, and three times as much where they are changed and sorted


def use(device: torch.device) -> None:
    """Kernels that the calling thread launches from now on run on ``device``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def use_beside_steps(device: torch.device) -> None:
    """The same, in a stream of the thread's own: what it launches and copies waits for no step, and comes
    first where both wait for a processor."""
    use(device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def wait(device: torch.device) -> None:
    """Until the device has done what the calling thread gave it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def step_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Memory to leave for the largest step, beside weights and cache: generously counted."""
    heads = model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
    width = STREAMS_OF_HIDDEN * model.hidden_size + 2 * heads + 4 * model.intermediate_size
    activations = config.lone_step_tokens * width * dtype.itemsize
    return activations + config.max_num_seqs * model.vocab_size * LOGITS_BYTES + LIBRARY_BYTES
