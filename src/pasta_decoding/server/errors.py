"""Errors as OpenAI's clients expect them, whatever went wrong and wherever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.remote.completions import RemoteError
from pasta_decoding.runtime.worker import ClosedError
from pasta_decoding.server.capacity import BusyError
from pasta_decoding.server.requests import FIELDS
from pasta_decoding.server.schema import ErrorDetail, ErrorReply

MAX_EXCERPT_CHARS = 200
INVALID = "invalid_request_error"


class ApiError(Exception):
    """A request that gets an error for an answer: its status, and what the reply says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorReply(
            error=ErrorDetail(message=message, type=kind, param=param, code=code)
        )
        self.headers = headers

    def response(self) -> Response:
        """Return the reply."""
        return Response(
            self.body.model_dump_json(), self.status, self.headers, media_type="application/json"
        )


def too_many(message: str, code: str, retry_after_s: int) -> ApiError:
    """Return the error for a request that there is no room for now."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code=code, headers=headers)


def busy(retry_after_s: int) -> ApiError:
    """Return the error for a request that finds the queue full."""
    message = f"the server has as many requests as it takes; try again in {retry_after_s} s"
    return too_many(message, "queue_full", retry_after_s)


def mistake(error: PastaError, prompt: str | None = None) -> ApiError:
    """Return the error for a request that the decoder refuses. `prompt`: the field that has it."""
    message = f"{error}. {_sentence(error.hint)}" if error.hint else str(error)
    param = prompt if error.code == TOO_LONG and error.field is None else error.field
    return ApiError(400, message, param=param, code=error.code)


def failure(reason: BaseException | None) -> ApiError:
    """Return the error for an answer that broke for no reason of the client's; the log has it."""
    if isinstance(reason, ClosedError):
        return gone()
    if isinstance(reason, RemoteError):
        message = f"the model's own server failed: {reason.reason}"
        return ApiError(502, message, kind="server_error", code="upstream_failed")
    return ApiError(500, "the engine failed; the server's log says why", kind="server_error")


def gone() -> ApiError:
    """Return the error for a request that nothing is alive to answer, or to answer to the end."""
    message = "what writes the answers has stopped; the server has to be started again"
    return ApiError(503, message, kind="server_error", code="engine_stopped")


def install(app: FastAPI) -> None:
    """Give every error of the application OpenAI's shape."""

    async def on_mistake(request: Request, error: Exception) -> Response:
        assert isinstance(error, PastaError), "the handler is for this kind"
        prompt = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
        return mistake(error, prompt).response()

    def handle(kind: type[Exception], reply: Callable[[Any], ApiError]) -> None:
        async def on_error(_request: Request, error: Exception) -> Response:
            return reply(error).response()

        app.add_exception_handler(kind, on_error)

    async def on_status(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "the handler is for this kind"
        return of_status(request, error).response()

    handle(ApiError, lambda error: error)
    app.add_exception_handler(PastaError, on_mistake)
    handle(BusyError, lambda error: busy(error.retry_after_s))
    handle(ClosedError, failure)
    handle(RequestValidationError, lambda error: invalid(error.errors()))
    handle(Exception, failure)
    app.add_exception_handler(HTTPException, on_status)


def invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for a body that is not as the schema has it: the first problem in it."""
    problem = problems[0]
    if problem["type"] == "json_invalid":
        character = problem["loc"][1]
        message = f"the body is not JSON: {problem['ctx']['error']} at character {character}"
        return ApiError(400, message, code="invalid_json")
    # A body that is not declared as JSON is not read: pages of other sites can send such.
    if isinstance(problem["input"], bytes):
        message = "the body has to be sent as JSON, with the header Content-Type: application/json"
        return ApiError(415, message, code="unsupported_media_type")
    if named := problem.get("ctx", {}).get("param"):
        return ApiError(400, str(problem["msg"]), param=named, code="unsupported_parameter")
    where = _field(_place(problem))
    what = str(problem["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{where}: {what}" if where else what, param=where or None)


def of_status(request: Request, error: HTTPException) -> ApiError:
    """Return the error for what the framework refuses: an unknown path, a wrong method, a size."""
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
    """Return what a client sent so that it can be shown: no control characters, and not long."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= MAX_EXCERPT_CHARS else shown[:MAX_EXCERPT_CHARS] + "..."


def _unreadable(cause: BaseException | None) -> str:
    """Say why a body could not be read as JSON at all."""
    if isinstance(cause, RecursionError):
        return "the body is nested too deeply"
    if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):
        return "the body has a number of too many digits"
    return "the body is not JSON in UTF-8"


def _place(problem: Mapping[str, Any]) -> list[str | int]:
    """Return where in the body it is, without the kinds of values that may be of several."""
    _body, *place = problem["loc"]
    return [part for part in place if isinstance(part, int) or part in FIELDS]


def _field(place: Sequence[str | int]) -> str:
    """Name a field as one would write it: messages[0].role."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")


def _sentence(hint: str) -> str:
    text = hint[:1].upper() + hint[1:]
    return text if text.endswith(".") else f"{text}."
