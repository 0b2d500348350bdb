"""The command `compile`."""

from __future__ import annotations

import typer

from pasta_decoding.cli.compiled import compile_checkpoint
from pasta_decoding.cli.engine import Adapter, Dtype, EngineName, Loading, Model, Precision, Threads
from pasta_decoding.models.loading import DEFAULT_ADAPTER


def compile_(
    adapter: Adapter = DEFAULT_ADAPTER,
    model: Model = None,
    dtype: Precision = Dtype.auto,
    threads: Threads = None,
) -> None:
    """Compile a checkpoint for this machine's processor, once: its answers take less time then."""
    loading = Loading(adapter, model, EngineName.compiled, dtype=dtype, threads=threads)
    base, folder = loading.folders()
    _, number_format = loading.computing(base, folder)
    typer.echo(compile_checkpoint(base, folder, number_format, threads))
