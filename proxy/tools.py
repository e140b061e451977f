"""Tools: which functions a model may call, and how it is told of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from proxy.errors import invalid
from proxy.schema import NamedChoice, Tool
from proxy.structured import ANY_OBJECT

MAX_TOOLS = 128
# For templates that know nothing of tools. The form is that of the Hermes models, which many others learnt.
INTRODUCTION = """You can call functions. Their signatures, as JSON, one on a line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags, like this:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


class ToolChoice(NamedTuple):
    """What the client allows and wants."""

    tools: tuple[Tool, ...] = ()
    is_forced: bool = False  # at least one call must come
    named: str | None = None  # and it must be of this function
    is_parallel: bool = True  # more than one may come

    @property
    def callable(self) -> list[Tool]:
        return [tool for tool in self.tools if self.named in (None, tool.function.name)]

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool.function.name: tool.function.parameters or ANY_OBJECT for tool in self.tools}


def choose_tools(
    tools: Sequence[Tool] | None, choice: str | NamedChoice | None, parallel: bool | None
) -> ToolChoice:
    """Raises ApiError for a choice that the tools do not allow."""
    given = tuple(tools or ())
    _check_tools(given)
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise invalid("tool_choice", f"tool_choice is auto, none, required or a function, not {choice!r}")
    is_forced = choice == "required" or named is not None
    if is_forced and not given:
        raise invalid("tool_choice", "tool_choice asks for a call, but there are no tools")
    if named is not None and named not in {tool.function.name for tool in given}:
        raise invalid("tool_choice", f"there is no tool named {named!r}")
    if choice == "none":
        return ToolChoice()
    return ToolChoice(given, is_forced, named, parallel is not False and named is None)


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools are more than {MAX_TOOLS}")
    names = [tool.function.name for tool in tools]
    for tool in tools:
        if tool.type != "function":
            raise invalid("tools", f"tools are of type function, not {tool.type!r}")
        if names.count(tool.function.name) > 1:
            raise invalid("tools", f"there are two tools named {tool.function.name!r}")


def introduce(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages for a template without tools: they are described in the system message, and calls and
    their results, which the template would leave out, become text."""
    lines = "\n".join(json.dumps(plain_tool(tool), ensure_ascii=False) for tool in tools)
    introduction = INTRODUCTION.format(tools=lines)
    spelled = [_spelled_out(message) for message in messages]
    if spelled and spelled[0]["role"] == "system":
        first = spelled[0] | {"content": f"{spelled[0]['content']}\n\n{introduction}"}
        return [first, *spelled[1:]]
    return [{"role": "system", "content": introduction}, *spelled]


def _spelled_out(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return message | {"content": "\n".join(filter(None, [content, *calls]))} if calls else message


def plain_tool(tool: Tool) -> dict[str, Any]:
    """As templates expect it."""
    fields: dict[str, Any] = msgspec.to_builtins(tool)
    return fields
