"""Scores in the form that a learning-management system imports: one row for each student, one column for each lesson.

The roster says who is who: a CSV file with a column ``folder`` (the name of the student's folder, as in ``scores.csv``)
beside columns under the system's own headings, so that a file exported from there needs only that one column more.

- ``moodle``: ``Email address`` or ``ID number`` (``Username`` too), which "Map from/Map to" of the import identifies
  users by (MoodleDocs, "Grade import": map `Email address` to `useremail`, `ID number` to `useridnumber`).
- ``canvas``: ``Student``, ``ID``, ``SIS User ID``, ``SIS Login ID``, ``Section``, then the assignments, a row ``Points
  Possible`` below the headings (Canvas Instructor Guide, "How do I import grades in the Gradebook?"); a column that is
  called like an assignment followed by its id in parentheses fills that assignment, another name makes a new one.
- ``plain``: the folder's name, points and maxima; needs no roster.

A cell is left empty where nothing was handed in, and where a written answer still waits to be read: what is not final
does not go out as if it were. Nobody is left out unsaid: `Exported` names them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import executing
from ..progress import label
from ..units import UserError
from . import manual, outcomes
from .outcomes import SubmissionResult

KINDS = ("moodle", "canvas", "plain")
FOLDER = "folder"
IDENTIFY = {"moodle": ("Email address", "ID number", "Username"), "canvas": ("ID", "SIS User ID", "SIS Login ID")}
_HEADS = {
    "moodle": ("First name", "Last name", "ID number", "Username", "Email address"),
    "canvas": ("Student", "ID", "SIS User ID", "SIS Login ID", "Section"),
}
POSSIBLE = "    Points Possible"  # as Canvas writes it itself


@dataclass(frozen=True)
class Exported:
    """The file, how many students are in it, and who is not wholly: ``unknown`` have results and no line in the roster,
    ``waiting`` are notebooks whose written answers nobody has read, ``absent`` are in the roster without a result."""

    path: Path
    students: int
    unknown: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def text(self) -> str:
        """A few lines for the terminal."""
        lines = [f"{self.path}: {self.students} student{'' if self.students == 1 else 's'}"]
        for names, say in (
            (self.unknown, "not in the roster, so not in the file"),
            (self.waiting, "left empty until their written answers are read (--provisional fills them in)"),
            (self.absent, "in the roster, nothing graded"),
        ):
            if names:
                lines.append(f"  {say}: {', '.join(names)}")
        return "\n".join(lines)


def write(
    out: Path,
    kind: str,
    roster: Path | None = None,
    *,
    provisional: bool = False,
    results: Sequence[SubmissionResult] | None = None,
) -> Exported:
    """Write ``OUT/export-<kind>.csv`` from `results` (those in `out`, marks counted in, unless given).

    `kind` is one of `KINDS`; `roster` is needed for all but ``plain``. With `provisional`, written answers that nobody
    has read count what they have so far. Raises `UserError` for another kind, a roster that lacks what identifies
    students, and a file that cannot be written.
    """
    if kind not in KINDS:
        raise UserError(f"export {kind!r} is not one of {', '.join(KINDS)}")
    if kind != "plain" and roster is None:
        raise UserError(f"an export for {kind} needs --roster FILE: a CSV with a column {FOLDER!r} and {_asked(kind)}")
    found = manual.apply(out, outcomes.load_all(out)) if results is None else list(results)
    by: dict[str, dict[str, SubmissionResult]] = {}
    for result in found:
        by.setdefault(result.student, {})[result.lesson] = result
    lessons = sorted({r.lesson for r in found})
    people = (
        read_roster(roster, kind) if roster is not None and kind != "plain" else {s: {FOLDER: s} for s in sorted(by)}
    )
    heads = [h for h in _HEADS.get(kind, (FOLDER,)) if kind == "canvas" or any(h in p for p in people.values())]
    columns = [_column(lesson, kind, people) for lesson in lessons]
    rows: list[list[str]] = [[*heads, *columns]]
    if kind == "canvas":
        rows.append([POSSIBLE, *[""] * (len(heads) - 1), *(_shown(_maximum(found, lesson)) for lesson in lessons)])
    if kind == "plain":
        rows[0] += [f"{column}, of" for column in columns]
    waiting = []
    for folder, person in people.items():
        cells = []
        for lesson in lessons:
            one = by.get(folder, {}).get(lesson)
            wait = one is not None and not provisional and any(e.status == "needs-manual" for e in one.exercises)
            if wait:
                waiting.append(f"{folder} {lesson[:2]}")
            cells.append("" if one is None or wait else _shown(one.points))
        if kind == "plain":
            cells += [_shown(_maximum(found, lesson)) for lesson in lessons]
        rows.append([*(_harmless(person.get(h, ""), kind) for h in heads), *cells])
    target = out / f"export-{kind}.csv"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    try:
        executing.write_text(target, text.getvalue().encode("utf-8", "replace").decode())
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    unknown = tuple(sorted(set(by) - set(people)))
    absent = tuple(folder for folder in people if folder not in by)
    return Exported(target, len(people), unknown, tuple(waiting), absent)


def read_roster(path: Path, kind: str) -> dict[str, dict[str, str]]:
    """The roster's rows by folder, columns under their headings. Commas, semicolons or tabs may part them.

    Raises `UserError` naming file and line for a missing column, a folder twice, a row that identifies nobody.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the roster {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    first = text.split("\n", 1)[0]
    reader = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=first.count), skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = names
    if FOLDER not in names or not set(IDENTIFY[kind]) & set(names):
        raise UserError(
            f"{path.name} needs a column {FOLDER!r} and {_asked(kind)}; it has {', '.join(names) or 'none'}"
        )
    found: dict[str, dict[str, str]] = {}
    for row in reader:
        person = {k: v.strip() for k, v in row.items() if isinstance(k, str) and isinstance(v, str)}
        folder = person.get(FOLDER, "")
        if not folder:  # somebody who hands nothing in, or Canvas's own line of points possible
            continue
        if folder in found:
            raise UserError(f"{path.name}, line {reader.line_num}: {folder} is there twice")
        if not any(person.get(name) for name in IDENTIFY[kind]):
            raise UserError(f"{path.name}, line {reader.line_num}: {folder} has none of {', '.join(IDENTIFY[kind])}")
        found[folder] = person
    if not found:
        raise UserError(f"{path.name}: no line has anything in the column {FOLDER!r}")
    return found


def _column(lesson: str, kind: str, people: Mapping[str, Mapping[str, str]]) -> str:
    """The heading of a lesson: that of the system's own assignment, where the roster was exported with one."""
    title = label(lesson)
    heads = {h for person in people.values() for h in person}
    own = [h for h in sorted(heads) if h == title or (h.startswith(f"{title} (") and h.endswith(")"))]
    return own[0] if own and kind == "canvas" else title


def _maximum(results: Sequence[SubmissionResult], lesson: str) -> float:
    return max(r.maximum for r in results if r.lesson == lesson)


def _shown(points: float) -> str:
    return f"{round(points, 2):g}"


def _asked(kind: str) -> str:
    return f"one of {', '.join(map(repr, IDENTIFY[kind]))}"


def _harmless(text: str, kind: str) -> str:
    """A folder's name that a spreadsheet would take for a formula, marked as text; a system's own ids as they are."""
    return f"'{text}" if kind == "plain" and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
