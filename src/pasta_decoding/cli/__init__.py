"""The command `pasta`: read flags, call one function, print.

Exit status: 0 fine, 1 problems found, 2 could not run, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; no user's mistake ends in a traceback."""
    from typer.main import get_command

    from pasta_decoding.cli.app import app
    from pasta_decoding.errors import PastaError

    _quiet_libraries()
    try:
        status = get_command(app).main(arguments, prog_name="pasta", standalone_mode=False)
    except PastaError as error:
        print(f"pasta: {error}", file=sys.stderr)
        if error.hint:
            print(error.hint, file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (KeyboardInterrupt, EOFError):
        print("\npasta: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 (the process edge; what is unknown is raised again)
        return _command_line_error(error)
    return status if isinstance(status, int) else 0


def _command_line_error(error: Exception) -> int:
    """Show a wrong command line as such; anything else is a bug and keeps its traceback."""
    import click

    if isinstance(error, click.exceptions.Abort):
        print("\npasta: interrupted", file=sys.stderr)
        return 130
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    raise error


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def run() -> None:
    """The console script."""
    sys.exit(main())
