"""Commands on the cache: `cache list`, `cache clean`."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.files import cache_folder, say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.models.bases import Kept


def show() -> None:
    """List what the cache holds: size, last use, and what it is."""
    from pasta_decoding.models.bases import kept

    cache = cache_folder()
    found = kept(cache)
    for one in found:
        used = datetime.fromtimestamp(one.used_s).astimezone()
        typer.echo(
            f"{megabytes(one.size_bytes):>9}  {used:%Y-%m-%d %H:%M}  {one.what:7}  {one.name}"
        )
    say(f"{megabytes(sum(one.size_bytes for one in found))} in {cache}")


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to remove, as `pasta cache list` names it; every export if left out."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove the default model, too; `pasta pull` fetches it.")
    ] = False,
) -> None:
    """Remove exported files, which are made again when they are needed, and what broke off."""
    from pasta_decoding.models.bases import kept, remove

    if names and everything:
        raise PastaError("--all removes everything", hint="Leave out the names, or --all.")
    chosen = _chosen(kept(cache_folder()), names or [], everything=everything)
    for one in chosen:
        remove(one)
        typer.echo(one.name)
    say(f"{megabytes(sum(one.size_bytes for one in chosen))} freed")


def _chosen(found: list[Kept], names: list[str], *, everything: bool) -> list[Kept]:
    from pasta_decoding.models.bases import is_spare

    unknown = set(names) - {one.name for one in found}
    if unknown:
        raise PastaError(
            f"the cache holds no {', '.join(sorted(unknown))}", hint="See `pasta cache list`."
        )
    if names:
        return [one for one in found if one.name in names]
    return [one for one in found if everything or is_spare(one)]


def megabytes(size_bytes: int) -> str:
    """Return a size for a person, in decimal megabytes as disks are sold."""
    return f"{size_bytes / 1e6:.1f} MB"
