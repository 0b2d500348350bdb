"""The answers themselves: a row a prompt, a column a run, each thread in a colour of its own.

What models and prompts say is escaped, and the page's policy lets no script run but ours: an
answer is never markup. Without a script everything can be read; the script only searches.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib.resources import files

from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.report.build import Line, Report
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, read

COLOURS = 8
"""Threads of an answer are told apart by so many colours, then they come again."""

_HEAD = """\
<p class="note">Text of the main thread has no colour; each chunk has one, and its topic and length
when pointed at. <span class="sync">sync</span> is where the main thread waited for the chunks
before it. Parts of other methods that were written side by side are shown like chunks. A dot marks
prompts where an answer failed or was cut off.</p>
<p class="search"><label>Search prompts and answers
<input type="search" id="search" autocomplete="off"></label>
<label><input type="checkbox" id="unsound"> failed or cut off only</label>
<button type="button" id="unfold">Open all shown</button>
<output id="shown" for="search unsound"></output></p>
"""


def script() -> str:
    """Return the page's only script; it holds nothing of the runs."""
    return files(__package__).joinpath("answers.js").read_text(encoding="utf-8")


def policy() -> str:
    """Return the content security policy under which only `script` runs and nothing is fetched."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def answers(report: Report) -> str:
    """Return all answers, side by side."""
    rows = (
        _prompt(record, [(line, line.run.records[key]) for line in report.lines])
        for key, record in report.baseline.records.items()
    )
    return f'<div class="answers">{_HEAD}{"".join(rows)}</div>'


def _prompt(asked: Record, columns: list[tuple[Line, Record]]) -> str:
    sound = all(one.error is None and not one.hit_limit for _, one in columns)
    kind = "answer" if sound else "answer unsound"
    cells = "".join(_column(line, record) for line, record in columns)
    title = escape(" ".join(asked.instruction.split()))
    full = f'<p class="asked">{escape(asked.instruction)}</p>' if "\n" in asked.instruction else ""
    return (
        f'<details class="{kind}"><summary>{title}</summary>{full}'
        f'<div class="columns">{cells}</div></details>\n'
    )


def _column(line: Line, record: Record) -> str:
    method = line.run.method if line.run.method in {"sequential", "pasta", "sot", "apar"} else ""
    label = f'<h3 class="{method}">{escape(line.run.label)}</h3>'
    if record.error is not None:
        body = f'<p class="no">failed: {escape(record.error)}</p>'
    else:
        body = (
            f'<p class="note">{_figures(line, record)}</p><div class="text">{_text(record)}</div>'
        )
    return f"<article>{label}{body}</article>"


def _figures(line: Line, record: Record) -> str:
    parts = [
        f"{record.plain_tokens} tokens in {record.critical_path} steps ({record.own_speedup:.2f}x)"
    ]
    if record.chunks:
        parts.append(f"{record.chunks} chunk{'s' if record.chunks > 1 else ''}")
    if record.hit_limit:
        parts.append('<span class="no">cut off at the limit</span>')
    verdict = line.run.annotations.get(record.id)
    if verdict is not None and verdict.preference is not None:
        parts.append(f"preference {verdict.preference:.2f} of 1 to 2")
    return ", ".join(parts)


def _text(record: Record) -> str:
    shown, thread = "", 0
    for node in read(record.annotated):
        thread += isinstance(node, Chunk)
        shown += _node(node, thread)
    return shown


def _node(node: Node, thread: int) -> str:
    match node:
        case Span(text):
            return escape(text)
        case Chunk(topic, tokens, text):
            said = f"thread {thread}: {topic or 'no topic'}, {tokens} tokens promised"
            colour = f"chunk c{(thread - 1) % COLOURS}"
            return f'<span class="{colour}" title="{escape(said)}">{escape(text)}</span>'
        case Sync():
            return '<span class="sync">sync</span>'
