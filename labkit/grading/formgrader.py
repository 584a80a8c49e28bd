"""Results as a course folder of nbgrader, so that its formgrader shows the written answers and takes marks for them.

``OUT/nbgrader`` gets ``source/`` (the lesson with its solutions), ``release/`` (as learners get it),
``autograded/<student>/<lesson>/`` (the notebook as it was run again) and ``gradebook.db``. The folders in
``submitted/`` are there to be counted, and empty on purpose: nbgrader would run what is in them without a sandbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import executing, notebooks, places
from ..submitting import exercise_cells, grade_id, parsed, source
from ..units import UserError
from .harmless import harmless
from .outcomes import ExerciseResult, SubmissionResult

FOLDER = "nbgrader"
CONFIG = "nbgrader_config.py"
COURSE = "labkit"  # as in that file
Key = tuple[str, str, str]  # student, lesson, exercise


@dataclass(frozen=True)
class Mark:
    """What a reader gave one exercise: points (None: only a comment), and the digest of the answer that was read."""

    student: str
    lesson: str
    exercise: str
    points: float | None
    comment: str
    answer: str

    @property
    def key(self) -> Key:
        """Whose mark of what."""
        return self.student, self.lesson, self.exercise


def lay(out: Path, results: Sequence[SubmissionResult], kept: Mapping[Key, Mark], stale: Collection[Key] = ()) -> Path:
    """Lay `results` into ``OUT/nbgrader``; returns that folder.

    `kept` are the marks that hold, `stale` those to take back, because the answer that they were given for is another
    one now. What is no longer in `results` leaves the gradebook. Raises `UserError` when nbgrader is missing or the
    folder cannot be written.
    """
    folder = out / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = places.home() / "instructor" / CONFIG
        shutil.copyfile(config, folder / CONFIG)
        shown = [r for r in results if _notebook(out, r) is not None]
        with _gradebook(folder) as book:
            for lesson in sorted({r.lesson for r in shown}):
                _lay_lesson(folder, book, lesson)
            _forget(folder, book, {(r.student, r.lesson) for r in shown})
            for result in shown:
                _lay_submission(out, folder, book, result, kept, stale)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder


def marks(out: Path) -> list[Mark]:
    """What readers have given so far in ``OUT/nbgrader``: every score and every comment that somebody typed in.

    An answer is known by the notebook that the reader saw. Points below zero count as zero, those above the maximum as
    the maximum; extra credit is added to that.
    """
    folder = out / FOLDER
    if not (folder / "gradebook.db").is_file():
        return []
    found = []
    with _gradebook(folder) as book:
        for assignment in book.assignments:
            for submission in assignment.submissions:
                student, lesson = submission.student.id, assignment.name
                for notebook in submission.notebooks:
                    cells = _cells(folder / "autograded" / student / lesson / f"{lesson}.ipynb")
                    comments = {c.name: c.manual_comment or "" for c in notebook.comments}
                    for grade in notebook.grades:
                        name = grade.name.removesuffix("-check")
                        points, comment = _given(grade), comments.get(name, "")
                        if points is not None or comment:
                            found.append(Mark(student, lesson, name, points, comment, digest(cells, name)))
    return found


def answers(out: Path, result: SubmissionResult) -> dict[str, str]:
    """The digest of each answer in the notebook of a result, by exercise; empty where there is no notebook."""
    path = _notebook(out, result)
    cells = _cells(path) if path else {}
    return {one.exercise: digest(cells, one.exercise) for one in result.exercises}


def digest(cells: Mapping[str, Mapping[str, Any]], exercise: str) -> str:
    """What tells one answer from another: the sha256 of its cell's source; of nothing where the cell is gone."""
    text = source(cells[exercise]) if exercise in cells else ""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _lay_lesson(folder: Path, book: Any, lesson: str) -> None:
    """The lesson in source/, with its solutions, in release/, and in the gradebook: graded, answer and locked cells."""
    pristine = _pristine(lesson)
    master = folder / "source" / lesson / f"{lesson}.ipynb"  # formgrader lists the lessons that are in source/
    master.parent.mkdir(parents=True, exist_ok=True)
    executing.write_text(master, notebooks.dumps(notebooks.master(places.home() / "lessons" / f"{lesson}.py")))
    _save(folder / "release" / lesson / f"{lesson}.ipynb", pristine)
    book.update_or_create_assignment(lesson)
    book.update_or_create_notebook(lesson, lesson)
    for cell in pristine["cells"]:
        name = grade_id(cell)
        if not name:
            continue
        meta = cell["metadata"]["nbgrader"]
        kind, text = cell["cell_type"], source(cell)
        if meta["grade"]:
            points = float(meta["points"])
            book.update_or_create_grade_cell(name, lesson, lesson, max_score=points, cell_type=kind)
        if meta["solution"]:
            book.update_or_create_solution_cell(name, lesson, lesson)
        book.update_or_create_source_cell(
            name, lesson, lesson, cell_type=kind, source=text, locked=meta["locked"], checksum=meta.get("checksum")
        )


def _lay_submission(
    out: Path, folder: Path, book: Any, result: SubmissionResult, kept: Mapping[Key, Mark], stale: Collection[Key]
) -> None:
    student, lesson = result.student, result.lesson
    path = _notebook(out, result)
    assert path is not None  # `lay` leaves the others out
    notebook = harmless(parsed(path.read_bytes(), path.name), _pristine(lesson))
    _save(folder / "autograded" / student / lesson / f"{lesson}.ipynb", notebook)
    (folder / "submitted" / student / lesson).mkdir(parents=True, exist_ok=True)
    book.update_or_create_student(student)
    book.update_or_create_submission(lesson, student)
    by = {one.exercise: one for one in result.exercises}
    submitted = book.find_submission_notebook(lesson, lesson, student)
    for grade in submitted.grades:
        name = grade.name.removesuffix("-check")
        if (student, lesson, name) in stale:
            grade.manual_score = grade.extra_credit = None
        _grade(grade, by.get(name), kept.get((student, lesson, name)))
    for comment in submitted.comments:
        mark = kept.get((student, lesson, comment.name))
        comment.auto_comment = by[comment.name].message if comment.name in by else None
        if (student, lesson, comment.name) in stale or mark:
            comment.manual_comment = (mark.comment or None) if mark else None
    book.db.commit()


def _grade(grade: Any, one: ExerciseResult | None, mark: Mark | None) -> None:
    """Fill in one grade. Nothing stays at nbgrader's defaults, by which a cell that is gone would wait for ever."""
    written = one is not None and one.status == "needs-manual"
    grade.auto_score = None if written else min(max(one.points, 0.0), grade.max_score) if one else 0.0
    if mark and mark.points is not None:
        grade.manual_score = min(mark.points, grade.max_score)
        grade.extra_credit = mark.points - grade.max_score if mark.points > grade.max_score else None
    grade.needs_manual_grade = written and grade.manual_score is None


def _given(grade: Any) -> float | None:
    """The points that a reader typed in, extra credit included."""
    if grade.manual_score is None or grade.needs_manual_grade:
        return None
    return float(min(max(grade.manual_score, 0.0), grade.max_score) + max(grade.extra_credit or 0.0, 0.0))


def _forget(folder: Path, book: Any, there: set[tuple[str, str]]) -> None:
    """Take submissions out of the gradebook that are not among the results any more."""
    for assignment in book.assignments:
        for submission in list(assignment.submissions):
            student, lesson = submission.student.id, assignment.name
            if (student, lesson) not in there:
                book.remove_submission(lesson, student)
                for step in ("autograded", "submitted"):
                    shutil.rmtree(folder / step / student / lesson, ignore_errors=True)


@contextmanager
def _gradebook(folder: Path) -> Iterator[Any]:
    try:
        from nbgrader.api import Gradebook, StatementError
    except ImportError as error:
        raise UserError("reading written answers needs nbgrader: pip install 'gpt2-small-gpu-lab[grading]'") from error

    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])  # nbgrader calls `alembic`
    try:
        with warnings.catch_warnings(), Gradebook(f"sqlite:///{folder.resolve() / 'gradebook.db'}", COURSE) as book:
            warnings.simplefilter("ignore", RuntimeWarning)  # SQLAlchemy's, about nbgrader's own models
            yield book
    except StatementError as error:  # what SQLAlchemy raises for a file that is no database, too
        raise UserError(f"the gradebook in {folder} cannot be used: {str(error).splitlines()[0]}") from error
    finally:
        os.environ["PATH"] = before


def _notebook(out: Path, result: SubmissionResult) -> Path | None:
    """The notebook of a result that can be shown: as run again, else as handed in."""
    for name in (result.regenerated_notebook, result.saved_notebook):
        if name and (out / name).is_file():
            try:
                parsed((out / name).read_bytes(), name)
            except UserError:
                continue
            return out / name
    return None


def _pristine(lesson: str) -> dict[str, Any]:
    path = places.home() / "notebooks" / f"{lesson}.ipynb"
    try:
        return parsed(path.read_bytes(), path.name)
    except OSError as error:
        raise UserError(f"the lesson {lesson} is not in {path.parent}: run this inside the course's folder") from error


def _cells(path: Path) -> dict[str, dict[str, Any]]:
    """The cells of a notebook by their nbgrader name, the first of those that have the same."""
    try:
        return exercise_cells(parsed(path.read_bytes(), path.name))
    except (OSError, UserError):
        return {}


def _save(path: Path, notebook: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    executing.write_text(path, json.dumps(notebook, ensure_ascii=True, indent=1) + "\n")
