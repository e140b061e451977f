"""Request bodies of the HTTP API: fields, types and ranges, declared once.

A body is read twice, once for the options that both generating endpoints share and once for what is the
endpoint's own. Null stands for absent everywhere. What is not declared here is either refused
(``UNSUPPORTED``), because leaving it out would change the meaning of the reply, or ignored and named in a
header of the reply.
"""

import contextlib
import functools
import gc
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from proxy.errors import ApiError, invalid, unsupported

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_NAMES = 10_000  # to look at in a body that has unknown ones

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1000)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class NamedSchema(Struct, frozen=True):
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(Struct, frozen=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Options(Struct, frozen=True):
    """What both generating endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_workers: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timings: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    user: str | None = None


class CompletionBody(Struct, frozen=True):
    """What /v1/completions takes besides."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None


class TextPart(Struct, frozen=True):
    type: str
    text: str | None = None


class PastFunction(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] = ""


class PastCall(Struct, frozen=True, omit_defaults=True):
    function: PastFunction
    id: str = ""
    type: str | None = None


class Message(Struct, frozen=True, omit_defaults=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[PastCall] | None = None
    reasoning_content: str | None = None


class Function(Struct, frozen=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    type: str
    function: Function


class FunctionName(Struct, frozen=True):
    name: str


class NamedChoice(Struct, frozen=True):
    function: FunctionName
    type: str = "function"


class ChatBody(Struct, frozen=True):
    """What /v1/chat/completions takes besides."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(Struct, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "continue_final_message",
        "function_call",
        "functions",
        "grammar",
        "json_schema",
        "logits_processors",
        "modalities",
        "prediction",
        "prompt_embeds",
        "regex",
        "truncate_prompt_tokens",
        "use_beam_search",
        "web_search_options",
    }
)
_ABSENT = (b"null", b"false", b"[]", b"{}", b'["text"]')

Body = TypeVar("Body")


def read(body: bytes, kind: type[Body]) -> Body:
    """Raises ApiError that names the field."""
    try:
        with _without_collections():
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(_param_of(str(error)), str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """What a decoder makes is never garbage, but a collector that looks for some after every few hundred
    objects turns half a second for 15 MB of brackets into ten, in which this process does nothing else."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unknown_fields(body: bytes, *known: type[Struct]) -> list[str]:
    """Names in the body that no struct of ``known`` declares, only the first of them where there may be a
    great many; raises ApiError for those that must not be ignored."""
    try:
        fields, unknown = _fields(known, is_strict=True).decode(body), list[str]()
    except msgspec.ValidationError as error:
        fields, unknown = _fields(known, is_strict=False).decode(body), [str(error).split("`", 1)[1][:-1]]
        if body.count(b'"') <= 2 * MAX_NAMES:
            names = read(body, dict[str, Raw])
            unknown = [name for name in names if name not in fields.__struct_fields__]
    for name in UNSUPPORTED:
        value = getattr(fields, name)
        if value is not UNSET and bytes(value) not in _ABSENT:
            raise unsupported(name)
    return unknown


@functools.cache
def _fields(known: tuple[type[Struct], ...], is_strict: bool) -> "msgspec.json.Decoder[Struct]":
    """Of all fields that mean something here; ``is_strict``: of nothing else."""
    names = {name for kind in known for name in kind.__struct_fields__} | UNSUPPORTED
    fields = [(name, Raw | UnsetType, UNSET) for name in sorted(names)]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, forbid_unknown_fields=is_strict))


def _param_of(message: str) -> str | None:
    """The field in messages like "Expected `int` - at `$.n`" and "Object missing required field `prompt`"."""
    found = re.search(r"`\$\.(\w+)", message) or re.search(r"field `(\w+)`", message)
    return found[1] if found else None
