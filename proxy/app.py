"""The HTTP API: which path does what."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from common.messages import PROTOCOL_VERSION
from proxy.administration import add_workers
from proxy.body import as_json, read_body
from proxy.door import Door
from proxy.errors import ApiError, invalid
from proxy.frontend import Frontend
from proxy.generation import Generation
from proxy.openapi import describe
from proxy.page import add_page
from proxy.prompts import check_token_ids, encode, render
from proxy.reply import IGNORED, ROUTE
from proxy.schema import DetokenizeBody, TokenizeBody, read
from proxy.siblings import metrics_of_all
from proxy.validate import check_model
from proxy.version import VERSION

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(frontend: Frontend) -> ASGIApp:
    config = frontend.config
    app = FastAPI(title="Baton", version=VERSION, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _show_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(ClientDisconnect, _show_nothing)
    app.add_exception_handler(Exception, _show_bug)
    _add_models(app, frontend)
    _add_tokens(app, frontend)
    _add_state(app, frontend)
    add_workers(app, frontend)
    add_page(app, frontend.observer.live, frontend.stopping)
    door = Door(Generation(app, frontend), config.all_keys(), config.admin_key)
    origins = list(config.allowed_origins)
    return with_cors(door, origins) if origins else door


def with_cors(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """In front of the door: a browser asks without a key whether it may ask with one."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", IGNORED, ROUTE],
    )


def _add_models(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return as_json({"object": "list", "data": [_model_card(frontend)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, frontend.model)
        return as_json(_model_card(frontend))


def _add_tokens(app: FastAPI, frontend: Frontend) -> None:
    limit, model = frontend.config.max_body_bytes, frontend.model

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = read(await read_body(request.headers, request.receive, limit), TokenizeBody)
        check_model(body.model, model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            text = render(body.messages, model, body.add_generation_prompt is not False, {})
            ids = await encode(text, "messages", model, add_special_tokens=False)
        else:
            ids = await encode(body.prompt or "", "prompt", model, body.add_special_tokens is not False)
        texts = [model.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
        reply = {"count": len(ids), "max_model_len": frontend.max_model_len, "tokens": ids}
        return as_json(reply | {"token_strs": texts})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = read(await read_body(request.headers, request.receive, limit), DetokenizeBody)
        check_model(body.model, model)
        check_token_ids("tokens", body.tokens, model)
        return as_json({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _add_state(app: FastAPI, frontend: Frontend) -> None:
    registry = frontend.registry

    @app.get("/live")
    async def live() -> Response:
        return as_json({"status": "alive"})

    @app.get("/health")
    @app.get("/ready")
    async def ready() -> Response:
        state = {
            "ready": registry.serves,
            "missing": registry.missing_roles(),
            "workers": {role: len(registry.ready(role)) for role in ("prefill", "decode")},
        }
        return as_json(state, 200 if registry.serves else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        told = frontend.metrics.render()
        asked_alone = request.scope["server"][1] == frontend.config.own_port
        if frontend.config.sibling_ports and not asked_alone:
            told = (await metrics_of_all(told.decode(), frontend.config)).encode()
        return Response(told, media_type=METRICS_TYPE)

    @app.get("/debug/requests")
    async def slowest() -> Response:
        return as_json({"slowest": frontend.observer.slowest.to_json()})

    @app.get("/version")
    async def version() -> Response:
        return as_json({"version": VERSION, "protocol_version": PROTOCOL_VERSION})

    @app.get("/openapi.json")
    async def description() -> Response:
        return as_json(describe())


def _model_card(frontend: Frontend) -> dict[str, Any]:
    return {
        "id": frontend.model.name,
        "object": "model",
        "created": frontend.started_at,
        "owned_by": "baton",
        "root": frontend.model.name,
        "parent": None,
        "max_model_len": frontend.max_model_len,
    }


async def _show_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return as_json(error.body(), error.status, error.headers)


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    shown = ApiError(error.status_code, texts.get(error.status_code, error.detail), code=code)
    return as_json(shown.body(), error.status_code, dict(error.headers or {}))


async def _show_nothing(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _show_bug(_: Request, __: Exception) -> Response:
    """The traceback is logged at the door."""
    shown = ApiError(500, "internal error", "internal_error", code="internal_error")
    return as_json(shown.body(), 500)
