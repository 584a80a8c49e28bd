"""Written answers: laid out for a reader in nbgrader's formgrader, and the marks brought back into results.

Marks live in ``OUT/manual.json`` with the digest of the answer that was read, so that they survive when everything is
graded again, and no longer count when the student hands in another answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import executing
from ..show import number
from ..units import UserError
from . import formgrader, outcomes
from .formgrader import Mark
from .outcomes import ExerciseResult, SubmissionResult

FILE = "manual.json"
SCHEMA = 1
MARKED = "marked by a reader"  # what the note of a mark begins with


@dataclass(frozen=True)
class Synced:
    """What `sync` did: the course folder, how many marks count, how many answers wait, whose answers have changed since
    they were read."""

    folder: Path
    marked: int
    waiting: int
    changed: tuple[str, ...]

    def text(self) -> str:
        """A few lines for the terminal."""
        lines = [f"{self.marked} marks by a reader, {self.waiting} written answers to be read"]
        if self.changed:
            lines.append(f"  another answer than the one that was read, to be read again: {', '.join(self.changed)}")
        if self.waiting or self.changed:
            lines.append(f"  read them in formgrader: cd {self.folder} && jupyter lab, menu Nbgrader, Formgrader")
            lines.append("  then give the same command again: it brings the marks back")
        return "\n".join(lines)


def sync(out: Path) -> Synced:
    """Bring back the marks given so far, and lay out what there is to read. To be called as often as one likes.

    Raises `UserError` when there are no results, or nbgrader is missing.
    """
    results = outcomes.load_all(out)
    known = {mark.key: mark for mark in load(out)}
    known |= {mark.key: mark for mark in formgrader.marks(out)}
    save(out, known.values())
    current = {(r.student, r.lesson, name): d for r in results for name, d in formgrader.answers(out, r).items()}
    kept = {key: mark for key, mark in known.items() if current.get(key) == mark.answer}
    stale = {key for key in known if key in current and key not in kept}
    folder = formgrader.lay(out, results, kept, stale)
    after = apply(out, results)
    waiting = sum(e.status == "needs-manual" for r in after for e in r.exercises)
    changed = tuple(f"{s} {lesson[:2]} {name}" for s, lesson, name in sorted(stale))
    return Synced(folder, sum(mark.points is not None for mark in kept.values()), waiting, changed)


def apply(out: Path, results: Sequence[SubmissionResult]) -> list[SubmissionResult]:
    """`results` with the marks of a reader in place: points, a status that goes with them, the comment as message.

    A mark counts as long as the answer that it was given for is still the one that was handed in.
    """
    known = {mark.key: mark for mark in load(out)}
    if not known:
        return list(results)
    found = []
    for result in results:
        mine = [known.get((e.student, e.lesson, e.exercise)) for e in result.exercises]
        if not any(mine):
            found.append(result)
            continue
        digests = formgrader.answers(out, result)
        exercises = tuple(
            _marked(one, mark) if mark and mark.answer == digests[one.exercise] else one
            for one, mark in zip(result.exercises, mine, strict=True)
        )
        found.append(replace(result, exercises=exercises))
    return found


def load(out: Path) -> list[Mark]:
    """The marks in ``OUT/manual.json``; none where there is no such file. Raises `UserError` when it is damaged."""
    path = out / FILE
    if not path.is_file():
        return []
    found = executing.read_json(path)
    try:
        if found["schema"] != SCHEMA:
            raise ValueError
        return [Mark(**row) for row in found["marks"]]
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} is damaged: put it aside; marks in {formgrader.FOLDER}/ come back by themselves"
        ) from error


def save(out: Path, marks: Iterable[Mark]) -> Path:
    """Write the marks in one step, so that a kill loses none."""
    path = out / FILE
    rows = [asdict(mark) for mark in sorted(marks, key=lambda m: m.key)]
    text = json.dumps({"schema": SCHEMA, "marks": rows}, indent=1) + "\n"
    try:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            executing.write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _marked(one: ExerciseResult, mark: Mark) -> ExerciseResult:
    said = (f"a reader: {mark.comment}",) if mark.comment else ()
    if mark.points is None or (one.status != "needs-manual" and mark.points == one.points):
        return replace(one, notes=(*one.notes, *said))
    status = "graded" if mark.points >= one.maximum else "partial" if mark.points > 0 else "wrong"
    note = MARKED
    if one.status != "needs-manual":
        note += f", who gave {number(mark.points)} instead of {number(round(one.points, 2))}"
    return replace(one, points=mark.points, status=status, message=mark.comment or note, notes=(*one.notes, note))
