"""The functions of the compiled library, as ctypes sees them. Calls release the interpreter's lock."""

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import cache
from typing import Any

import torch

from kernels.native import build
from kernels.quantization import BlockFormat, Quantization

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # enum dtype
BLOCKS: dict[BlockFormat, int] = {"Q8_0": 16, "Q4_0": 17, "Q4_1": 18}  # enum block_format
KINDS: dict[torch.dtype | Quantization, int] = {  # enum kind
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    "int8": 3,
    "int4": 4,
}
ISA_VARIABLE = "BATON_NATIVE_ISA"
TELL = ctypes.CFUNCTYPE(None, c_int32)


class Weight(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("num_inputs", c_int64),
        ("num_outputs", c_int64),
        ("kind", c_int32),
    ]


class Rows(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64), ("dtype", c_int32)]


class Attention(Structure):
    _fields_ = [
        ("q", Rows),
        ("out", Rows),
        ("cache", c_void_p),
        ("cache_stride", c_int64),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_sequences", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("cache_dtype", c_int32),
        ("scale", c_float),
    ]


class Layer(Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", c_void_p),
        ("o", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("window", c_int32),
    ]


class Decoder(Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("cos_sin", c_void_p),
        ("hidden", c_int64),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("eps", c_float),
    ]


class Step(Structure):
    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
        ("caches", POINTER(c_void_p)),
        ("attention", Attention),
        ("output_rows", c_void_p),
        ("num_outputs", c_int64),
        ("out", c_void_p),
        ("tell", TELL),
        ("tell_every", c_int32),
    ]


P, L, I = c_void_p, c_int64, c_int  # noqa: E741 (a table reads better with one letter a column)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "baton_select": (c_char_p, [c_char_p]),
    "baton_selected": (c_char_p, []),
    "baton_set_num_threads": (L, [L]),
    "baton_pack": (None, [P, I, L, L, I, P]),
    "baton_linear": (None, [P, I, L, P, P, I]),
    "baton_attention": (None, [POINTER(Attention)]),
    "baton_rms_norm": (None, [P, P, P, I, c_float, L, L, P, P]),
    "baton_rotary": (None, [P, L, P, I, P, P, L, I, I]),
    "baton_silu_mul": (None, [P, P, I, L, L]),
    "baton_draw": (None, [P, P, L, L, P]),
    "baton_best": (None, [P, L, L, P, P]),
    "baton_hash_begin": (None, [P]),
    "baton_hash_update": (None, [P, P, P, L]),
    "baton_hash_value": (c_uint64, [P]),
    "baton_probe_read": (c_float, [P, L]),
    "baton_probe_floats": (L, [L]),
    "baton_probe_bf16": (L, [L]),
    "baton_forward": (None, [POINTER(Decoder), POINTER(Step)]),
    "baton_store_kv": (None, [P, L, P, L, I, P, L, I, P, L, I, I, I]),
}


@cache
def load() -> ctypes.CDLL:
    """The library, with the best instruction set of this processor or the one that ``BATON_NATIVE_ISA``
    names. ``BuildError`` when there is none."""
    library = ctypes.CDLL(str(build.library()))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    choose(library, os.environ.get(ISA_VARIABLE, ""))
    return library


def in_use(library: ctypes.CDLL) -> str:
    """The name of the instruction set."""
    name: bytes = library.baton_selected()
    return name.decode()


def choose(library: ctypes.CDLL, name: str) -> str:
    """Use the named instruction set, "" for the best; returns the name of the one in use."""
    chosen: bytes | None = library.baton_select(name.encode())
    if chosen is None:
        raise build.BuildError(f"{ISA_VARIABLE}={name}: not an instruction set of this processor")
    return chosen.decode()
