"""The command `pasta`: read flags, call one function, print.

Exit status: 0 fine, 1 problems found, 2 could not run, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; no user's mistake ends in a traceback."""
    from pasta_decoding.errors import PastaError

    _quiet_libraries()
    _log_to_stderr()
    try:
        return _invoke(sys.argv[1:] if arguments is None else arguments)
    except PastaError as error:
        print(f"pasta: {error}", file=sys.stderr)
        if error.hint:
            print(error.hint, file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        print(f"pasta: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:  # which may say what becomes of the work
        print("\npasta: interrupted" + f": {stopped}" * bool(str(stopped)), file=sys.stderr)
        return 130


def _invoke(arguments: Sequence[str]) -> int:
    """Parse the command line and run its command. Raises PastaError for a wrong command line."""
    import typer
    from typer.main import get_command

    from pasta_decoding.cli.app import GROUPS, make_app
    from pasta_decoding.errors import PastaError

    # By its version, typer uses click or a copy of it inside; this is the right one's class.
    usage_error: Any = typer.BadParameter.__base__
    command = get_command(make_app(arguments))
    help_asked = ["--help"] if " ".join(arguments) in ("", *GROUPS) else []
    try:
        with command.make_context("pasta", [*arguments, *help_asked]) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except usage_error as error:
        where = error.ctx.command_path if error.ctx else "pasta"
        message = " ".join(error.format_message().split()).rstrip(".")
        raise PastaError(f"{message}; see {where} --help") from error
    return 0


class _Stderr(logging.Handler):
    """Writes a line for each record, of the one process that speaks (`accelerate launch`)."""

    def emit(self, record: logging.LogRecord) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(self.format(record), file=sys.stderr)


def _log_to_stderr() -> None:
    log = logging.getLogger("pasta_decoding")
    log.handlers[:] = [_Stderr()]
    log.setLevel(logging.INFO)


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Libraries call each other by deprecated names; a user can do nothing about it. When peft 0.21
    # does so, the warning comes from transformers 5.23.
    for library in ("accelerate", "peft", "torch", "transformers"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}(\.|$)")


def run() -> None:
    """The console script.

    One of several processes does not take the interpreter down. Gloo's threads may still hold
    tensors then, which aborts the process (pytorch/pytorch#179291), and the launcher kills the
    others and calls what they did a failure.
    """
    status = main()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
