"""A loaded model that answers: the front door of Pasta for Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Self

from pasta_decoding.answer.events import Event
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.streams import Result, Start, Stream, events_of, text_of
from pasta_decoding.errors import PastaError
from pasta_decoding.models.template import Message
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.scheduling.loop import ClosedError, EngineLoop

DEFAULT_CONCURRENCY = 16
NO_BASELINE = (
    "no baseline is known that answers this model's questions sequentially: "
    "name an adapter or a model that was trained without tags"
)
_DEFAULT = GenerationConfig()

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A question; a conversation in the form of OpenAI's API, with role and content of each message;
or the token ids of a complete prompt."""

OnResult = Callable[[int, Result], None]
"""Called with the index of a prompt and its answer."""


class Model:
    """A checkpoint on an engine, or on servers. Any thread may call it, at any time.

    Every method that answers takes a prompt, a `GenerationConfig`, and fields of that class as
    keyword arguments, which replace the config's values. Each raises PastaError for an empty
    prompt, for unknown roles or a wrong order of them, for a prompt that leaves no room for
    `max_tokens`, for unknown or invalid options, and after `close`.

    decoder: measurements use it directly, while no answer is being written.
    open_baseline: opens the adapter's recorded baseline for the first answer without `parallel`.
        None: such answers are refused if the checkpoint knows the language.
    """

    def __init__(
        self, decoder: Decoder, open_baseline: Callable[[], Decoder] | None = None
    ) -> None:
        self.decoder = decoder
        self._open_baseline = open_baseline
        self._baseline: Model | None = None
        self._worker: EngineLoop | None = None
        self._lock = Lock()
        self._closed = False

    def answer(self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any) -> Result:
        """Return the whole answer."""
        return self.batch([prompt], config, **options)[0]

    def stream(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> Stream[str]:
        """Yield the plain text in reading order, piece by piece as it becomes certain.

        `async for` reads it as well as `for` does.
        """
        start = self._start(prompt, config.updated(**options))
        return Stream(start, text_of, self.plain_tokens)

    def events(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> Stream[Event]:
        """Yield what happens in every thread, as it happens; for `for` and `async for`."""
        start = self._start(prompt, config.updated(**options))
        return Stream(start, events_of, self.plain_tokens)

    def batch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig = _DEFAULT,
        *,
        max_concurrency: int = DEFAULT_CONCURRENCY,
        on_result: OnResult | None = None,
        **options: Any,
    ) -> list[Result]:
        """Return the answers to several prompts, in their order. They are written at the same time.

        Under one seed, each answer is sampled with other random numbers. The first error cancels
        all answers.

        on_result: called as soon as an answer is finished; in another thread, if an event loop
                   runs in this one.
        """
        results = self.abatch(
            prompts, config, max_concurrency=max_concurrency, on_result=on_result, **options
        )
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # unlike `asyncio.run`, leave the loop that this thread may have set
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                return runner.run(results)
        with ThreadPoolExecutor(1) as executor:  # a loop runs in this thread
            return executor.submit(asyncio.run, results).result()

    async def aanswer(
        self, prompt: Prompt, config: GenerationConfig = _DEFAULT, **options: Any
    ) -> Result:
        """As `answer`, for coroutines. Being cancelled cancels the answer."""
        return (await self.abatch([prompt], config, **options))[0]

    async def abatch(
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig = _DEFAULT,
        *,
        max_concurrency: int = DEFAULT_CONCURRENCY,
        on_result: OnResult | None = None,
        **options: Any,
    ) -> list[Result]:
        """As `batch`, for coroutines."""
        if max_concurrency < 1:
            raise PastaError(f"max_concurrency is {max_concurrency}, not at least 1")
        config = config.updated(**options)
        starts = [self._start(prompt, config, number) for number, prompt in enumerate(prompts)]
        semaphore = asyncio.Semaphore(max_concurrency)

        async def write(number: int, start: Start) -> Result:
            async with semaphore, Stream(start, text_of, self.plain_tokens) as stream:
                async for _ in stream:
                    pass
            if on_result is not None:
                on_result(number, stream.result)
            return stream.result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(write(number, start)) for number, start in enumerate(starts)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def plain_tokens(self, text: str) -> int:
        """Count the tokens of a tag-free text, tokenised alone."""
        return self.decoder.plain_tokens(text)

    def close(self) -> None:
        """Cancel everything and free the engine's thread. A second call does nothing."""
        with self._lock:
            self._closed = True
            worker = self._worker
            self._worker = None
            baseline = self._baseline
        if worker is not None:
            worker.close()
        if baseline is not None:
            baseline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self, prompt: Prompt, config: GenerationConfig, number: int = 0) -> Start:
        """Return a function that submits the request.

        number: the prompt's index in its batch; the seed of the answer depends on it.
        """
        if self.decoder.parallel and not config.parallel:
            return self._opened_baseline()._start(prompt, config, number)
        if isinstance(prompt, str):
            ids: tuple[Any, ...] = self.decoder.prompt_ids(prompt, config.max_tokens)
        elif prompt and isinstance(prompt[0], int):
            ids = tuple(prompt)
        else:
            messages = [_message(message) for message in prompt]
            ids = self.decoder.prompt_ids(messages, config.max_tokens)
        request = self.decoder.request(ids, config.rules, config.sampling(), number)
        return partial(self._started_worker().submit, request)

    def _opened_baseline(self) -> Model:
        """Return the baseline, opened for the first call. Raises PastaError if there is none."""
        if self._open_baseline is None:
            raise PastaError(NO_BASELINE, field="parallel")
        with self._lock:
            if self._closed:
                raise ClosedError
            if self._baseline is None:
                self._baseline = Model(replace(self._open_baseline(), parallel=False))
            return self._baseline

    def _started_worker(self) -> EngineLoop:
        """Return the engine's loop; start it for the first request. Raises PastaError if closed."""
        with self._lock:  # several threads may call first, and an engine has one worker
            if self._closed:
                raise ClosedError
            if self._worker is None:
                self._worker = EngineLoop(self.decoder.scheduler())
            return self._worker


def _message(message: object) -> Message:
    match message:
        case {"role": str(role), "content": str(content)}:
            return Message(role, content)
    hint = 'A message looks like {"role": "user", "content": "Why ...?"}.'
    raise PastaError(f"{message!r} is not a message", hint=hint)
