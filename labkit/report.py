"""The page of a run: one HTML file with everything in it, no script, nothing loaded from anywhere."""

from __future__ import annotations

import html
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import executing, guesses, summary, verdicts
from .pages import page, rich, safe, table
from .progress import clock, label
from .results import Ledger, Report
from .runs import Run, State, sound
from .show import number
from .units import UserError, show_bytes, show_seconds

_IMG = re.compile(r'<img\b[^>]*\bsrc="data:image/png;base64,([^"]+)"[^>]*>')
_ALT = re.compile(r'\balt="([^"]*)"')
_SIGNS = {"done": "✓ done", "kept": "✓ done", "failed": "✗ failed", "running": "… interrupted", "pending": "○ not run"}
_STATUS = {"done": "good", "failed": "bad", "running": "half", "pending": "plain"}


def write(folder: Path | str) -> Path:
    """Write ``report.html`` of the run in `folder` (or of the ledger of interactive lessons) and return its path.

    Raises `UserError` when there is no run, or the page cannot be written.
    """
    folder = Path(folder)
    run, ledger = Run.load(folder), Ledger(folder / "ledger.jsonl")
    if run is None and not ledger.path.is_file():
        raise UserError(f"{folder} holds no run: neither run.json nor ledger.jsonl is there")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = ledger.rows()
    found = summary.by_lesson(rows)
    notices = [str(w.message) for w in caught]
    notices += [
        f"{s.lesson}: rows that cannot be read and are left out: {s.unreadable}" for s in found.values() if s.unreadable
    ]
    target = folder / "report.html"
    try:
        executing.write_text(target, _page(folder, run, found, notices))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def figures(notebook: Path) -> list[tuple[str, str, str, int | None]]:
    """The figures in an executed notebook: base64 of the PNG, its description, the cell's id, its width in pixels."""
    found = []
    book = executing.read_json(notebook) or {}
    for cell in book.get("cells", []):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            known = output.get("metadata", {}).get("image/png", {})
            png, markup = _text(data.get("image/png")), _text(data.get("text/html"))
            if png:
                images = [(png, str(known.get("alt", "")))]
            else:
                tags = _IMG.finditer(markup)
                images = [(t[1], html.unescape(a[1]) if (a := _ALT.search(t[0])) else "") for t in tags]
            for image, alt in images:
                found.append(("".join(image.split()), alt, cell.get("id", ""), known.get("width")))
    return found


def _page(folder: Path, run: Run | None, found: dict[str, summary.Summary], notices: list[str]) -> str:
    states = run.lessons if run else tuple(State(name, label(name), "", "done") for name in found)
    name = folder.resolve().name
    parts = [
        _head(run, found),
        _lessons(states, found),
        _failed(states),
        _claims(found),
        _guesses(found),
        _pictures(folder, states),
        _measurements(found),
        _checklist(found),
    ]
    notes = "".join(f"<p>{safe(n)}</p>" for n in notices)
    ended = run.finished if run and run.finished else None
    foot = (
        f"{notes}<p>{'Finished ' + ended if ended else 'Not finished'}. Every row behind this page: "
        "<code>ledger.jsonl</code> beside it.</p>"
    )
    return page(name, f"Course run {name}", parts[0][2], parts[1:], foot)


def _head(run: Run | None, found: dict[str, summary.Summary]) -> tuple[str, str, str]:
    begun = next((s.begun for s in found.values() if s.begun), {})
    machine = (run.machine if run else begun.get("machine")) or {}
    machine = machine if sound(machine) else {}  # a row of a ledger may say anything
    versions = begun.get("versions") or {}
    card = machine.get("card")
    title = card or "No GPU: memory predicted"
    facts = []
    if card:
        capability = machine.get("capability")
        facts.append(("Memory", show_bytes(machine.get("memory_bytes"))))
        facts.append(("Compute capability", "sm_{}{}".format(*capability) if capability else "–"))
        facts.append(("Driver", f"{machine.get('driver') or '–'} (carries CUDA {machine.get('driver_cuda') or '–'})"))
    else:
        facts.append(("Memory is for", f"{begun.get('card', '–')}, predicted"))
    budgets = sorted({s.begun["budget_bytes"] for s in found.values() if s.begun and s.begun.get("budget_bytes")})
    facts.append(("Budget", ", ".join(show_bytes(b) for b in budgets) or "–"))
    facts.append(
        ("PyTorch", f"{machine.get('torch', '–')}" + (f", CUDA {machine['cuda']}" if machine.get("cuda") else ""))
    )
    facts.append(("Transformers", versions.get("transformers") or "–"))
    facts.append(("Python", f"{machine.get('python', '–')} on {machine.get('system', '–')}"))
    facts.append(("labkit", versions.get("labkit") or (run.labkit if run else "–")))
    if run:
        facts.append(("Started", run.started.replace("T", " ").rstrip("Z") + " UTC"))
    cells = "".join(f"<div><dt>{safe(k)}</dt><dd>{safe(v)}</dd></div>" for k, v in facts)
    return "machine", "Machine", f"<h1>{safe(title)}</h1><dl class=facts>{cells}</dl>"


def _lessons(states: Sequence[State], found: dict[str, summary.Summary]) -> tuple[str, str, str]:
    rows, tones = [], []
    for state in states:
        one = found.get(state.name)
        score = one.calibration if one else None
        off = score.median_error if score and score.guessed else None
        rows.append(
            (
                f"<b>{safe(state.name[:2])}</b> {safe(state.title)}",
                safe(_SIGNS.get(state.status, state.status)),
                clock(state.seconds) or "–",
                safe(one.peak_text() if one else "–"),
                safe(str(score) if score else "–"),
                f"{100 * off:.0f} %" if off is not None and math.isfinite(off) else "–",
                safe(one.points_text() if one else "–"),
                safe(one.claims_text() if one else "–"),
            )
        )
        tones.append(_STATUS.get(state.status, "plain"))
    head = ("Lesson", "Status", "Time", "Largest peak", "Guesses", "Median error", "Points", "Claims")
    done = sum(s.status == "done" for s in states)
    seconds = sum(s.seconds or 0 for s in states)
    line = f"{done} of {len(states)} lessons done" + (f" in {clock(seconds)}" if seconds else "")
    return "lessons", "Lessons", f"<p>{line}.</p>" + table(head, rows, tones)


def _failed(states: Sequence[State]) -> tuple[str, str, str]:
    blocks = []
    for state in states:
        if state.status == "failed":
            more = (
                f"<details><summary>Traceback</summary><pre>{safe(state.traceback)}</pre></details>"
                if state.traceback
                else ""
            )
            blocks.append(f"<div class=failure><b>{safe(label(state.name))}</b>, {safe(state.where())}{more}</div>")
    return "failed", "Failed", "".join(blocks)


def _claims(found: dict[str, summary.Summary]) -> tuple[str, str, str]:
    rows, tones = [], []
    for name, one in found.items():
        for claim in one.claims:
            text, said_by, measured, verdict, scope = (rich(c) for c in claim.cells())
            rows.append((f"<b>{safe(name[:2])}</b>", text, said_by, measured, verdict, scope))
            tones.append(claim.tone())
    total = verdicts.summary(c.outcome for s in found.values() for c in s.claims)
    body = f"<p>What the field says, and what this run found: {safe(total)}.</p>"
    head = ("", "Claim", "Said by", "Found here", "Verdict", "For")
    return "claims", "Claims", body + table(head, rows, tones) if rows else ""


def _guesses(found: dict[str, summary.Summary]) -> tuple[str, str, str]:
    answers = [(name, a) for name, one in found.items() for a in one.answers]
    if not answers:
        return "guesses", "Guesses", ""
    score = guesses.Calibration.of(a for _, a in answers)
    rows, tones = [], []
    for name, a in answers:
        source = "" if a.measured is None else a.source or ""
        off = "–" if a.error is None else f"{100 * a.error:.0f} %" if math.isfinite(a.error) else "∞"
        if a.error is not None and isinstance(a.measured, (bool, str)):
            off = "right" if a.good else "wrong"
        cells = (number(a.guess, a.unit), number(a.formula, a.unit), number(a.measured, a.unit), source, off)
        rows.append((f"<b>{safe(name[:2])}</b>", rich(a.question or a.name), *map(safe, cells), _strip(a)))
        tones.append("plain" if not a.scored else "good" if a.good else "bad")
    head = (
        "",
        "Question",
        "Guess",
        "Formula",
        "Came out",
        "Source",
        "Off by",
        "Against what came out",
    )
    key = (
        '<p class=key><span class="dot guess"></span> guess <span class="dot formula"></span> formula; the line in the'
        " middle is what came out, the band around it 20 %, the edges a tenth and ten times.</p>"
    )
    return "guesses", "Guesses", f"<p>{safe(score.sentence())}</p>{key}{table(head, rows, tones)}"


def _strip(answer: guesses.Answer) -> str:
    """A guess and a formula on a logarithmic axis from a tenth of what came out to ten times of it."""
    truth = answer.measured
    if isinstance(truth, (bool, str)) or not truth:
        return ""
    band = 60 * math.log10(1 + guesses.WITHIN)
    marks = f'<rect class=band x="{70 - band:.1f}" y="1" width="{2 * band:.1f}" height="18"/>'
    marks += '<path class=axis d="M10 10H130M10 6V14M130 6V14"/><path d="M70 1V19"/>'
    for kind, value in (("formula", answer.formula), ("guess", answer.guess)):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value / truth > 0:
            x = 70 + 60 * max(-1.0, min(1.0, math.log10(value / truth)))
            marks += f'<circle class={kind} cx="{x:.1f}" cy="10" r="5"/>'
    return f'<svg viewBox="0 0 140 20" width="140" height="20" aria-hidden="true">{marks}</svg>'


def _pictures(folder: Path, states: Sequence[State]) -> tuple[str, str, str]:
    blocks = []
    for state in states:
        images = figures(folder / "notebooks" / f"{state.name}.ipynb")
        if not images:
            continue
        cells = "".join(
            f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt, quote=True)}"'
            f"{f' width={int(width)}' if width else ''}>"
            f"<figcaption>{safe(alt or 'no description')}</figcaption></figure>"
            for data, alt, _, width in images
        )
        blocks.append(
            f'<h3 id="figures-{safe(state.name)}">{safe(label(state.name))}</h3><div class=gallery>{cells}</div>'
        )
    return "figures", "Figures", "".join(blocks)


def _measurements(found: dict[str, summary.Summary]) -> tuple[str, str, str]:
    blocks = []
    head = ("Experiment", "Outcome", "Allocated", "Reserved", "Step", "Tokens/s", "Source", "Card")
    for name, one in found.items():
        if one.reports:
            body = table(
                head, [_report_row(r) for r in one.reports], ["bad" if not r.ok else "good" for r in one.reports]
            )
            count = f"{len(one.reports)} experiment{'s' if len(one.reports) > 1 else ''}"
            blocks.append(f"<details><summary>{safe(label(name))}: {count}</summary>{body}</details>")
    return "measurements", "Measurements", "".join(blocks)


def _report_row(report: Report) -> tuple[str, ...]:
    failure, steady = report.failure, report.steady or report.first
    sizes = (
        " ".join(f"{k} {v}" for k, v in report.settings.items() if isinstance(v, (int, str))) if report.settings else ""
    )
    outcome = f"out of memory in {failure.phase}" if failure else report.status
    rate = report.tokens_per_second
    return (
        f"{safe(report.name)}<br><small>{safe(sizes)}</small>" if sizes else safe(report.name),
        safe(outcome + (f", wanted {show_bytes(failure.wanted_bytes)}" if failure else "")),
        show_bytes(report.peak_bytes),
        show_bytes(steady.reserved_bytes if steady and report.ok else None),
        show_seconds(report.timing.median_seconds if report.timing else None),
        f"{rate:,.0f}" if rate else "–",
        safe(report.source),
        safe(report.card),
    )


def _checklist(found: dict[str, summary.Summary]) -> tuple[str, str, str]:
    items = "".join(f"<li>{rich(s.checklist)}</li>" for s in found.values() if s.checklist)
    return "checklist", "Checklist", f"<ol>{items}</ol>" if items else ""


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else value or ""
