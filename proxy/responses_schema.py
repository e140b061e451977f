"""The body of /v1/responses, as far as it is not shared with the other endpoints."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from proxy.schema import MAX_LOGPROBS, Function, NamedSchema, Positive, TextPart


class InputItem(Struct, frozen=True):
    """A message, a function call of the model's, what came of one, or thoughts; ``type`` says which."""

    type: str = "message"
    role: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class TextFormat(Struct, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def named_schema(self) -> NamedSchema | None:
        if self.schema is None:
            return None
        return NamedSchema(self.name, self.description, self.schema, self.strict)


class TextSettings(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class FlatTool(Struct, frozen=True):
    """A function, without the object that the chat endpoint puts around it."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def function(self) -> Function:
        return Function(self.name, self.description, self.parameters, self.strict)


class FlatChoice(Struct, frozen=True):
    type: str
    name: str = ""


class ReasoningSettings(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Struct, frozen=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    text: TextSettings | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
