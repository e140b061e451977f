"""Tensors in safetensors files, in one or in several shards."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.model_config import ModelError
from kernels.quantization import BlockFormat

DTYPES = ("F32", "F16", "BF16")


class SafetensorsCheckpoint:
    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.files: dict[str, Any] = {}  # open file by tensor name
        self.paths: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            self.index(path)

    def index(self, path: Path) -> None:
        """``ModelError`` for a file that is cut short (its header says how long it is) or of an unsupported
        type."""
        try:
            file: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a complete safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118  a method of the file, which is no mapping
            view = file.get_slice(name)
            if view.get_dtype() not in DTYPES:
                supported = ", ".join(DTYPES)
                raise ModelError(f"{path}: tensor {name} has type {view.get_dtype()}; supported: {supported}")
            self.files[name], self.paths[name], self.shapes[name] = file, path, tuple(view.get_shape())

    def read_into(self, name: str, target: Tensor) -> None:
        target.copy_(self.files[name].get_tensor(name))

    def read_blocks(self, name: str) -> tuple[BlockFormat, Tensor] | None:
        return None  # there is no such type here

    def file_of(self, name: str) -> str:
        return str(self.paths[name])
