"""Of the class summary: what was noticed about submissions, what was not graded, and whom to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote

from ..pages import rich, safe, table
from ..show import number
from . import intake
from .intake import LeftOut
from .outcomes import SubmissionResult

KINDS = {  # of findings, for somebody who has not read the manual
    "unreadable": "no notebook of this course",
    "renamed": "another file name, or several files",
    "order": "saved with cells run out of order; graded from top to bottom",
    "version": "made with another version of the course; graded with this one",
    "edited": "given cells were changed; the course's own were used",
    "tampered": "a check, its metadata or an output was changed; points are what the course's own check gives",
    "ledger": "rows that the notebook does not give when it is run again",
    "run": "what happened when the whole notebook was run again",
}
LOOK = {
    "needs-manual": "to be read", "tampered": "tampered", "timeout": "not done in time", "crashed": "crashed",
    "unreadable": "unreadable",
}  # fmt: skip


def findings(results: Sequence[SubmissionResult]) -> str:
    """What was noticed, with those whom it is about; the same about several is one line."""
    who: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for one in result.findings:
            students = who.setdefault((result.lesson, one.kind, one.text), [])
            if result.student not in students:
                students.append(result.student)
    rows, tones = [], []
    for (lesson, kind, said), students in sorted(who.items()):
        rows.append(
            (f"<b>{safe(lesson[:2])}</b>", safe(kind), rich(said), f"{len(students)}: {safe(', '.join(students))}")
        )
        tones.append("bad" if kind in ("tampered", "unreadable", "ledger") else "half")
    kinds = dict.fromkeys(kind for _, kind, _ in sorted(who) if kind in KINDS)
    note = "; ".join(f"<b>{safe(kind)}</b>: {KINDS[kind]}" for kind in kinds)
    return f"<p>{note}.</p>" + table(("", "Kind", "What", "Students"), rows, tones) if rows else ""


def left_out(those: Sequence[LeftOut]) -> str:
    """Files that nobody graded, with the reason; the same reason about several of one student is one line."""
    rows = [
        (safe(student or "–"), "<br>".join(f"<code>{safe(n)}</code>" for n in names), rich(reason))
        for student, names, reason in intake.grouped(those)
    ]
    note = "<p>What lies among the submissions and was not taken for one. It is in no score.</p>"
    return note + table(("Student", "File", "Why"), rows, ["bad"] * len(rows)) if rows else ""


def students(
    results: Sequence[SubmissionResult], lessons: Sequence[str], those_left_out: Sequence[LeftOut] = ()
) -> str:
    """Everybody's points, with what somebody should look at; those of whom nothing was graded come last."""
    by: dict[str, dict[str, SubmissionResult]] = {}
    for result in results:
        by.setdefault(result.student, {})[result.lesson] = result
    rows, tones = [], []
    for student, those in sorted(by.items()):
        got, most = sum(r.points for r in those.values()), sum(r.maximum for r in those.values())
        cells = [number(round(those[name].points, 2)) if name in those else "–" for name in lessons]
        link = f'<a href="feedback/{safe(_quoted(student))}.html">{safe(student)}</a>'
        count = Counter(e.status for r in those.values() for e in r.exercises)
        look = ", ".join(f"{count[status]} {words}" for status, words in LOOK.items() if count[status])
        rows.append((link, *cells, f"{number(round(got, 2))} of {number(most)}", look or "–"))
        share = got / most if most else 0.0
        tones.append("good" if share >= 0.8 else "half" if share >= 0.5 else "bad")
    for student in sorted({one.student for one in those_left_out if one.student} - set(by)):
        rows.append((safe(student), *("–" for _ in lessons), "–", '<a href="#not-graded">nothing graded</a>'))
        tones.append("bad")
    return table(("Student", *(name[:2] for name in lessons), "Points", "To look at"), rows, tones) if rows else ""


def _quoted(student: str) -> str:
    return quote(student.encode("utf-8", "replace"))
