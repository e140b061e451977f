"""Chat messages to prompt text, by the Jinja template that comes with the model.

Templates are written for the conventions of Hugging Face's ``apply_chat_template``: blocks trimmed, ``break``
and ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that keeps non-ASCII characters, ``{%
generation %}`` blocks. A template comes from whoever made the model: it runs in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.model_config import ModelError, read_json
from common.tokenizer import special_tokens


class GenerationBlocks(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it is its
    content."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        """``sources``: templates by name, ``default`` and perhaps ``tool_use``. ``ModelError`` for a broken
        one."""
        environment = new_environment()
        self.special = dict(special)
        self.source = "\n".join(sources.values())
        try:
            self.templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template: line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate | None":
        """The template in ``directory``; None for a model that has none (a base model)."""
        path = directory / "tokenizer_config.json"
        settings = read_json(path) if path.is_file() else {}
        sources = find_sources(directory, settings)
        return cls(sources, special_tokens(settings)) if sources else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt, BOS included where the template writes it: encode it with ``add_special_tokens=False``.
        ``ValueError`` with the template's own words when it refuses the messages."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        known = {**self.special, **variables, "messages": messages, "tools": tools}
        try:
            return self.templates[name].render(known, add_generation_prompt=add_generation_prompt)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error


def find_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Newer models keep the template in a file of its own, older ones in tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    older = directory / "chat_template.json"
    found = read_json(older).get("chat_template") if older.is_file() else settings.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    named = {str(entry["name"]): str(entry["template"]) for entry in found or ()}
    if named and "default" not in named:
        raise ModelError(f"{directory}: chat templates {', '.join(named)}, but none is named default")
    return named


def new_environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes what would be markup in HTML; a model was trained without that."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
