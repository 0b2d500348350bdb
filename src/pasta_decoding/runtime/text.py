"""From token ids to text, piece by piece: of one thread while it is written, and of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Run, Segment, SyncRun
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, valid_tokens, valid_topic
from pasta_decoding.runtime.vocabulary import FRAGMENT, Decode, Vocabulary

# A character has at most four bytes, hence tokens; what is longer undecodable stays so.
MAX_HELD_TOKENS = 8


class ThreadText:
    """The growing text of one thread. A character cut by a token border waits for its rest.

    keep_edge: hold white space back until more text follows, and drop it at the end: a chunk
    does not end with white space.
    """

    def __init__(self, decode: Decode, *, keep_edge: bool = False) -> None:
        self._decode = decode
        self._keep_edge = keep_edge
        self._ids: list[int] = []
        self._edge = ""

    def add(self, token: int) -> str:
        """Return the text that `token` makes certain."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(FRAGMENT) and len(self._ids) < MAX_HELD_TOKENS:
            return ""
        self._ids.clear()
        return self._past_edge(text)

    def end(self) -> str:
        """Return what was held back, at the end of a stretch of text."""
        text = self._decode(self._ids) if self._ids else ""
        self._ids.clear()
        return self._past_edge(text)

    def _past_edge(self, text: str) -> str:
        if not self._keep_edge:
            return text
        text = self._edge + text
        visible = text.rstrip()
        self._edge = text[len(visible) :]
        return visible


def tree_of(segments: Sequence[Segment], vocabulary: Vocabulary, *, cut_off: bool = False) -> Tree:
    """Return what decoded segments say. White space at a chunk's end is dropped.

    cut_off: a character that their end cuts in two is no part of it.
    """
    nodes: list[Node] = []
    promise = PromiseRun((), 0)
    for place, segment in enumerate(segments, start=1):
        whole = not cut_off or place < len(segments)
        match segment:
            case Run(ids):
                text = stretch_text(ids, vocabulary.decode, whole=whole)
                if text:
                    nodes.append(Span(text))
            case PromiseRun():
                promise = segment
            case ChunkRun(ids):
                topic = valid_topic(vocabulary.decode(promise.ids[1:-1]))
                text = stretch_text(ids[1:], vocabulary.decode, whole=whole).rstrip()
                nodes.append(Chunk(topic, valid_tokens(promise.promised), text))
            case SyncRun():
                nodes.append(Sync())
    return tuple(nodes)


def stretch_text(ids: Sequence[int], decode: Decode, *, whole: bool = True) -> str:
    """Return the text of one stretch, by the same pieces that were streamed.

    whole: its end is an end; else what is not certain there is left out.
    """
    thread = ThreadText(decode)
    pieces = [thread.add(token) for token in ids]
    return "".join(pieces) + (thread.end() if whole else "")
