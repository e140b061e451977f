"""The default model as other systems read it: a Hugging Face directory, in bfloat16."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from common import model_source, weights
from common.cache_directory import cache_directory
from common.config import DEFAULT_MODEL
from common.model_config import ModelConfig

# Of what Baton does not ask for, as other systems do.
MORE = {"model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16"}


def directory() -> Path:
    """Made when first asked for; the same weights, rounded to bfloat16, and the same tokenizer."""
    place = cache_directory() / "peers" / "smollm2-135m-instruct-bf16"
    if not (place / "model.safetensors").exists():
        export(place)
    return place


def export(place: Path) -> None:
    files = model_source.resolve(DEFAULT_MODEL)
    config = ModelConfig.load(files.directory)
    loaded = weights.load(files, config, torch.bfloat16, torch.device("cpu"))
    place.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files.directory / name, place)
    values = json.loads((files.directory / "config.json").read_text(encoding="utf-8"))
    (place / "config.json").write_text(json.dumps(values | MORE), encoding="utf-8")
    names = [name for name in loaded.checkpoint.shapes if name != "lm_head.weight"]
    unfinished = place / "model.part"
    save_file({name: loaded.read(name) for name in names}, unfinished, {"format": "pt"})
    unfinished.rename(place / "model.safetensors")
