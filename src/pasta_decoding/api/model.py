"""A loaded model that answers: the front door of Pasta for Python."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
_DEFAULT = GenerationConfig()

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A question; a conversation as OpenAI's API has it, role and content of each message; or the
token ids of a whole prompt."""

OnResult = Callable[[int, Result], None]


class Model:
    """A checkpoint on an engine, or on servers. Any thread may ask; answers are written together.

    Every method that answers takes a question or a conversation, a `GenerationConfig`, and fields
    of it as keyword arguments, which replace the config's own. Each raises PastaError for an empty
    prompt, for unknown roles or a wrong order of them, for a prompt that leaves no room for
    `max_tokens`, for unknown or invalid options, and after `close`.

    decoder: for measurements of steps, while no answer is being written.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
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
        """Return the answers to several prompts, in their order, written side by side.

        Each answer has its own noise under one seed. The first error cancels the others.

        on_result: called with the number of a prompt and its answer as soon as that is there; in
                   another thread, if an event loop runs in this one.
        """
        more: dict[str, Any] = {"max_concurrency": max_concurrency, "on_result": on_result}
        coming = self.abatch(prompts, config, **more, **options)
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # unlike `asyncio.run`, leave the loop that this thread may have set
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                return runner.run(coming)
        with ThreadPoolExecutor(1) as other:  # a loop runs in this thread
            return other.submit(asyncio.run, coming).result()

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
        starts = [self._start(one, config, number) for number, one in enumerate(prompts)]
        places = asyncio.Semaphore(max_concurrency)

        async def write(number: int, start: Start) -> Result:
            async with places, Stream(start, text_of, self.plain_tokens) as stream:
                async for _ in stream:
                    pass
            if on_result is not None:
                on_result(number, stream.result)
            return stream.result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(write(*one)) for one in enumerate(starts)]
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
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self, prompt: Prompt, config: GenerationConfig, number: int = 0) -> Start:
        """Return a function that hands the request in."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
            ids: tuple[Any, ...] = tuple(prompt)
        else:
            asked = prompt if isinstance(prompt, str) else [_message(one) for one in prompt]
            ids = self.decoder.prompt_ids(asked, config.max_tokens)
        request = self.decoder.request(ids, config.rules, config.sampling(), number)
        return partial(self._working().submit, request)

    def _working(self) -> EngineLoop:
        with self._lock:  # an engine has one worker, whichever threads ask first
            if self._closed:
                raise ClosedError
            if self._worker is None:
                self._worker = EngineLoop(self.decoder.scheduler())
            return self._worker


def _message(one: object) -> Message:
    match one:
        case {"role": str(role), "content": str(content)}:
            return Message(role, content)
    hint = 'A message looks like {"role": "user", "content": "Why ...?"}.'
    raise PastaError(f"{one!r} is not a message", hint=hint)
