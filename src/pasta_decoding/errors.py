"""The error for mistakes of users. Any other exception that reaches a user is a bug of Pasta."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit


class PastaError(Exception):
    """A mistake that the user can correct.

    message: what is wrong, and where.
    hint:    what to do next.
    code:    the kind of mistake, for programs.
    field:   the setting that is wrong, for programs.
    """

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code
        self.field = field


TOO_LONG = "context_length_exceeded"
"""The code of a request that does not fit a model or an engine."""


@contextmanager
def errors_as(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a PastaError of one line that begins with `message`."""
    try:
        yield
    except PastaError:
        raise
    except kinds as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PastaError(f"{message}: {reason[:300]}") from error


def excerpt(value: object) -> str:
    """Return at most 200 characters of foreign data, such as a reply, printable and on one line."""
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        value = value["message"]
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= 200 else text[:200] + " ..."


def checked_url(url: str, *, default_path: str = "") -> str:
    """Return a base URL without a slash at its end. Raises PastaError if it is none.

    default_path: added to a URL that has no path.
    """
    with errors_as(f"{url!r} is no base URL such as http://localhost:8000/v1", ValueError):
        parsed = urlsplit(url)
        host = (parsed.hostname or "").encode("idna")  # what a connection would look up
        if parsed.scheme not in ("http", "https") or not host or parsed.port == 0 or parsed.query:
            raise ValueError("it has no http://, no host, or a query")
    path = "" if parsed.path.strip("/") else default_path
    return url.rstrip("/") + path


def require(package: str, *, extra: str, doing: str) -> None:
    """Raise PastaError, with the command that installs it, unless `package` can be imported."""
    if find_spec(package) is None:
        message = f"{doing} needs the package {package}"
        raise PastaError(message, hint=install_command(extra))


def install_command(extra: str, module: Path = Path(__file__)) -> str:
    """Return the command that installs an extra, from the checkout if `module` is in one."""
    root = module.parents[2]
    if (root / "pyproject.toml").is_file():
        return f'pip install -e "{root}[{extra}]"'
    return f'pip install "pasta-decoding[{extra}]"'
