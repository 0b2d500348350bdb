"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.runtime.loop import ClosedError
from pasta_decoding.server.requests import FIELDS, WHY_NOT
from pasta_decoding.server.schema import ErrorDetail, ErrorReply

MAX_EXCERPT_CHARS = 200


class ApiError(Exception):
    """An error that a request gets for an answer. `kind`: by status, unless given."""

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
        kind = "rate_limit_error" if status == 429 else "server_error"
        kind = kind if status == 429 or status >= 500 else "invalid_request_error"
        detail = ErrorDetail(message=message, type=kind, param=param, code=code)
        self.status = status
        self.body = ErrorReply(error=detail)
        self.headers = headers

    def response(self) -> Response:
        """Return the reply."""
        body = self.body.model_dump_json()
        return Response(body, self.status, self.headers, media_type="application/json")


def gone(*, stopping: bool) -> ApiError:
    """Return the error for an answer that the worker will not write, or not to the end."""
    if stopping:
        message = "the server is being stopped; try again when it is back"
        return ApiError(503, message, code="server_stopping", headers={"Retry-After": "10"})
    message = "the engine has stopped, and the server has to be started again"
    return ApiError(503, message, code="engine_stopped")


def failure(reason: BaseException, *, stopping: bool = False) -> ApiError:
    """Return the error for an answer that broke through no fault of the client's."""
    if isinstance(reason, ClosedError):
        return gone(stopping=stopping)
    if isinstance(reason, RemoteError):
        message = f"the model's own server failed: {reason.reason}"
        return ApiError(502, message, code="upstream_failed")
    return ApiError(500, "the engine failed; the server's log says why")


def install(app: FastAPI) -> None:
    """Give every error of the application OpenAI's shape."""
    kinds: dict[type[Exception], Callable[[Request, Any], ApiError]] = {
        ApiError: lambda _request, error: error,
        PastaError: _mistake,
        RequestValidationError: lambda _request, error: _invalid(error.errors()[0]),
        HTTPException: _of_status,
    }

    async def reply(request: Request, error: Exception) -> Response:
        convert = next(kinds[one] for one in type(error).__mro__ if one in kinds)
        return convert(request, error).response()

    for kind in kinds:
        app.add_exception_handler(kind, reply)


def _mistake(request: Request, error: PastaError) -> ApiError:
    """Return the error for a request that the decoder refuses."""
    message = f"{error}. {error.hint}" if error.hint else str(error)
    param = error.field
    if error.code == TOO_LONG and param is None:
        param = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
    return ApiError(400, message, param=param, code=error.code)


def _invalid(problem: Mapping[str, Any]) -> ApiError:
    """Return the error for the first problem in a body that is not as the schema has it."""
    if problem["type"] == "json_invalid":
        character = problem["loc"][1]
        message = f"the body is not JSON: {problem['ctx']['error']} at character {character}"
        return ApiError(400, message, code="invalid_json")
    # A body that is not declared as JSON is not read: pages of other sites can send it.
    if isinstance(problem["input"], bytes):
        message = "the body has to be sent as JSON, with the header Content-Type: application/json"
        return ApiError(415, message, code="unsupported_media_type")
    _body, *place = problem["loc"]
    if problem["type"] == "extra_forbidden":
        name = excerpt(str(place[-1]))
        why = f": {WHY_NOT[name]}" if name in WHY_NOT else ""
        message = f"{name} is not supported{why}"
        return ApiError(400, message, param=name, code="unsupported_parameter")
    # Without the kinds of values that a field may have.
    where = _field([part for part in place if isinstance(part, int) or part in FIELDS])
    what = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{where}: {what}" if where else what, param=where or None)


def _of_status(request: Request, error: HTTPException) -> ApiError:
    """Return the error for a refusal by the framework: an unknown path, a wrong method, a size."""
    path = excerpt(request.url.path)
    about = {
        400: _unreadable(error.__cause__),
        404: f"there is nothing at {path}",
        405: f"{excerpt(request.method)} is not allowed at {path}",
        413: "the body is too large for this server",
    }
    message = about.get(error.status_code, str(error.detail))
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def excerpt(text: str) -> str:
    """Return a client's text in a form to show: short, and without control characters."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= MAX_EXCERPT_CHARS else shown[:MAX_EXCERPT_CHARS] + "..."


def _unreadable(cause: BaseException | None) -> str:
    """Say why a body could not be read as JSON at all."""
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):
        return "the body has a number of too many digits"
    return "the body is not JSON in UTF-8"


def _field(place: Sequence[str | int]) -> str:
    """Name a field as one would write it: messages[0].role."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")
