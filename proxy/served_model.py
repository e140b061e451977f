"""The model as the proxy needs it: its names, its words and its limits, but not its weights."""

from dataclasses import dataclass

from common.chat_template import ChatTemplate
from common.config import EngineConfig
from common.grammar import Grammars
from common.model_config import ModelConfig
from common.model_source import resolve
from common.tokenizer import Tokenizer
from proxy.call_text import style_of

DEFAULT_NAME = "default"  # always accepted


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    names: frozenset[str]  # all that clients may use
    fingerprint: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int  # rows of the model's embedding, padding included
    max_model_len: int
    longest_token: int  # characters that one token can stand for
    grammars: Grammars
    call_style: str = "hermes"  # how the model writes tool calls, see proxy.call_text
    has_thoughts: bool = False  # whether it may think between tags before it answers
    template_has_tools: bool = False

    @classmethod
    def load(
        cls, config: EngineConfig, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> "ServedModel":
        """Raises ModelError."""
        files = resolve(config.model)
        model = ModelConfig.load(files.directory)
        name = config.served_model_name or files.name
        limit = config.max_model_len or model.max_position_embeddings
        tokenizer = Tokenizer.load(files.directory)
        template = ChatTemplate.load(files.directory)
        source = template.source if template else ""
        thinks = "</think>" in source if reasoning_parser == "auto" else reasoning_parser != "none"
        return cls(
            name=name,
            names=frozenset({name, DEFAULT_NAME, files.name, config.model}),
            fingerprint=files.fingerprint,
            tokenizer=tokenizer,
            template=template,
            vocab_size=model.vocab_size,
            max_model_len=min(limit, model.max_position_embeddings),
            longest_token=longest_token(tokenizer),
            grammars=Grammars.of(tokenizer, model.vocab_size, model.eos_token_ids),
            call_style=style_of(source) if tool_call_parser == "auto" else tool_call_parser,
            has_thoughts=thinks,
            template_has_tools="tools" in source,
        )


def longest_token(tokenizer: Tokenizer) -> int:
    """No token stands for more characters than its own spelling has."""
    return max(len(tokenizer.library.id_to_token(i) or "") for i in range(tokenizer.vocab_size))
