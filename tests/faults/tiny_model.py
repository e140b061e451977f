"""A small model whose output depends sharply on every key and value: what wrong KV would change, a test sees.

A Llama with random weights, made from a seed, in the layout of a Hugging Face directory. Gains are chosen so
that the two best logits lie far apart (a rounding difference does not change a token) and attention weighs
about as much as the last token (another block of KV does). Every byte is a token: any text can be a prompt.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from common.tokenizer import byte_alphabet

SPECIAL = ("<|begin|>", "<|end|>", "<|role|>", "<|stop|>")
VOCAB_SIZE = 256 + len(SPECIAL)
EOS_TOKEN_ID = 257
HIDDEN, INTERMEDIATE, LAYERS, HEADS, GROUPS, HEAD_DIM = 64, 128, 4, 4, 2, 16
MAX_LEN = 2048
KV_BYTES_PER_TOKEN = LAYERS * 2 * GROUPS * HEAD_DIM * 4

SCORE_GAIN = 4.0  # of queries and keys: how far attention is from a plain average
VALUE_GAIN = 4.0  # of what attention adds, against the token's own embedding
LOGIT_GAIN = 8.0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|role|>{{ message.role }}\n{{ message.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


def write(directory: Path, seed: int = 0) -> Path:
    """Put the model into ``directory``. Models of different seeds share the tokenizer and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights(seed)), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config()))
    library().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[1], "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": EOS_TOKEN_ID,
    }


def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    source = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> Tensor:
        """Maps a vector of unit mean square to one of mean square ``gain`` squared."""
        return torch.randn(rows, columns, generator=source).mul_(gain / columns**0.5)

    head = matrix(VOCAB_SIZE, HIDDEN, LOGIT_GAIN)
    head[256:] = 0.0  # the special tokens never win: sequences end where the request says
    yield "model.embed_tokens.weight", torch.randn(VOCAB_SIZE, HIDDEN, generator=source)
    yield "model.norm.weight", torch.ones(HIDDEN)
    yield "lm_head.weight", head
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", torch.ones(HIDDEN)
        yield f"{prefix}post_attention_layernorm.weight", torch.ones(HIDDEN)
        yield f"{prefix}self_attn.q_proj.weight", matrix(HEADS * HEAD_DIM, HIDDEN, SCORE_GAIN**0.5)
        yield f"{prefix}self_attn.k_proj.weight", matrix(GROUPS * HEAD_DIM, HIDDEN, SCORE_GAIN**0.5)
        yield f"{prefix}self_attn.v_proj.weight", matrix(GROUPS * HEAD_DIM, HIDDEN, 1.0)
        yield f"{prefix}self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_DIM, VALUE_GAIN)
        yield f"{prefix}mlp.gate_proj.weight", matrix(INTERMEDIATE, HIDDEN, 1.0)
        yield f"{prefix}mlp.up_proj.weight", matrix(INTERMEDIATE, HIDDEN, 1.0)
        yield f"{prefix}mlp.down_proj.weight", matrix(HIDDEN, INTERMEDIATE, 1.0)


def library() -> Tokenizer:
    """One token per byte."""
    vocabulary = byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer
