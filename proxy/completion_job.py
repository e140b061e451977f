"""From the body of /v1/completions to a Job."""

from msgspec import structs

from proxy.errors import unsupported
from proxy.job import Job
from proxy.prompts import Limits, Wish, split_prompts, text_prompt, token_prompt
from proxy.schema import CompletionBody, Options, read, unknown_fields
from proxy.served_model import ServedModel
from proxy.structured import constraint_of
from proxy.validate import build_job, build_sampling, check_count, check_model, check_prompt_logprobs

DEFAULT_TOKENS = 16  # OpenAI's


async def completion_job(body: bytes, model: ServedModel, limits: Limits, trace: str = "") -> Job:
    options, own = read(body, Options), read(body, CompletionBody)
    ignored = unknown_fields(body, Options, CompletionBody)
    check_model(options.model, model)
    if own.suffix:
        raise unsupported("suffix")
    if own.best_of not in (None, options.n or 1):
        raise unsupported("best_of")
    parts = split_prompts(own.prompt)
    check_count(options, len(parts), limits)
    special = own.add_special_tokens is not False
    wish = Wish("prompt", options.max_tokens or options.max_completion_tokens, DEFAULT_TOKENS)
    prompts = [
        await text_prompt(part, special, wish, model, limits)
        if isinstance(part, str)
        else token_prompt(part, wish, model, limits)
        for part in parts
    ]
    sampling = await build_sampling(options, prompts, own.logprobs, constraint_of(options), model)
    if own.echo and own.logprobs is not None:
        check_prompt_logprobs("echo", own.logprobs, prompts)
        num_prompt = max(own.logprobs, options.prompt_logprobs or 0)
        sampling = structs.replace(sampling, num_prompt_logprobs=num_prompt)
    job = build_job("completions", options, prompts, sampling, limits)
    return structs.replace(job, echo=bool(own.echo), trace=trace, ignored=tuple(ignored))
