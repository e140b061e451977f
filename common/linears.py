"""How weight matrices get from a checkpoint to the kernels: as they are, or as whole numbers.

``auto`` takes what a GGUF file holds in 4 or 8 bits as it stands, without a detour through floating point,
and rounds everything else to 8 bits. The matrix that gives logits always gets 8 bits at least."""

from common.config import Quantization
from common.model_config import ModelError
from common.weights import Weights
from kernels import LinearWeight, Ops
from kernels.quantization import Quantization as Kind


class Linears:
    def __init__(self, weights: Weights, ops: Ops, choice: Quantization) -> None:
        self._weights = weights
        self._ops = ops
        self._choice = choice

    def read(self, bias: bool, *names: str) -> LinearWeight:
        """The matrices ``names``, one below the other, and their biases if they have any. ``ModelError`` for
        numbers too large to be kept as was asked."""
        biases = self._weights.read_if(bias, *(f"{name}.bias" for name in names))
        matrices = [f"{name}.weight" for name in names]
        kind = self._kind(matrices[0])
        blocks = None if kind is None else self._weights.read_blocks(*matrices)
        try:
            if blocks is not None and (self._choice == "auto" or kind == blocks.kind):
                return self._ops.pack_linear(blocks, biases)
            return self._ops.pack_linear(self._weights.read(*matrices), biases, kind)
        except ValueError as error:
            if self._choice == "auto":
                return self._ops.pack_linear(self._weights.read(*matrices), biases)
            raise ModelError(f"{matrices[0]}: {error}; use another --quantization") from error

    def _kind(self, name: str) -> Kind | None:
        if self._choice == "none":
            return None
        if self._choice == "auto" or name in ("lm_head.weight", "model.embed_tokens.weight"):
            return "int8"
        return self._choice
