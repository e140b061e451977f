"""From the body of /v1/responses to a Job: the same chat in other words.

Nothing is stored here: a response cannot be asked for again, nor be gone on from by its id. Clients send the
conversation whole, as to the chat endpoint.
"""

from typing import Any

import msgspec

from proxy.chat_job import build_chat_job
from proxy.errors import ApiError, invalid, unsupported
from proxy.job import Job
from proxy.prompts import ROLES, Limits
from proxy.responses_schema import FlatChoice, FlatTool, InputItem, ResponsesBody
from proxy.schema import (
    ChatBody,
    FunctionName,
    Message,
    NamedChoice,
    Options,
    PastCall,
    PastFunction,
    ResponseFormat,
    TextPart,
    Tool,
    read,
    unknown_fields,
)
from proxy.served_model import ServedModel

LOGPROBS = "message.output_text.logprobs"
PARAMS = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
# Of the shared options: what this endpoint has under another name, or not at all.
NOT_IN_RESPONSES = (
    "n", "max_tokens", "max_completion_tokens", "stream_options", "response_format", "prompt_logprobs",
)  # fmt: skip
TEXTS = ("text", "input_text", "output_text")


async def responses_job(body: bytes, model: ServedModel, limits: Limits, trace: str = "") -> Job:
    options, own = read(body, Options), read(body, ResponsesBody)
    ignored = [*unknown_fields(body, Options, ResponsesBody), *_without_effect(options, own)]
    _refuse_state(own)
    try:
        job = await build_chat_job(_options(options, own), _chat(own), model, limits)
    except ApiError as error:
        error.param = PARAMS.get(error.param or "", error.param)
        raise
    fields = _fields(options, own, job)
    return msgspec.structs.replace(
        job, endpoint="responses", trace=trace, ignored=tuple(ignored), response_fields=fields
    )


def _refuse_state(own: ResponsesBody) -> None:
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(own, name):
            raise unsupported(name)
    if own.truncation not in (None, "disabled"):
        raise unsupported("truncation")


def _without_effect(options: Options, own: ResponsesBody) -> list[str]:
    return [
        *(name for name in ("reasoning", "store") if getattr(own, name)),
        *(name for name in NOT_IN_RESPONSES if getattr(options, name) is not None),
    ]


def _options(options: Options, own: ResponsesBody) -> Options:
    given = own.text.format if own.text else None
    form = ResponseFormat(given.type, given.named_schema()) if given else None
    return msgspec.structs.replace(
        options,
        n=None,
        max_tokens=None,
        max_completion_tokens=own.max_output_tokens,
        stream_options=None,
        prompt_logprobs=None,
        response_format=form,
    )


def _chat(own: ResponsesBody) -> ChatBody:
    wants_logprobs = LOGPROBS in (own.include or ())
    return ChatBody(
        messages=_messages(own),
        logprobs=wants_logprobs or bool(own.top_logprobs),
        top_logprobs=own.top_logprobs,
        chat_template_kwargs=own.chat_template_kwargs,
        tools=[_tool(tool) for tool in own.tools or ()],
        tool_choice=_choice(own.tool_choice),
        parallel_tool_calls=own.parallel_tool_calls,
    )


def _tool(tool: FlatTool) -> Tool:
    if tool.type != "function":
        raise invalid(
            "tools", f"tools of type {tool.type!r} are not supported by this server, only functions"
        )
    try:
        return Tool(tool.type, msgspec.convert(msgspec.to_builtins(tool.function()), type(tool.function())))
    except msgspec.ValidationError as error:
        raise invalid("tools", f"tools: {error}") from None


def _choice(choice: str | FlatChoice | None) -> str | NamedChoice | None:
    if not isinstance(choice, FlatChoice):
        return choice
    if choice.type != "function":
        raise invalid("tool_choice", f"tool_choice of type {choice.type!r} is not supported by this server")
    return NamedChoice(FunctionName(choice.name))


def _messages(own: ResponsesBody) -> list[Message]:
    messages = [Message("system", own.instructions)] if own.instructions else []
    if isinstance(own.input, str):
        return [*messages, Message("user", own.input)]
    calls: list[PastCall] = []
    for index, item in enumerate(own.input):
        if item.type == "function_call":
            calls.append(_past_call(index, item))
            continue
        if calls:
            messages.append(Message("assistant", tool_calls=calls))
            calls = []
        messages += _message(index, item)
    return [*messages, Message("assistant", tool_calls=calls)] if calls else messages


def _message(index: int, item: InputItem) -> list[Message]:
    if item.type == "reasoning":
        return []  # templates leave earlier thoughts out
    if item.type == "function_call_output":
        if item.output is None:
            raise invalid("input", f"input[{index}]: what came of a call needs an output")
        return [Message("tool", _content(item.output), tool_call_id=item.call_id)]
    if item.type != "message":
        text = f"input[{index}]: items of type {item.type!r} are not supported by this server"
        raise invalid("input", text)
    if item.role is None or item.role not in ROLES:
        raise invalid("input", f"input[{index}]: a message needs a role, one of {', '.join(ROLES)}")
    if item.content is None and item.role != "assistant":
        raise invalid("input", f"input[{index}]: a message needs a content")
    role = "system" if item.role == "developer" else item.role
    return [Message(role, _content(item.content))]


def _past_call(index: int, item: InputItem) -> PastCall:
    if not item.name:
        raise invalid("input", f"input[{index}]: a function call needs a name")
    return PastCall(PastFunction(item.name, item.arguments or ""), item.call_id or "")


def _content(content: str | list[TextPart] | None) -> str | list[TextPart] | None:
    if not isinstance(content, list):
        return content
    return [TextPart("text", part.text) if part.type in TEXTS else part for part in content]


def _fields(options: Options, own: ResponsesBody, job: Job) -> dict[str, Any]:
    """What the response repeats of the request."""
    form = msgspec.to_builtins(own.text.format) if own.text and own.text.format else {"type": "text"}
    return {
        "instructions": own.instructions,
        "max_output_tokens": own.max_output_tokens,
        "metadata": own.metadata or {},
        "parallel_tool_calls": own.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": job.sampling.temperature,
        "text": {"format": {name: value for name, value in form.items() if value is not None}},
        "tool_choice": msgspec.to_builtins(own.tool_choice) if own.tool_choice else "auto",
        "tools": [msgspec.to_builtins(tool) for tool in own.tools or ()],
        "top_logprobs": own.top_logprobs or 0,
        "top_p": job.sampling.top_p,
        "truncation": "disabled",
        "user": options.user,
    }
