"""From the body of /v1/chat/completions to a Job."""

from msgspec import structs

from proxy.assistant import Dialect
from proxy.call_grammar import calls_grammar
from proxy.errors import invalid
from proxy.job import Job
from proxy.prompts import Limits, Wish, check_fit, render, text_prompt
from proxy.reasoning import CLOSE, OPEN
from proxy.schema import ChatBody, Options, read, unknown_fields
from proxy.served_model import ServedModel
from proxy.structured import Constraint, after_thoughts, constraint_of
from proxy.tools import ToolChoice, choose_tools
from proxy.validate import build_job, build_sampling, check_count, check_model


async def chat_job(body: bytes, model: ServedModel, limits: Limits, trace: str = "") -> Job:
    options, own = read(body, Options), read(body, ChatBody)
    ignored = unknown_fields(body, Options, ChatBody)
    job = await build_chat_job(options, own, model, limits)
    return structs.replace(job, trace=trace, ignored=tuple(ignored))


async def build_chat_job(options: Options, own: ChatBody, model: ServedModel, limits: Limits) -> Job:
    check_model(options.model, model)
    if own.top_logprobs and not own.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    check_count(options, 1, limits)
    choice = choose_tools(own.tools, own.tool_choice, own.parallel_tool_calls)
    variables = own.chat_template_kwargs or {}
    wish = Wish("messages", options.max_completion_tokens or options.max_tokens, limits.max_model_len)
    check_fit(len(own.messages), wish, limits)  # before the work: each is a token at least
    text = render(own.messages, model, own.add_generation_prompt is not False, variables, choice.tools)
    prompt = await text_prompt(text, False, wish, model, limits)
    dialect = _dialect(text, choice, model)
    constraint = _constraint(constraint_of(options), choice, dialect, model)
    num_logprobs = (own.top_logprobs or 0) if own.logprobs else None
    sampling = await build_sampling(options, [prompt], num_logprobs, constraint, model)
    job = build_job("chat", options, [prompt], sampling, limits)
    return structs.replace(job, dialect=dialect, has_named_call=choice.named is not None)


def _dialect(prompt: str, choice: ToolChoice, model: ServedModel) -> Dialect:
    end = prompt.rstrip()
    return Dialect(
        has_thoughts=model.has_thoughts and not end.endswith(CLOSE),  # closed: the model is not to think
        starts_thinking=end.endswith(OPEN),
        call_style=model.call_style if choice.tools else "",
        schemas=choice.schemas(),
    )


def _constraint(
    wanted: Constraint | None, choice: ToolChoice, dialect: Dialect, model: ServedModel
) -> Constraint | None:
    """What is wanted of the answer, calls as an alternative where there are tools, thoughts before it."""
    if choice.is_forced and wanted is not None:
        raise invalid("tool_choice", f"tool_choice asks for a call and {wanted.param} for something else")
    if choice.is_forced:
        wanted = Constraint("tools", calls_grammar(choice, model.call_style))
    elif choice.tools and wanted is not None:
        wanted = Constraint(wanted.param, calls_grammar(choice, model.call_style, wanted.grammar))
    if wanted is not None and dialect.has_thoughts:
        wanted = Constraint(wanted.param, after_thoughts(wanted.grammar, dialect.starts_thinking))
    return wanted
