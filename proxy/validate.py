"""From the options of a request to a Job, or to an ApiError that names what is wrong.

All that can be refused is refused here, before any worker hears of the request.
"""

from common.messages import Sampling
from proxy.errors import ApiError, invalid
from proxy.job import Endpoint, Job, Prompt, random_seed
from proxy.prompts import Limits, check_token_ids
from proxy.schema import Options
from proxy.served_model import ServedModel
from proxy.structured import Constraint, check_grammar

MAX_PROMPT_LOGPROBS = 400_000  # alternatives included


def check_model(name: str | None, model: ServedModel) -> None:
    if name is not None and name not in model.names:
        text = f"the model {name!r} does not exist; this server serves {model.name!r}"
        raise ApiError(404, text, param="model", code="model_not_found")


def check_count(options: Options, num_prompts: int, limits: Limits) -> None:
    n = options.n or 1
    if n * num_prompts > limits.max_choices:
        text = f"{num_prompts} prompts with n = {n} are more than {limits.max_choices} sequences"
        raise invalid("n", text)


def check_prompt_logprobs(param: str, num_logprobs: int, prompts: list[Prompt]) -> None:
    """They come in one message, and stay in memory until the reply."""
    most = max(len(prompt.token_ids) for prompt in prompts) * (num_logprobs + 1)
    if most > MAX_PROMPT_LOGPROBS:
        text = f"{most} log-probabilities of a prompt are more than {MAX_PROMPT_LOGPROBS}"
        raise invalid(param, text)


def build_job(
    endpoint: Endpoint, options: Options, prompts: list[Prompt], sampling: Sampling, limits: Limits
) -> Job:
    if options.stream_options is not None and not options.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    stop = options.stop or []
    return Job(
        endpoint=endpoint,
        prompts=tuple(prompts),
        n=options.n or 1,
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(options.stream),
        include_usage=options.stream_options is not None and bool(options.stream_options.include_usage),
        timeout_s=min(options.timeout_s or limits.max_timeout_s, limits.max_timeout_s),
        include_stop=bool(options.include_stop_str_in_output),
        skip_special_tokens=options.skip_special_tokens is not False,
        tells_prompt_logprobs=options.prompt_logprobs is not None,
        return_token_ids=bool(options.return_token_ids),
        return_workers=bool(options.return_workers),
        timings=bool(options.timings),
        priority=options.priority or 0,
        cache_salt=options.cache_salt or "",
    )


async def build_sampling(
    options: Options,
    prompts: list[Prompt],
    num_logprobs: int | None,
    constraint: Constraint | None,
    model: ServedModel,
) -> Sampling:
    max_tokens = min(prompt.max_tokens for prompt in prompts)
    if (options.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {options.min_tokens}, more than max_tokens, {max_tokens}")
    if options.prompt_logprobs is not None:
        if options.stream:
            raise invalid("prompt_logprobs", "prompt_logprobs are not told in streams")
        check_prompt_logprobs("prompt_logprobs", options.prompt_logprobs, prompts)
    check_token_ids("logit_bias", options.logit_bias or {}, model)
    check_token_ids("stop_token_ids", options.stop_token_ids or [], model)
    if constraint is not None:
        await check_grammar(constraint, model)
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
        num_prompt_logprobs=options.prompt_logprobs,
        grammar=constraint.grammar if constraint else "",
        num_logprobs=num_logprobs,
    )
