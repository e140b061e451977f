"""What LiteLLM makes of the API. Runs in an environment of its own: ``with_litellm.py BASE_URL``."""

import sys
from typing import Any

import litellm  # type: ignore[import-not-found]

ASK = [{"role": "user", "content": "Name three primes."}]
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
    "additionalProperties": False,
}}}  # fmt: skip


def main(url: str) -> None:
    common: dict[str, Any] = {"api_base": url, "api_key": "none", "temperature": 0}
    chat: dict[str, Any] = common | {"model": "openai/default", "messages": ASK}
    whole = litellm.completion(**chat, max_tokens=12, logprobs=True, top_logprobs=2)
    assert whole.usage.completion_tokens == 12
    assert len(whole.choices[0].logprobs.content) == 12
    chunks = list(
        litellm.completion(**chat, max_tokens=12, stream=True, stream_options={"include_usage": True})
    )
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert told == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12

    choice = {"type": "function", "function": {"name": "weather"}}
    forced = litellm.completion(**chat, max_tokens=100, tools=[WEATHER], tool_choice=choice)
    (call,) = forced.choices[0].message.tool_calls
    assert call.function.name == "weather"

    text: dict[str, Any] = common | {"model": "text-completion-openai/default", "max_tokens": 8}
    completion = litellm.text_completion(**text, prompt="The capital of France is").choices[0].text
    streamed = litellm.text_completion(**text, prompt="The capital of France is", stream=True)
    assert completion.startswith(" Paris")
    assert "".join(chunk.choices[0].text or "" for chunk in streamed) == completion

    response = litellm.responses(
        **common, model="openai/default", input="Name three primes.", max_output_tokens=9
    )
    assert response.output[0].content[0].text

    try:
        litellm.completion(**chat, max_tokens=10**6)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a request that is too long was not told as such")


main(sys.argv[1])
