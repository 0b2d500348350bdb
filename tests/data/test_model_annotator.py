"""The annotator `model`: what it decides by is what the finished annotation gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pasta_decoding.data.annotate.forcing import side_by_side
from pasta_decoding.data.annotate.model import Model
from pasta_decoding.data.annotate.writer import Checkpoint, Thresholds, Writer
from pasta_decoding.data.dataset import Row
from pasta_decoding.data.score import label_logprobs
from pasta_decoding.data.view import segments_of
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import lay_out
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Chunk, Span, Sync, read, show, strip
from pasta_decoding.models.binding import bind
from pasta_decoding.models.loading import _ends  # noqa: F401
