"""What LangChain makes of the API. Runs in an environment of its own: ``with_langchain.py BASE_URL``."""

import sys
from typing import Any

from langchain_core.exceptions import ContextOverflowError  # type: ignore[import-not-found]
from langchain_core.messages import HumanMessage, SystemMessage  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]

CITY = {
    "title": "City",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
    "additionalProperties": False,
}}}  # fmt: skip
ASK = [SystemMessage("Be brief."), HumanMessage("Name three primes.")]


def main(url: str) -> None:
    common: dict[str, Any] = {"base_url": url, "api_key": "none", "model": "default", "temperature": 0}
    chat = ChatOpenAI(**common, max_tokens=12)
    whole = chat.invoke(ASK)
    assert whole.usage_metadata["output_tokens"] == 12
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content
    assert [reply.content for reply in chat.batch([ASK, ASK])] == [whole.content] * 2

    long = ChatOpenAI(**common, max_tokens=200)
    city = long.with_structured_output(CITY, method="json_schema").invoke("Tell me about Paris.")
    assert set(city) == {"name", "population"}
    (call,) = long.bind_tools([WEATHER], tool_choice="weather").invoke("Weather in Paris?").tool_calls
    assert call["name"] == "weather"
    assert set(call["args"]) == {"city"}

    completions = OpenAI(**common, max_tokens=8)
    text = completions.invoke("The capital of France is")
    assert text.startswith(" Paris")
    assert "".join(completions.stream("The capital of France is")) == text

    responses = ChatOpenAI(**common, max_tokens=20, use_responses_api=True)
    assert responses.invoke(ASK).text == "".join(chunk.text for chunk in responses.stream(ASK))

    try:
        chat.invoke("word " * 10_000)
    except ContextOverflowError:
        return
    raise AssertionError("a prompt that is too long was not told as such")


main(sys.argv[1])
