"""What people have today: `generate` of the package transformers, one answer at a time.

Alone it is a sequential baseline; with prompt lookup (Saxena 2023, `prompt_lookup_num_tokens`) it
is the rival that needs no second model: what followed the last two tokens when they stood in the
text before is drafted, and one pass verifies it. So it wins most where a text repeats itself.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pasta_decoding.data.questions import Question
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.methods.base import Asking, of_question
from pasta_decoding.evaluation.records import Record
from pasta_decoding.lang.tree import Span, show
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import SamplingParams

LOOKUP_TOKENS = 10
"""The most that are drafted at once, as transformers' own candidate generator has it."""


@dataclass(frozen=True, slots=True)
class Theirs:
    """Asks a model as anybody would. Its answers block, whoever else is asked meanwhile.

    model:         unpatched, in the place where it computes.
    lookup_tokens: the most that are drafted at once; None: nothing is.
    sampling:      its temperature and top-p are used; greedy unless told otherwise.
    """

    decoder: Decoder
    model: Any
    max_tokens: int
    max_seconds: float
    lookup_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def ask(self, question: Question) -> Asking[Record]:
        """See `Method`."""
        yield from ()  # no stage: the engine of this package is not asked
        prompt = self.decoder.prompt_ids(question.instruction, self.max_tokens)
        ids, passes = self._generate(prompt, of_question(self.sampling, question))
        ended = bool(ids) and ids[-1] in self.decoder.vocabulary.eos_ids
        if not ended and len(ids) < self.max_tokens:
            raise PastaError(f"no answer within {self.max_seconds:g} s")
        text = self.decoder.vocabulary.decode(ids)
        return Record(
            question.id,
            question.instruction,
            question.dataset,
            text=text,
            annotated=show((Span(text),)) if text else "",
            plain_tokens=self.decoder.plain_tokens(text),
            critical_path=passes - 1,  # the first one is the prefill
            fed_tokens=len(ids),
            prompt_tokens=len(prompt),
            widths={1: passes - 1},
            hit_limit=not ended,
        )

    def _generate(self, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], int]:
        """Return the ids of the answer, and how many forward passes they took."""
        import torch
        from transformers import GenerationConfig

        settings = GenerationConfig(
            **_choosing(sampling),
            max_new_tokens=self.max_tokens,
            max_time=self.max_seconds,
            eos_token_id=sorted(self.decoder.vocabulary.eos_ids),
            pad_token_id=self.decoder.vocabulary.end,
            prompt_lookup_num_tokens=self.lookup_tokens,
        )
        passes: list[None] = []
        counting = self.model.register_forward_pre_hook(lambda *_: passes.append(None))
        input_ids = torch.tensor([prompt], device=self.model.device)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(sampling.seed)
                found = self.model.generate(
                    input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings
                )
        except RuntimeError as error:  # what torch reports of memory, among others
            raise PastaError(str(error)) from error
        finally:
            counting.remove()
        return found[0, len(prompt) :].tolist(), len(passes)


def _choosing(sampling: SamplingParams) -> dict[str, Any]:
    """Return what transformers calls the same; `top_k` 0 is none, where it has 50 by default."""
    if sampling.greedy:
        return {"do_sample": False}
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return {"do_sample": True, "top_k": 0, **chosen}


def unpatched(decoder: LocalDecoder) -> Any:
    """Return the model of a torch engine as transformers made it; the weights are shared."""
    assert isinstance(decoder.engine, TorchEngine), "made for this engine"
    model = decoder.engine.model
    weights = {id(one): one for one in chain(model.parameters(), model.buffers())}
    twin = deepcopy(model, weights)
    twin.set_attn_implementation("sdpa")
    return twin
