"""From the body of a request to a Job, or to an ApiError that names what is wrong.

All that can be refused is refused here, before any worker hears of the request.
"""

import asyncio
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from common.messages import Sampling
from proxy.errors import ApiError, context_length_exceeded, invalid, unsupported
from proxy.job import Endpoint, Job, Prompt, random_seed
from proxy.schema import ChatBody, CompletionBody, Message, Options, read, unknown_fields
from proxy.served_model import ServedModel

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; chats may run to the end of the context
INLINE_CHARACTERS = 4096  # longer texts are tokenized in a thread, aside of other requests' streams


class Limits(NamedTuple):
    max_model_len: int
    max_pool_tokens: int | None  # the longest sequence that the workers at hand can hold; None: not known
    max_choices: int
    max_timeout_s: float


async def completion_job(body: bytes, model: ServedModel, limits: Limits, trace: str = "") -> Job:
    options, own = read(body, Options), read(body, CompletionBody)
    ignored = unknown_fields(body, Options, CompletionBody)
    check_model(options.model, model)
    if own.suffix:
        raise unsupported("suffix")
    if own.best_of not in (None, options.n or 1):
        raise unsupported("best_of")
    if own.echo and own.logprobs is not None:
        raise invalid("echo", "echo together with logprobs is not supported by this server")
    special = own.add_special_tokens is not False
    texts = [await _tokenize(prompt, model, special) for prompt in _split_prompts(own.prompt)]
    default = options.max_tokens or options.max_completion_tokens
    prompts = [_fit("prompt", ids, text, default, DEFAULT_COMPLETION_TOKENS, limits) for ids, text in texts]
    sampling = _sampling(options, prompts, own.logprobs, model)
    job = _job("completions", options, prompts, sampling, limits)
    return replace(job, echo=bool(own.echo), trace=trace, ignored=tuple(ignored))


async def chat_job(body: bytes, model: ServedModel, limits: Limits, trace: str = "") -> Job:
    options, own = read(body, Options), read(body, ChatBody)
    ignored = unknown_fields(body, Options, ChatBody)
    check_model(options.model, model)
    if own.tools and own.tool_choice != "none":
        raise unsupported("tools")
    if own.top_logprobs and not own.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    text = render(own.messages, model, own.add_generation_prompt is not False, own.chat_template_kwargs or {})
    ids = await encode(text, "messages", model, add_special_tokens=False)
    wanted = options.max_completion_tokens or options.max_tokens
    prompt = _fit("messages", ids, text, wanted, limits.max_model_len, limits)
    num_logprobs = (own.top_logprobs or 0) if own.logprobs else None
    sampling = _sampling(options, [prompt], num_logprobs, model)
    job = _job("chat", options, [prompt], sampling, limits)
    return replace(job, trace=trace, ignored=tuple(ignored))


def check_model(name: str | None, model: ServedModel) -> None:
    if name is not None and name not in model.names:
        text = f"the model {name!r} does not exist; this server serves {model.name!r}"
        raise ApiError(404, text, param="model", code="model_not_found")


def render(
    messages: list[Message], model: ServedModel, add_generation_prompt: bool, variables: dict[str, Any]
) -> str:
    """The prompt's text, by the model's own template."""
    if model.template is None:
        raise ApiError(400, f"{model.name} has no chat template; use /v1/completions", param="messages")
    reserved = {"messages", "tools", "add_generation_prompt"}.intersection(variables)
    if reserved:
        raise invalid("chat_template_kwargs", f"{min(reserved)} cannot be set here")
    try:
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        return model.template.render(plain, add_generation_prompt=add_generation_prompt, **variables)
    except ValueError as error:
        raise invalid("messages", str(error)) from None


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """What templates expect: content is one string."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise ValueError(
                    f"messages[{index}]: content of type {part.type!r} is not supported, only text"
                )
        fields["content"] = "".join(part.text or "" for part in message.content)
    fields.setdefault("content", "")
    return fields


async def encode(text: str, param: str, model: ServedModel, add_special_tokens: bool) -> list[int]:
    try:
        if len(text) <= INLINE_CHARACTERS:
            return model.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)
    except ValueError as error:
        raise invalid(param, str(error)) from None


def _split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt (a text, or token ids) or a list of those."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if not prompt:
        raise invalid("prompt", "the prompt is empty")
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise invalid(
            "prompt", "a list of prompts must hold texts only, or token ids only, or lists of them only"
        )
    return prompt


async def _tokenize(prompt: str | list[int], model: ServedModel, special: bool) -> tuple[list[int], str]:
    if isinstance(prompt, str):
        ids, text = await encode(prompt, "prompt", model, special), prompt
    else:
        ids, text = prompt, ""
        check_token_ids("prompt", ids, model)
    if not ids:
        raise invalid("prompt", "the prompt is empty")
    return ids, text or model.tokenizer.decode(ids)


def check_token_ids(param: str, ids: "list[int] | dict[int, float]", model: ServedModel) -> None:
    wrong = next((token_id for token_id in ids if token_id >= model.vocab_size), None)
    if wrong is not None:
        raise invalid(
            param, f"{param}: token id {wrong} is not below the vocabulary's size, {model.vocab_size}"
        )


def _fit(param: str, ids: list[int], text: str, wanted: int | None, default: int, limits: Limits) -> Prompt:
    """Make sure that prompt and output fit; without a wish, the output gets what is left, up to
    ``default``."""
    limit, what = limits.max_model_len, "the model's context"
    if limits.max_pool_tokens is not None and limits.max_pool_tokens < limit:
        limit, what = limits.max_pool_tokens, "the KV cache of the largest worker"
    if len(ids) + (wanted or 1) > limit:
        raise context_length_exceeded(limit, len(ids), wanted or 1, what, param)
    return Prompt(tuple(ids), text, wanted or min(default, limit - len(ids)))


def _job(
    endpoint: Endpoint, options: Options, prompts: list[Prompt], sampling: Sampling, limits: Limits
) -> Job:
    n = options.n or 1
    if n * len(prompts) > limits.max_choices:
        text = f"{len(prompts)} prompts with n = {n} are more than {limits.max_choices} sequences"
        raise invalid("n", text)
    if options.response_format is not None and options.response_format.type != "text":
        raise unsupported("response_format")
    if options.stream_options is not None and not options.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    stop = options.stop or []
    return Job(
        endpoint=endpoint,
        prompts=tuple(prompts),
        n=n,
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(options.stream),
        include_usage=options.stream_options is not None and bool(options.stream_options.include_usage),
        timeout_s=min(options.timeout_s or limits.max_timeout_s, limits.max_timeout_s),
        include_stop=bool(options.include_stop_str_in_output),
        skip_special_tokens=options.skip_special_tokens is not False,
        return_token_ids=bool(options.return_token_ids),
        timings=bool(options.timings),
        priority=options.priority or 0,
        cache_salt=options.cache_salt or "",
    )


def _sampling(
    options: Options, prompts: list[Prompt], num_logprobs: int | None, model: ServedModel
) -> Sampling:
    max_tokens = min(prompt.max_tokens for prompt in prompts)
    if (options.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {options.min_tokens}, more than max_tokens, {max_tokens}")
    check_token_ids("logit_bias", options.logit_bias or {}, model)
    check_token_ids("stop_token_ids", options.stop_token_ids or [], model)
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens or 0,
        temperature=1.0 if options.temperature is None else options.temperature,
        top_k=max(0, options.top_k or 0),
        top_p=1.0 if options.top_p is None else options.top_p,
        min_p=options.min_p or 0.0,
        repetition_penalty=options.repetition_penalty or 1.0,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        logit_bias=options.logit_bias or {},
        seed=random_seed() if options.seed is None else options.seed,
        stop_token_ids=tuple(options.stop_token_ids or ()),
        ignore_eos=bool(options.ignore_eos),
        num_logprobs=num_logprobs,
    )
