"""Making a model call a function: grammars of calls, in the style in which it writes them."""

import json
from typing import Any, NamedTuple

from proxy.schema import Tool
from proxy.structured import ANY_OBJECT, json_grammar, lark_grammar
from proxy.tools import ToolChoice

VALUE = 'value[suffix="\\n</parameter>\\n"]: /(?s:.*)/'
BETWEEN = {"hermes": "\n", "qwen3_coder": "\n", "llama3_json": "; "}


class Rule(NamedTuple):
    """What one function's call looks like, in Lark; ``parts`` are the grammars that it names."""

    text: str
    parts: dict[str, str]


def calls_grammar(choice: ToolChoice, style: str, answer: str = "") -> str:
    """``answer``, a grammar, may come instead of calls that are not forced."""
    rules = [_rule(style, index, tool) for index, tool in enumerate(choice.callable)]
    parts = {name: grammar for rule in rules for name, grammar in rule.parts.items()}
    body = f"call ({_literal(BETWEEN[style])} call)*" if choice.is_parallel else "call"
    if answer and not choice.is_forced:
        parts["answer"] = answer
        body = f"@answer | {body}"
    lines = [f"start: {body}", "call: " + " | ".join(rule.text for rule in rules)]
    if style == "qwen3_coder":
        lines.append(VALUE)
    return lark_grammar("\n".join(lines), parts)


def _rule(style: str, index: int, tool: Tool) -> Rule:
    if style == "qwen3_coder":
        return _tagged(index, tool)
    name, part = json.dumps(tool.function.name), f"a{index}"
    before, after = f'{{"name": {name}, "arguments": ', "}"
    if style == "llama3_json":
        before = before.replace('"arguments"', '"parameters"')
    else:
        before, after = f"<tool_call>\n{before}", f"{after}\n</tool_call>"
    grammar = json_grammar(_schema(tool), _is_lenient(tool))
    return Rule(f"{_literal(before)} @{part} {_literal(after)}", {part: grammar})


def _tagged(index: int, tool: Tool) -> Rule:
    """Parameters come in the order of the schema, those that are not required perhaps."""
    schema = _schema(tool)
    required, definitions = schema.get("required", []), schema.get("$defs", {})
    texts, parts = [], {}
    for number, (key, kind) in enumerate(schema.get("properties", {}).items()):
        if isinstance(kind, dict) and kind.get("type") not in (None, "string"):
            name = f"a{index}x{number}"
            parts[name] = json_grammar({"$defs": definitions, **kind}, _is_lenient(tool))
            value = f"@{name} {_literal(f'{chr(10)}</parameter>{chr(10)}')}"
        else:
            value = "value"
        mark = "" if key in required else "?"
        texts.append(f"({_literal(f'<parameter={key}>{chr(10)}')} {value}){mark}")
    opening = _literal(f"<tool_call>\n<function={tool.function.name}>\n")
    return Rule(" ".join([opening, *texts, _literal("</function>\n</tool_call>")]), parts)


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or ANY_OBJECT


def _is_lenient(tool: Tool) -> bool:
    """What is not strict may have keywords that nobody enforces, as with OpenAI."""
    return not tool.function.strict


def _literal(text: str) -> str:
    return json.dumps(text)
