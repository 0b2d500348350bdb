"""What a user's mistake raises. Anything else that escapes is a bug of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit


class PastaError(Exception):
    """Something the user can mend: what is wrong and where, and in `hint` what to do next.

    For programs there are the kind of mistake in `code`, and in `field` the setting to blame.
    """

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code
        self.field = field


TOO_LONG = "context_length_exceeded"
"""The code of what does not fit a model or an engine."""


@contextmanager
def errors_as(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise a PastaError of one line that begins with `message` for errors of these kinds."""
    try:
        yield
    except PastaError:
        raise
    except kinds as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PastaError(f"{message}: {reason[:300]}") from error


def excerpt(found: object) -> str:
    """Return the beginning of what came from elsewhere, printable and on one line."""
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        found = found["message"]
    text = " ".join((found if isinstance(found, str) else repr(found)).split())
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 200 else text[:200] + " ..."


def checked_url(url: str, *, alone: str = "") -> str:
    """Return a base URL without a slash at its end; a server alone gets the path `alone`."""
    with errors_as(f"{url!r} is no base URL such as http://localhost:8000/v1", ValueError):
        parsed = urlsplit(url)
        host = (parsed.hostname or "").encode("idna")  # what a connection would look up
        if parsed.scheme not in ("http", "https") or not host or parsed.port == 0 or parsed.query:
            raise ValueError("it has no http://, no host, or a query")
    return url.rstrip("/") + ("" if parsed.path.strip("/") else alone)


def require(package: str, *, extra: str, doing: str) -> None:
    """Raise PastaError, with the command that installs it, unless `package` can be imported."""
    if find_spec(package) is None:
        message = f"{doing} needs the package {package}"
        raise PastaError(message, hint=install_command(extra))


def install_command(extra: str, module: Path = Path(__file__)) -> str:
    """Return the command that installs an extra: as a checkout has it, or as an index has it.

    module: this file, which tells the one from the other.
    """
    root = module.parents[2]
    if (root / "pyproject.toml").is_file():
        return f'pip install -e "{root}[{extra}]"'
    return f'pip install "pasta-decoding[{extra}]"'
