"""The OpenAPI description of the API, from the classes that bodies are read with."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from proxy.responses_job import NOT_IN_RESPONSES
from proxy.responses_schema import ResponsesBody
from proxy.schema import ChatBody, CompletionBody, DetokenizeBody, Options, TokenizeBody
from proxy.version import VERSION

Json = dict[str, Any]

BODIES: dict[str, tuple[str, tuple[type[Struct], ...]]] = {
    "/v1/completions": ("Continue a text", (Options, CompletionBody)),
    "/v1/chat/completions": ("Continue a conversation", (Options, ChatBody)),
    "/v1/responses": (
        "Continue a conversation, in the form of OpenAI's Responses API",
        (Options, ResponsesBody),
    ),
    "/tokenize": ("Text to token ids", (TokenizeBody,)),
    "/detokenize": ("Token ids to text", (DetokenizeBody,)),
}
READS = {
    "/v1/models": "The model that is served",
    "/v1/models/{name}": "The same, by name",
    "/workers": "The workers as this proxy sees them",
    "/health": "Whether a request would be served now",
    "/ready": "The same",
    "/live": "Whether the process is alive",
    "/debug/requests": "The slowest requests, with their routes and where their time went",
    "/version": "Versions of the server and of the protocol between its processes",
    "/metrics": "Figures for Prometheus",
    "/openapi.json": "This description",
}
ACTIONS = {
    ("post", "/workers/{name}/drain"): ("Let a worker finish what it has and end", "202"),
    ("delete", "/workers/{name}"): ("Have nothing to do with a worker any more", "200"),
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
STATUSES = {
    "400": "Something in the request cannot be done; error.param names it",
    "401": "The API key is missing or wrong",
    "403": "This takes a key of an administrator",
    "404": "No such model, or no such worker",
    "408": "The body did not arrive in time",
    "409": "The worker is not ready, or several have that name",
    "413": "The body is too large",
    "415": "The body is compressed",
    "429": "Too many requests are under way; Retry-After says when to try again",
    "500": "A bug of the server",
    "503": "No worker can serve the request now; Retry-After says when to try again",
    "504": "The request's time is up",
}


def describe() -> Json:
    kinds = list({kind for _, used in BODIES.values() for kind in used})
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for path, (_, used) in BODIES.items():
        schemas[_name(path)] = _merged(path, [schemas[kind.__name__] for kind in used])
    paths: Json = {path: {"post": _post(path, summary)} for path, (summary, _) in BODIES.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in READS.items()}
    paths |= {path: {method: _action(*told)} for (method, path), told in ACTIONS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


NAME: Json = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def _name(path: str) -> str:
    return path.removeprefix("/v1").strip("/").replace("/", "_") + "_body"


def _merged(path: str, parts: list[Json]) -> Json:
    """One object with the fields of all parts."""
    fields = {name: field for part in parts for name, field in part["properties"].items()}
    if path == "/v1/responses":
        fields = {name: field for name, field in fields.items() if name not in NOT_IN_RESPONSES}
    required = [name for part in parts for name in part.get("required", ())]
    return {"type": "object", "properties": fields, "required": required}


def _post(path: str, summary: str) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMED:
        content["text/event-stream"] = {}  # what an event holds, docs/api.md says
    statuses = (
        {code: text for code, text in STATUSES.items() if code not in ("403", "409")}
        if path in STREAMED
        else {code: STATUSES[code] for code in ("400", "401", "404", "408", "413", "415")}
    )
    schema = {"$ref": f"#/components/schemas/{_name(path)}"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The reply", "content": content}} | _errors(statuses),
    }


def _get(path: str, summary: str) -> Json:
    kind = "text/plain" if path == "/metrics" else "application/json"
    schema = {"type": "string" if path == "/metrics" else "object"}
    responses: Json = {"200": {"description": summary, "content": {kind: {"schema": schema}}}}
    responses |= _errors({"401": STATUSES["401"]})
    found: Json = {"summary": summary, "responses": responses}
    if path in ("/health", "/ready"):
        content = {"application/json": {"schema": {"type": "object"}}}
        responses["503"] = {"description": "It would not, and why", "content": content}
    if "{name}" in path:
        found["parameters"] = [NAME]
        responses |= _errors({"404": STATUSES["404"]})
    return found


def _action(summary: str, status: str) -> Json:
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    responses: Json = {status: {"description": "The worker as it is now", "content": content}}
    responses |= _errors({code: STATUSES[code] for code in ("401", "403", "404", "409")})
    return {"summary": summary, "parameters": [NAME], "responses": responses}


def _errors(statuses: Mapping[str, str]) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": text, "content": content} for code, text in statuses.items()}
