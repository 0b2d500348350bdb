"""Errors as OpenAI's clients expect them."""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pasta_decoding.errors import TOO_LONG, PastaError, excerpt
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.scheduling.loop import ClosedError
from pasta_decoding.server.requests import FIELDS
from pasta_decoding.server.schema import ErrorDetail, ErrorReply

TRY_AGAIN = {"Retry-After": "10"}


class ApiError(Exception):
    """An error that a client gets as the reply to its request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        if status == 429:
            kind = "rate_limit_error"
        else:
            kind = "server_error" if status >= 500 else "invalid_request_error"
        detail = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.status = status
        self.headers = headers
        self.body = ErrorReply(error=detail)

    def response(self) -> Response:
        body = self.body.model_dump_json()
        return Response(body, self.status, self.headers, media_type="application/json")


def gone(*, stopping: bool) -> ApiError:
    """Return the error for an answer that the worker will not write, or not to the end."""
    if stopping:
        message = "the server is being stopped; try again when it is back"
        return ApiError(503, message, code="server_stopping", headers=TRY_AGAIN)
    message = "the engine has stopped, and the server has to be started again"
    return ApiError(503, message, code="engine_stopped")


def failure(reason: BaseException, *, stopping: bool = False) -> ApiError:
    """Return the error for an answer that failed through no fault of the client."""
    if isinstance(reason, ClosedError):
        return gone(stopping=stopping)
    if isinstance(reason, RemoteError):
        message = f"the model's own server failed: {reason.reason}"
        return ApiError(502, message, code="upstream_failed")
    return ApiError(500, "the engine failed; the server's log says why")


def install(app: FastAPI) -> None:
    """Give every error of the application OpenAI's shape."""

    def add(kind: type[Exception], convert: Callable[[Request, Any], ApiError]) -> None:
        async def reply(request: Request, error: Exception) -> Response:
            return convert(request, error).response()

        app.add_exception_handler(kind, reply)

    add(ApiError, lambda _request, error: error)
    add(PastaError, _mistake)
    add(RequestValidationError, lambda _request, error: _invalid(error.errors()[0]))
    add(HTTPException, _of_status)


def _mistake(request: Request, error: PastaError) -> ApiError:
    message = f"{error}. {error.hint}" if error.hint else str(error)
    param = error.field
    if error.code == TOO_LONG and param is None:
        param = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
    return ApiError(400, message, param=param, code=error.code)


def _invalid(problem: Mapping[str, Any]) -> ApiError:
    """Return the error for a problem that pydantic has with a body."""
    if problem["type"] == "json_invalid":
        character = problem["loc"][1]
        message = f"the body is not JSON: {problem['ctx']['error']} at character {character}"
        return ApiError(400, message, code="invalid_json")
    # A body that is not declared as JSON is not read: pages of other sites can send it.
    if isinstance(problem["input"], bytes):
        message = "the body has to be sent as JSON, with the header Content-Type: application/json"
        return ApiError(415, message, code="unsupported_media_type")
    _body, *path = problem["loc"]
    if problem["type"] == "extra_forbidden":
        *parents, name = path
        param = excerpt(f"{_param_of(parents)}.{name}".removeprefix("."))
        message = f"{param} is not supported"
        return ApiError(400, message, param=param, code="unsupported_parameter")
    param = _param_of(path)
    message = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


def _param_of(path: Sequence[str | int]) -> str:
    """Return pydantic's path to a field as Python has it: `messages[0].role`.

    The tags of a field's types are in the path as well, and are left out.
    """
    param = ""
    for step in path:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in FIELDS:
            param += f".{step}"
    return param.removeprefix(".")


def _of_status(request: Request, error: HTTPException) -> ApiError:
    """Return the error for a refusal by the framework: no JSON, an unknown path, a wrong method."""
    message = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code == 400:
        message = f"the body cannot be read as JSON: {error.__cause__}"
    if error.status_code == 404 and not request.url.path.startswith("/v1/"):
        message = f"the API is under /v1; {message}"
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, excerpt(message), code=code, headers=error.headers)
