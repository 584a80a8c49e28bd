"""One page for each student: points, statuses in words, what was found, and what was handed in beside what came out.

A page stands alone and escapes everything. It is made of results alone: hidden tests, their inputs and tracebacks that
would show them are not in those, and nothing of the kind is added here. From the notebooks it takes images only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .. import executing
from ..pages import page, rich, safe, table
from ..progress import label
from ..show import number
from ..units import UserError
from . import comparing, figures, manual, outcomes
from .outcomes import ExerciseResult, SubmissionResult

WORDS = {
    "graded": "✓ full marks",
    "partial": "◐ partly right",
    "wrong": "✗ not right",
    "blank": "○ not answered",
    "error": "✗ the answer raised an error",
    "timeout": "✗ not done in time",
    "crashed": "✗ its process died",
    "unreadable": "✗ could not be read",
    "tampered": "✗ checks or outputs changed",
    "needs-manual": "… to be read",
}
TONES = {"graded": "good", "partial": "half", "blank": "plain", "needs-manual": "plain"}  # all others: bad
_FINDINGS = {
    "unreadable": "Could not be read",
    "renamed": "File name",
    "order": "Order of cells",
    "version": "Version of the course",
    "edited": "Given cells",
    "tampered": "Changed cells",
    "ledger": "Ledger",
    "run": "Run again",
}
_ANSWER = 600  # characters shown of an answer
FIGURE_BYTES = 12_000_000  # of images on one page, as base64


def write(out: Path) -> list[Path]:
    """Write ``OUT/feedback/<student>.html`` for every student with a result in `out`, a reader's marks counted in.

    Raises `UserError` when there are no results, or a page cannot be written.
    """
    students: dict[str, list[SubmissionResult]] = {}
    for result in manual.apply(out, outcomes.load_all(out)):
        students.setdefault(result.student, []).append(result)
    for stray in (out / "feedback").glob("*.html"):
        if stray.stem not in students:
            stray.unlink()
    return [write_one(out, student, results) for student, results in students.items()]


def write_one(out: Path, student: str, results: Sequence[SubmissionResult]) -> Path:
    """Write the page of one student from the results of that student's lessons; returns its path."""
    target = out / "feedback" / f"{student}.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        executing.write_text(target, html(out, student, results))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def html(out: Path, student: str, results: Sequence[SubmissionResult]) -> str:
    """The page of one student. `out` is where the notebooks that the results name lie."""
    room = [FIGURE_BYTES]
    sections = [(result.lesson, label(result.lesson), _lesson(out, result, room)) for result in results]
    return page(f"Feedback: {student}", "Feedback", _head(student, results), sections, _foot(results))


def points(result: ExerciseResult) -> str:
    """``1.5 of 2``; a written answer that nobody has read says so."""
    so_far = " so far" if result.status == "needs-manual" else ""
    return f"{number(round(result.points, 2))} of {number(result.maximum)}{so_far}"


def _head(student: str, results: Sequence[SubmissionResult]) -> str:
    got, most = sum(r.points for r in results), sum(r.maximum for r in results)
    waiting = sum(e.status == "needs-manual" for r in results for e in r.exercises)
    facts = [
        ("Points", f"{number(round(got, 2))} of {number(most)}"),
        ("Lessons", ", ".join(r.lesson[:2] for r in results)),
    ]
    if waiting:
        facts.append(("Still to be read", f"{waiting} written answer{'s' if waiting > 1 else ''}"))
    cells = "".join(f"<div><dt>{safe(k)}</dt><dd>{safe(v)}</dd></div>" for k, v in facts)
    return f"<h1>{safe(student)}</h1><dl class=facts>{cells}</dl>"


def _foot(results: Sequence[SubmissionResult]) -> str:
    again = all(r.regenerated_notebook for r in results)
    line = "Notebooks were run again from top to bottom. " if again else ""
    if any(e.seed is not None for r in results for e in r.exercises):
        line += "Functions were called with inputs of grading's own. "
    return f"<p>{line}Predicted memory comes out the same on every machine; times do not.</p>"


def _lesson(out: Path, result: SubmissionResult, room: list[int]) -> str:
    parts = [
        f"<p>{safe(number(round(result.points, 2)))} of {safe(number(result.maximum))} points. Handed in as "
        f"<code>{safe(result.file)}</code>.</p>",
        _findings(result),
        _exercises(result),
        _answers(result),
        _numbers(result),
        _figures(out, result, room),
    ]
    return "".join(parts)


def _findings(result: SubmissionResult) -> str:
    lines = [
        f"<div class=failure><b>{safe(_FINDINGS.get(f.kind, f.kind))}</b>: {rich(f.text)}"
        + (f" (cell <code>{safe(f.cell)}</code>)" if f.cell else "")
        + "</div>"
        for f in result.findings
    ]
    return "".join(lines)


def _exercises(result: SubmissionResult) -> str:
    checks = [p for p in comparing.rows(result.saved_rows, result.regenerated_rows, result.lesson) if p.kind == "check"]
    said = {p.what: p for p in checks}
    messages = comparing.messages(result.regenerated_rows, result.lesson)
    rows, tones = [], []
    for one in result.exercises:
        notes = "".join(f"<br><small>{rich(note)}</small>" for note in one.notes)
        rows.append(
            (
                f"<b>{safe(one.exercise or 'the whole file')}</b>",
                safe(WORDS[one.status]),
                safe(points(one)),
                f"{rich(one.message)}{notes}" if one.message or notes else "–",
                _check(said.get(one.exercise), messages.get(one.exercise, ""), one),
            )
        )
        tones.append(TONES.get(one.status, "bad"))
    head = ("Exercise", "Status", "Points", "What was found", "The check in your notebook")
    return table(head, rows, tones) if rows else ""


def _check(pair: comparing.Pair | None, message: str, one: ExerciseResult) -> str:
    """What the visible check said when the notebook was run again, and when it was saved where that differs; "the same"
    where it says what grading found."""
    if pair is None:
        return "–"
    if pair.verdict not in (comparing.DIFFERS, comparing.ONLY_SAVED) and message and message in one.message:
        return "the same"
    again = f"{safe(pair.again)}{f': {rich(message)}' if message else ''}" if pair.again != "–" else "not reached"
    if pair.verdict in (comparing.DIFFERS, comparing.ONLY_SAVED):
        return f"run again: {again}<br><small>as handed in: {safe(pair.saved)}</small>"
    return again


def _answers(result: SubmissionResult) -> str:
    given = [e for e in result.exercises if e.answer]
    if not given:
        return ""
    blocks = []
    for one in given:
        text = one.answer if len(one.answer) <= _ANSWER else one.answer[:_ANSWER] + " …"
        blocks.append(f"<dt>{safe(one.exercise)}</dt><dd>{safe(text)}</dd>")
    return f"<details><summary>Your answers</summary><dl>{''.join(blocks)}</dl></details>"


def _numbers(result: SubmissionResult) -> str:
    pairs = [p for p in comparing.rows(result.saved_rows, result.regenerated_rows, result.lesson) if p.kind != "check"]
    if not result.saved_rows or not result.regenerated_rows:
        why = "The notebook was not run again" if result.saved_rows else "No ledger was handed in"
        return f"<p>{why}, so no numbers are compared.</p>" if result.saved_notebook else ""
    if not pairs:
        return ""
    origin = [comparing.where(rows, result.lesson) for rows in (result.saved_rows, result.regenerated_rows)]
    flagged = [p for p in pairs if p.flagged]
    counts = Counter(p.verdict for p in pairs)
    line = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    text = f"<h3>Numbers of your ledger, run again</h3><p>{len(pairs)} numbers and verdicts: {safe(line)}. "
    text += f"Handed in: {safe(origin[0] or 'no whole run')}. Run again: {safe(origin[1] or 'no whole run')}. "
    text += "A difference takes no points.</p>"
    if flagged:
        text += _pairs(flagged)
    others = [p for p in pairs if not p.flagged]
    if others:
        text += (
            f"<details><summary>The {len(others)} without a difference to look at</summary>{_pairs(others)}</details>"
        )
    return text


def _pairs(pairs: Sequence[comparing.Pair]) -> str:
    tone = {comparing.SAME: "good", comparing.CLOSE: "good", comparing.DIFFERS: "bad"}
    rows = [
        (
            safe(p.what),
            safe(p.saved),
            safe(p.again),
            f"{'✗ ' if p.flagged else ''}{safe(p.verdict)}" + (f"<br><small>{safe(p.why)}</small>" if p.why else ""),
        )
        for p in pairs
    ]
    head = ("What", "Handed in", "Run again", "Comparison")
    return table(head, rows, [tone.get(p.verdict, "plain") for p in pairs])


def _figures(out: Path, result: SubmissionResult, room: list[int]) -> str:
    if not result.regenerated_notebook:
        return ""
    files = [out / name if name else None for name in (result.saved_notebook, result.regenerated_notebook)]
    pairs = figures.pairs(*files)
    if not pairs:
        return ""
    blocks, left_out = [], 0
    for pair in pairs:
        need = len(pair.saved) + (0 if pair.again == pair.saved else len(pair.again))
        if need > room[0]:
            left_out += 1
            continue
        room[0] -= need
        blocks.append(_figure(pair))
    flagged = sum(p.flagged for p in pairs)
    line = f"{len(pairs)} figure{'' if len(pairs) == 1 else 's'}"
    line += f"; {flagged} look{'s' if flagged == 1 else ''} different when drawn again" if flagged else ""
    if not any(pair.saved for pair in pairs):
        line += ", all from the run for grading: the notebook was handed in without any"
    line += f"; {left_out} left out, the page would be too large" if left_out else ""
    return f"<h3>Figures, as handed in and drawn again</h3><p>{safe(line)}.</p>{''.join(blocks)}"


def _figure(pair: figures.FigurePair) -> str:
    where = f"<b>{safe(pair.cell)}</b>"
    if pair.verdict == comparing.SAME:
        both = f"<div class=gallery>{_image(pair.saved, pair.alt, 'as handed in, and the same when drawn again')}</div>"
        return f"<details><summary>{where}: the same</summary>{both}</details>"
    images = [
        _image(data, pair.alt, caption) if data else f"<figure><figcaption>{safe(caption)}: none</figcaption></figure>"
        for data, caption in ((pair.saved, "as handed in"), (pair.again, "drawn again"))
    ]
    sign = "✗ " if pair.flagged else ""
    open_ = " open" if pair.flagged else ""
    return (
        f"<details{open_}><summary>{sign}{where}: {safe(pair.verdict)}</summary>"
        f"<div class=gallery>{''.join(images)}</div></details>"
    )


def _image(data: str, alt: str, caption: str) -> str:
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{safe(alt)}" width=480>'
        f"<figcaption>{safe(caption)}</figcaption></figure>"
    )
