"""How a field of a settings class appears on the command line and in settings files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """Annotates a field: `limit: Annotated[int, Setting("Only the first rows.", min=1)]`.

    `pasta_decoding.cli.options` turns it into an option, and settings files obey its range.

    min, max: the smallest and the largest value; None sets no limit.
    flag:     name of the option if it is not the field's own, as `--max-length`.
    hidden:   settings files have it, the command line has not.
    metavar:  stands for the value in the help; None names the type.
    envvar:   environment variable that gives the value if the command line does not.
    """

    help: str
    min: float | None = None
    max: float | None = None
    flag: str | None = None
    hidden: bool = False
    metavar: str | None = None
    envvar: str | None = None
