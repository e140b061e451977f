"""Prompts: from messages to text, from text to tokens, and whether they fit."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from proxy.errors import ApiError, context_length_exceeded, invalid
from proxy.job import Prompt
from proxy.schema import Message, Tool
from proxy.served_model import ServedModel
from proxy.tools import introduce, plain_tool

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
INLINE_CHARACTERS = 4096  # longer texts are tokenized in a thread, aside of other requests' streams


class Limits(NamedTuple):
    max_model_len: int
    max_total_tokens: int | None  # the longest sequence that the workers at hand can hold; None: not known
    max_prompt_tokens: int | None  # the longest prompt that they can hold
    max_choices: int
    max_timeout_s: float


class Wish(NamedTuple):
    """What is asked for of the output of one prompt."""

    param: str  # where the prompt is, for errors
    max_tokens: int | None
    default_tokens: int  # without a wish: what is left, up to this


def render(
    messages: list[Message],
    model: ServedModel,
    add_generation_prompt: bool,
    variables: dict[str, Any],
    tools: Sequence[Tool] = (),
) -> str:
    """The prompt's text, by the model's own template."""
    if model.template is None:
        raise ApiError(400, f"{model.name} has no chat template; use /v1/completions", param="messages")
    reserved = {"messages", "tools", "add_generation_prompt"}.intersection(variables)
    if reserved:
        raise invalid("chat_template_kwargs", f"{min(reserved)} cannot be set here")
    try:
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if tools and not model.template_has_tools:
            plain, tools = introduce(plain, tools), ()
        described = [plain_tool(tool) for tool in tools] or None
        return model.template.render(plain, described, add_generation_prompt, **variables)
    except ValueError as error:
        raise invalid("messages", str(error)) from None


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """What templates expect: content is one string."""
    _check_message(index, message)
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                text = f"messages[{index}]: content of type {part.type!r} is not supported, only text"
                raise ValueError(text)
        fields["content"] = "".join(part.text or "" for part in message.content)
    fields.setdefault("content", "")
    for call in fields.get("tool_calls") or ():
        call["type"] = "function"
        call["function"]["arguments"] = _as_object(index, call["function"]["arguments"])
    return fields


def _check_message(index: int, message: Message) -> None:
    """Raises ApiError where a template would make something up, or leave something out."""
    if message.role not in ROLES:
        param = f"messages[{index}].role"
        raise invalid(param, f"{param} must be one of {', '.join(ROLES)}, not {message.role!r}")
    if message.content is None and message.role != "assistant":
        param = f"messages[{index}].content"
        raise invalid(param, f"{param} is missing: only what an assistant said may be without")


def _as_object(index: int, arguments: "str | dict[str, Any]") -> Any:
    """Clients send arguments as a text, templates want them as an object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError as error:
        text = f"messages[{index}]: the arguments of a call are not valid JSON: {error}"
        raise ValueError(text) from None


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt (a text, or token ids) or a list of those."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "the prompt is empty")
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        text = "a list of prompts must hold texts only, or token ids only, or lists of token ids only"
        raise invalid("prompt", text)
    return prompt


async def text_prompt(text: str, special: bool, wish: Wish, model: ServedModel, limits: Limits) -> Prompt:
    fewest = -(-len(text) // model.longest_token)
    check_fit(fewest, wish, limits)  # before the work of counting exactly
    ids = await encode(text, wish.param, model, special)
    return _prompt(ids, text, wish, limits)


def token_prompt(ids: list[int], wish: Wish, model: ServedModel, limits: Limits) -> Prompt:
    check_fit(len(ids), wish, limits)
    check_token_ids(wish.param, ids, model)
    return _prompt(ids, None, wish, limits)


async def encode(text: str, param: str, model: ServedModel, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) <= INLINE_CHARACTERS:
            return model.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)
    except ValueError as error:
        raise invalid(param, str(error)) from None


def check_token_ids(param: str, ids: "list[int] | dict[int, float]", model: ServedModel) -> None:
    wrong = next((token_id for token_id in ids if token_id >= model.vocab_size), None)
    if wrong is not None:
        text = f"{param}: token id {wrong} is not below the vocabulary's size, {model.vocab_size}"
        raise invalid(param, text)


def _prompt(ids: list[int], text: str | None, wish: Wish, limits: Limits) -> Prompt:
    if not ids:
        raise invalid(wish.param, "the prompt is empty")
    left = check_fit(len(ids), wish, limits)
    return Prompt(tuple(ids), text, wish.max_tokens or min(wish.default_tokens, left))


def check_fit(num_prompt: int, wish: Wish, limits: Limits) -> int:
    """How many tokens are left for the output; raises ApiError where prompt or output do not fit."""
    num_output = wish.max_tokens or 1
    limit, what = limits.max_model_len, "the model or --max-model-len"
    if limits.max_total_tokens is not None and limits.max_total_tokens < limit:
        limit, what = limits.max_total_tokens, "the KV cache of the largest decode worker"
    if num_prompt + num_output > limit:
        raise context_length_exceeded(limit, num_prompt, num_output, what, wish.param)
    if limits.max_prompt_tokens is not None and num_prompt + 1 > limits.max_prompt_tokens:
        what = "the KV cache of the largest prefill worker"
        raise context_length_exceeded(limits.max_prompt_tokens, num_prompt, 1, what, wish.param)
    return limit - num_prompt
