"""Structured outputs: from what a client asks for to one grammar, checked before any worker hears of it.

``response_format`` as OpenAI has it; ``structured_outputs``, and the older ``guided_json``, ``guided_regex``,
``guided_choice`` and ``guided_grammar``, as vLLM has them. At most one of all these may be given.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from common.grammar import GrammarError
from proxy.errors import invalid, unsupported
from proxy.schema import Options, ResponseFormat, StructuredOutputs
from proxy.served_model import ServedModel

MAX_GRAMMAR_BYTES = 128 << 10
MAX_GBNF_CHARACTERS = 16 << 10
MAX_CHOICES = 2000
MAX_OPTIONAL_PROPERTIES = 1000  # of a JSON schema: any may be left out, and the grammar grows with the square
# Of JSON. Without a bound, a model that has nothing to say may put out spaces until its tokens are used up.
WHITESPACE = r"[ \n\t]{1,64}"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Constraint(msgspec.Struct, frozen=True):
    param: str  # where the client asked for it
    grammar: str


def constraint_of(options: Options) -> Constraint | None:
    """Raises ApiError where more than one thing is asked for, or one that makes no sense."""
    found = [*_of_response_format(options.response_format), *_of_structured(options.structured_outputs)]
    found += _of_guided(options)
    if len(found) > 1:
        names = ", ".join(constraint.param for constraint in found)
        raise invalid(found[1].param, f"only one of these can be followed: {names}")
    return found[0] if found else None


async def check_grammar(constraint: Constraint, model: ServedModel) -> None:
    """Compile it, aside of other requests' streams. Raises ApiError where that does not work."""
    if len(constraint.grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise invalid(constraint.param, f"{constraint.param} is larger than {MAX_GRAMMAR_BYTES} bytes")
    if model.grammars.is_known(constraint.grammar):
        return
    num_optional = count_optional(json.loads(constraint.grammar))
    if num_optional > MAX_OPTIONAL_PROPERTIES:
        text = f"{num_optional} properties need not be there; {MAX_OPTIONAL_PROPERTIES} such are allowed"
        raise invalid(constraint.param, f"{constraint.param}: {text}")
    try:
        await asyncio.to_thread(model.grammars.compile, constraint.grammar)
    except GrammarError as error:
        raise invalid(constraint.param, f"{constraint.param}: {error}") from None


def count_optional(schema: Any) -> int:
    """Properties of objects in ``schema``, at any depth, that are not required."""
    found, parts = 0, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            properties, required = part.get("properties"), part.get("required")
            if isinstance(properties, dict):
                found += len(properties.keys() - (required if isinstance(required, list) else []))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return found


def json_grammar(schema: Mapping[str, Any] | bool, lenient: bool = False) -> str:
    """``lenient``: keywords that cannot be enforced are left out instead of refused."""
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    content = schema if isinstance(schema, bool) else {"x-guidance": options} | dict(schema)
    return json.dumps({"grammars": [{"json_schema": content}]})


def lark_grammar(text: str, parts: Mapping[str, str] | None = None) -> str:
    """``text`` may name each of ``parts``, grammars of their own, as ``@name``."""
    named = [entry for name, part in (parts or {}).items() for entry in _named(name, part)]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]})


def after_thoughts(grammar: str, starts_thinking: bool) -> str:
    """The grammar holds for what comes after the closing tag; thoughts are free."""
    begin = "thought GAP" if starts_thinking else '("<think>" thought GAP)?'
    rules = [f"start: {begin} @message", 'thought[suffix="</think>"]: /(?s:.*)/', r"GAP: /\n{0,2}/"]
    return lark_grammar("\n".join(rules), {"message": grammar})


def _named(name: str, grammar: str) -> list[dict[str, Any]]:
    """A grammar's parts, the first of which gets the name."""
    first, *others = json.loads(grammar)["grammars"]
    return [first | {"name": name}, *others]


def _of_response_format(given: ResponseFormat | None) -> list[Constraint]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Constraint("response_format", json_grammar(ANY_OBJECT))]
    if given.type != "json_schema":
        text = f"response_format is text, json_object or json_schema, not {given.type!r}"
        raise invalid("response_format", text)
    if given.json_schema is None:
        raise invalid("response_format", "response_format of type json_schema needs a json_schema")
    schema = given.json_schema.schema
    return [Constraint("response_format", json_grammar(ANY_OBJECT if schema is None else schema))]


def _of_structured(given: StructuredOutputs | None) -> list[Constraint]:
    if given is None:
        return []
    if given.structural_tag is not None:
        raise unsupported("structured_outputs.structural_tag")
    kinds = ("json", "regex", "choice", "grammar")
    found = [
        Constraint("structured_outputs", _grammar(kind, value, "structured_outputs"))
        for kind in kinds
        if (value := getattr(given, kind)) is not None
    ]
    if given.json_object:
        found.append(Constraint("structured_outputs", json_grammar(ANY_OBJECT)))
    if len(found) != 1:
        text = f"structured_outputs takes one of {', '.join(kinds)}, json_object, not {len(found)} of them"
        raise invalid("structured_outputs", text)
    return found


def _of_guided(options: Options) -> list[Constraint]:
    given = {
        "json": options.guided_json,
        "regex": options.guided_regex,
        "choice": options.guided_choice,
        "grammar": options.guided_grammar,
    }
    return [
        Constraint(f"guided_{kind}", _grammar(kind, value, f"guided_{kind}"))
        for kind, value in given.items()
        if value is not None
    ]


def _grammar(kind: str, value: Any, param: str) -> str:
    if kind == "json":
        return json_grammar(_schema(value, param))
    if kind == "choice":
        if not 0 < len(value) <= MAX_CHOICES:
            raise invalid(param, f"{param}: between 1 and {MAX_CHOICES} choices, not {len(value)}")
        return lark_grammar("start: " + " | ".join(json.dumps(text) for text in value))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    return lark_grammar(_lark(value, param))


def _schema(value: Any, param: str) -> dict[str, Any]:
    """Given as an object, or as a text that holds one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(param, f"{param} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(param, f"{param} must be a JSON schema")
    return value


def _lark(text: str, param: str) -> str:
    """GBNF (``::=``), as llama.cpp and vLLM's xgrammar take it, becomes Lark, as llguidance does."""
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF_CHARACTERS:
        raise invalid(param, f"{param}: GBNF of more than {MAX_GBNF_CHARACTERS} characters; use Lark")
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise invalid(param, f"{param}: {error}") from None
