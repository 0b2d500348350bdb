"""The page of a report: one HTML file that needs no other and no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files

from pasta_decoding.evaluation.figures import OWN, WALL_CLOCK, Bin
from pasta_decoding.evaluation.machine import commit
from pasta_decoding.evaluation.quality import LC_WIN_RATE, WIN_RATE
from pasta_decoding.evaluation.report.answers import answers, policy, script
from pasta_decoding.evaluation.report.build import PAPER, Line, Report
from pasta_decoding.evaluation.report.dominance import Dominance
from pasta_decoding.evaluation.report.drawing import DARK, LIGHT, Palette, as_svg
from pasta_decoding.evaluation.report.plots import QUALITY_NAMES, SHOWN_SPEEDUPS, SPEED_NAMES, plots
from pasta_decoding.evaluation.report.promises import too_few
from pasta_decoding.evaluation.report.tables import Cell, Value, interval_html, percent, table
from pasta_decoding.lang.measures import IN_USE, STOCK_PROMPTS, buckets_in_use

_CAPTIONS = {
    "frontier_lc_win_rate": "Speed against quality, a point a run; bars are 95 % intervals. Up and "
    "to the right is better; the dashed lines cross at the baseline.",
    "frontier_text_quality": "The same without a judge: how much likelier the text is under the "
    "sequential model than the baseline's answer, less a penalty for repetition. A greedy baseline "
    "is ahead by construction: it wrote what that model finds likeliest. The measure knows nothing "
    "of truth or usefulness, and preference training may have aimed at it.",
    "speedups": "A dot a prompt, the middle half as a bar, the median as a large dot; speedups "
    f"below {SHOWN_SPEEDUPS[0]:g} or above {SHOWN_SPEEDUPS[1]:g} are drawn at the edge.",
    "lengths": "Speedup against the length of the baseline's answer.",
    "widths": "How many threads were live at the same time.",
    "timelines": "The answers with the median own speedup among those of three chunks or more. "
    "Drawn from the texts, lengths in proportion to characters.",
    "promises": "Tokens promised and tokens written: medians and middle halves of the chunks that "
    "ended by themselves. On the dashed line promises are kept to the token.",
}
_DEFINITIONS = {
    "own speedup": "tokens of the plain text / forward steps at unlimited width.",
    "theoretical speedup": "tokens of the baseline's answer to the same prompt / forward steps at "
    "unlimited width. A shorter answer raises it.",
    "wall-clock speedup": "seconds of the baseline's answer / seconds of the run's, same engine; "
    "medians of repeats. Only where both runs were timed together, one request at a time.",
    "wall-clock speedup per token": "the same, each between seconds over the tokens of its own "
    "plain text: what is gained besides a shorter answer. A failed request wrote one token.",
    "failures": "count with their whole budget: max_tokens steps, the seconds of the time-out, own "
    "speedup 1, an empty text that loses every comparison. Nothing drops out.",
    "intervals": "95 % bootstrap over prompts; differences between runs are paired.",
    "length-controlled win rate": "against the baseline at equal length, as alpaca_eval's "
    "length_controlled_noreg, or length_controlled_minimal where difficulties are unknown. A "
    "missing verdict is left out and counted, never a tie.",
    "repeated chunk": "most of its word pairs are in an earlier chunk of the answer.",
    "stock topic": f"one that {STOCK_PROMPTS} or more prompts got and that is not named in its "
    "own: what a model promises whatever it is asked.",
    "empty scaffold": "an answer with a marker of a list that has no text behind it.",
    "promise near": "the chunk is as long as promised, or a step of the lengths longer or shorter.",
    "lengths in use": f"promised lengths that more than {IN_USE:.0%} of the promises give.",
    "missing topic": "a chunk without any word of its promise's topic.",
    "rep-4": "share of runs of four words that came before in the same text.",
}


def render(report: Report) -> str:
    """Return the page."""
    figures = {name: as_svg(name, plot, report) for name, plot in plots(report).items()}
    drawn = {name: _figure(name, svg) for name, svg in figures.items() if svg is not None}
    frontiers = [figure for name, figure in drawn.items() if name.startswith("frontier")]
    sections = [
        _head(report),
        _section("Results", _results(report)),
        _section("Speed against quality", "".join(frontiers) or _unrated()),
        _section("Against the rivals", _dominance(report)),
        _section("Speedups of single prompts", drawn.get("speedups", "")),
        _section("By length of the answer", drawn.get("lengths", "")),
        _section("By dataset", _datasets(report)),
        _section("By how the answers ended", _ends(report)),
        _section("Threads", drawn.get("widths", "") + drawn.get("timelines", "")),
        _section("Promises", drawn.get("promises", "") + _little(report)),
        _section("What happens in the answers", _details(report)),
        _section("The answers", answers(report)),
        _section("The paper", _paper()),
        _section("Definitions", _definitions()),
        _section("How the runs were made", _provenance(report)),
    ]
    return _document("".join(sections))


def _document(body: str) -> str:
    style = (
        files("pasta_decoding.evaluation.report").joinpath("page.css").read_text(encoding="utf-8")
    )
    colours = (
        f":root{{{_variables(LIGHT)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Pasta: evaluation</title><style>{colours}\n{style}</style></head>\n"
        f"<body>{body}<script>{script()}</script></body></html>\n"
    )


def _variables(palette: Palette) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in asdict(palette).items())


def _head(report: Report) -> str:
    prompts = len(report.baseline.records)
    failures = sum(line.figures.failures for line in report.lines)
    lead = (
        f"{len(report.lines)} runs on the same {prompts} prompts, against "
        f"<b>{escape(report.baseline.label)}</b>. Failed requests: {failures}, inside every figure."
    )
    warnings = [
        f"{label}: {count} prompts left out that another run has no answer to"
        for label, count in report.left_out.items()
    ]
    warnings += [
        f"{label}: {count} prompts of its file are not answered yet"
        for label, count in report.unanswered.items()
    ]
    lost = report.lines[0].figures.no_baseline
    if lost:
        warnings.append(f"{lost} prompts have no speedup against the baseline: it failed there")
    told = "".join(f'<p class="warning">{escape(one)}</p>' for one in warnings)
    judge = f'<p class="note">{escape(report.judge)}</p>'
    return f'<h1>Speed and quality</h1><p class="lead">{lead}</p>{told}{judge}'


def _results(report: Report) -> str:
    speeds = [
        name for name in SPEED_NAMES if any(name in line.log_speed_P for line in report.lines[1:])
    ] or [OWN]
    measures = [
        name for name in QUALITY_NAMES if any(name in line.qualities for line in report.lines)
    ]
    columns = ["run", *(SPEED_NAMES[name] for name in speeds)]
    columns += [QUALITY_NAMES[name] for name in measures] + ["failed", "with a promise"]
    rows: list[Sequence[Value]] = [
        [
            line.run.label,
            *(line.figures.speedups.get(name) for name in speeds),
            *(_judged(line, name) for name in measures),
            f"{line.figures.failures} of {line.figures.prompts}",
            percent(line.figures.with_promise.value),
        ]
        for line in report.lines
    ]
    return table(columns, rows)


def _judged(line: Line, measure: str) -> Value:
    quality = line.qualities.get(measure)
    if quality is None:
        return None
    digits = 1 if measure in {LC_WIN_RATE, WIN_RATE} else 2
    missing = f"<small>{quality.missing} missing</small>" if quality.missing else ""
    return Cell(interval_html(quality.interval, digits) + missing)


def _dominance(report: Report) -> str:
    if not report.dominance:
        return '<p class="note">There is no rival and run of ours that were both rated.</p>'
    parts = [
        '<p class="note">For each rival: of our runs at least as fast, the best one; and of our '
        "runs at least as good, the fastest one. It holds unless ours is worse beyond the paired "
        "95 % interval.</p>"
    ]
    for measure, rows in report.dominance.items():
        columns = [
            "rival", "at its", "ours", "speed, ours / rival", "quality, ours less rival", "holds"
        ]  # fmt: skip
        parts.append(f"<p>By {escape(QUALITY_NAMES[measure])}:</p>")
        parts.append(table(columns, [_dominance_row(row) for row in rows]))
    return "".join(parts)


def _dominance_row(row: Dominance) -> Sequence[Value]:
    verdict = Cell('<span class="yes">yes</span>' if row.holds else '<span class="no">no</span>')
    none = "none is as fast" if row.at == "speed" else "none is as good"
    return [row.rival, row.at, row.ours or none, row.speed, row.quality, verdict]


def _datasets(report: Report) -> str:
    names = list(report.lines[0].figures.by_dataset)
    if not names:
        return '<p class="note">The prompts name no dataset.</p>'
    counts = report.lines[0].figures.by_dataset
    columns = [SPEED_NAMES[report.speed], *(f"{name} ({counts[name].prompts})" for name in names)]
    return table(
        columns,
        [
            [
                line.run.label,
                *(line.figures.by_dataset[name].speedups.get(report.speed) for name in names),
            ]
            for line in report.lines
        ],
    )


def _ends(report: Report) -> str:
    names = sorted({name for line in report.lines for name in line.figures.by_end})
    rows: list[Sequence[Value]] = []
    for line in report.lines:
        bins = [line.figures.by_end.get(name) for name in names]
        cells = [value for one in bins for value in _end_cells(one, report.speed)]
        rows.append([line.run.label, *cells])
    columns = [column for name in names for column in (name, SPEED_NAMES[report.speed])]
    return table(["run", *columns], rows)


def _end_cells(found: Bin | None, speed: str) -> tuple[Value, Value]:
    """Return how many prompts there are, and their speedup."""
    return (str(found.prompts), found.speedups.get(speed)) if found else ("0", None)


def _details(report: Report) -> str:
    columns = [
        "run", "plain tokens", "hit the limit", "empty scaffolds", "chunks an answer",
        "syncs an answer", "live threads", "promise near", "written / promised", "lengths in use",
        "repeated chunks", "stock topics", "truncated chunks", "missing topics", "rep-4",
        "interventions a token", "first text, s", "last text, s",
    ]  # fmt: skip
    return table(columns, [_detail_row(line) for line in report.lines])


def _detail_row(line: Line) -> Sequence[Value]:
    found, faults = line.figures, line.faults
    return [
        line.run.label,
        f"{found.plain_tokens_mean:.0f}",
        percent(found.hit_limit.value),
        percent(found.empty_scaffolds.value),
        found.chunks_mean,
        found.syncs_mean,
        found.threads,
        percent(found.near_promises),
        found.promised_ratio,
        str(buckets_in_use(found.buckets)),
        percent(found.repeated_chunks),
        percent(found.stock_topics),
        percent(found.truncated_chunks),
        percent(faults.missing_topics) if faults else None,
        percent(found.rep_4),
        percent(found.interventions_per_token),
        found.first_text_s,
        found.last_text_s,
    ]


def _little(report: Report) -> str:
    said = too_few(report)
    return f'<p class="note">{escape(said)}</p>' if said else ""


def _paper() -> str:
    note = (
        '<p class="note">Another model and another machine, so no yardstick for the figures above: '
        "Gemma 7B on an H100, AlpacaEval's 805 prompts, against its own sequential baseline. "
        "From the abstract of arXiv 2502.11517v2; not measured here.</p>"
    )
    columns = ["paper", SPEED_NAMES[WALL_CLOCK], "length-controlled win rate, points"]
    rows: list[Sequence[Value]] = [
        [str(one["run"]), f"{one['wall_clock']}", f"{one['win_rate_change']:+}"] for one in PAPER
    ]
    return note + table(columns, rows)


def _definitions() -> str:
    pairs = (
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _DEFINITIONS.items()
    )
    return f"<dl>{''.join(pairs)}</dl>"


def _provenance(report: Report) -> str:
    parts = [f'<p class="note">Report made by commit {escape(commit() or "unknown")}.</p>']
    for line in report.lines:
        told: Mapping[str, object] = {"run": line.run.settings, "rating": line.run.rating}
        text = escape(json.dumps(told, indent=1, ensure_ascii=False))
        parts.append(
            f"<details><summary>{escape(line.run.label)}</summary><pre>{text}</pre></details>"
        )
    return "".join(parts)


def _unrated() -> str:
    return '<p class="note">No run was rated: see <code>pasta eval rate</code>.</p>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n" if content else ""


def _figure(name: str, svg: str) -> str:
    caption = _CAPTIONS[name]
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
