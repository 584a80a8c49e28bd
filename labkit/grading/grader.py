"""``labkit grade``: a folder of submissions to scores, one result at a time, whatever is in them.

A result is written as soon as it is there, with the digest of what it was made of; the next call keeps those whose
submission, lesson, hidden tests and grader are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import executing, places
from ..units import UserError
from . import comparing, feedback, lessons, manual, outcomes, rerun, scores, session, submissions, summary
from .outcomes import ExerciseResult, Finding, SubmissionResult
from .runner import Runner
from .sandbox import Limits, Sandbox, require
from .submissions import Submission


@dataclass(frozen=True)
class Options:
    """How to grade: how many submissions at once, in a sandbox or not, keeping results that are there or not, with the
    whole notebook run again or exercises only, the seconds that one of its cells may take and those of an answer."""

    jobs: int = 1
    walled: bool = True
    fresh: bool = False
    exercises_only: bool = False
    cell_seconds: float = rerun.CELL_SECONDS
    answer_seconds: float = session.ANSWER_SECONDS
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Course:
    """The lessons that submissions are graded against: their files, what they ask, the folder of hidden tests, and of
    those that were handed in the modules that answers will import."""

    files: dict[str, Path]
    lessons: dict[str, lessons.Lesson]
    hidden: Path
    preload: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, hidden: Path) -> Course:
        """Every lesson in `folder`. Raises `UserError` when there is none."""
        files = {f.stem: f for f in sorted(folder.glob("[0-9][0-9]_*.py"))}
        if not files:
            raise UserError(f"no lessons in {folder}: grading needs the course's folder with lessons/ in it")
        return cls(files, {name: lessons.read(file) for name, file in files.items()}, hidden)

    def digest(self, lesson: str) -> str:
        """What besides the submission decides a score of this lesson."""
        package = Path(__file__).resolve().parents[1]
        return lessons.digest(self.files[lesson], self.hidden / f"{lesson}.py", package)


def grade(
    folder: Path, out: Path, *, hidden: Path | None = None, options: Options | None = None, home: Path | None = None
) -> int:
    """Grade every submission in `folder` into `out`. Returns 1 when one could not be graded for a reason of ours.

    `hidden` is the folder of hidden tests (instructor/hidden unless given), `home` the course's folder. Raises
    `UserError` when there is nothing to grade, a code exercise has no hidden test, or no sandbox can be made.
    """
    options, home = options or Options(), home or places.home()
    entries = submissions.collect(folder)
    if options.walled:
        require()
    course = Course.read(home / "lessons", hidden or home / "instructor" / "hidden")
    opened = submissions.open_all(entries, course.lessons)
    for name in sorted({s.lesson for s in opened if not s.unreadable}):
        tests = lessons.tests(course.lessons[name], course.hidden)  # raises before anything runs
        course.preload[name] = session.modules(course.files[name], course.lessons[name], tests)
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with _progress(len(opened)) as tell:
        for name in sorted({s.lesson for s in opened}):
            failed += _lesson(course, name, [s for s in opened if s.lesson == name], out, options, tell)
    finish(out)
    return 1 if failed else 0


def finish(out: Path) -> list[SubmissionResult]:
    """Write what is made of all results: scores.csv (a reader's marks counted in), the pages, the class summary."""
    results = manual.apply(out, outcomes.load_all(out))
    scores.write(out, results)
    feedback.write(out)
    summary.write(out)
    return results


def _lesson(course: Course, name: str, those: Sequence[Submission], out: Path, options: Options, tell: Any) -> int:
    """Grade the submissions of one lesson; they share the process that judges. Returns how many failed."""
    trusted = session.Trusted(course.files[name], course.hidden) if name in course.files else None
    digest = course.digest(name) if trusted else ""
    pool = ThreadPoolExecutor(options.jobs)
    failed = 0
    try:
        waiting = []
        for submission in those:
            made_of = f"{submission.digest}-{digest}-{'exercises' if options.exercises_only else 'whole'}"
            kept = None if options.fresh else outcomes.load(outcomes.path(out, submission.entry.student, name))
            if kept is not None and kept.made_of == made_of and kept.file == submission.entry.relative:
                tell(kept, again=True)
                continue
            outcomes.path(out, submission.entry.student, name).unlink(missing_ok=True)  # an old score is no score
            waiting.append(pool.submit(_one, course, submission, trusted, out, options, made_of))
        for future in as_completed(waiting):
            result = future.result()
            failed += not result.made_of
            tell(result)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # on Ctrl-C nobody waits for what is in flight
        if trusted:
            trusted.close()
    return failed


def _one(
    course: Course, submission: Submission, trusted: session.Trusted | None, out: Path, options: Options, made_of: str
) -> SubmissionResult:
    """Grade one submission and write its result; a failure of the grader's own becomes a result without a digest."""
    began = time.monotonic()
    lesson = course.lessons.get(submission.lesson)
    try:
        if submission.unreadable or lesson is None or trusted is None:
            result = _unreadable(submission, lesson)
        else:
            result = _graded(course, lesson, submission, trusted, out, options)
    except Exception as error:  # one submission never stops the batch
        result = _failed(submission, lesson, f"grading failed: {type(error).__name__}: {error}")
        made_of = ""
    result = dataclasses.replace(result, seconds=round(time.monotonic() - began, 2), made_of=made_of)
    try:
        outcomes.save(out, result)
    except (ValueError, RecursionError) as error:  # rows of a strange depth, say
        result = _failed(submission, lesson, f"its result cannot be written: {type(error).__name__}")
        outcomes.save(out, result)
    return result


def _graded(
    course: Course,
    lesson: lessons.Lesson,
    submission: Submission,
    trusted: session.Trusted,
    out: Path,
    options: Options,
) -> SubmissionResult:
    student = submission.entry.student
    sandbox = Sandbox(options.limits, walled=options.walled, threads=max(1, (os.cpu_count() or 2) // options.jobs))
    setup = sandbox.setup(preload=course.preload[lesson.name])
    runner = Runner(lambda: sandbox.launch("labkit.grading.inside"), setup)
    try:
        found = [_exercise(lesson, task, submission, trusted, runner, options) for task in lesson.tasks]
    finally:
        runner.close()
        sandbox.close()
    again = None
    if not options.exercises_only:
        again = rerun.run(submission.notebook, sandbox, cell_seconds=options.cell_seconds)
    findings = submission.findings + (again.findings if again else ())
    exercises = []
    for task, one in zip(lesson.tasks, found, strict=True):
        reasons = [*submission.tampered.get(task.name, ()), *_overclaims(submission, task, one, again)]
        exercises.append(_marked(one, reasons))
        findings += tuple(Finding("tampered", f"{task.name}: {reason}", task.check) for reason in reasons)
    if again:
        findings += ledger_findings(submission.rows, again.rows, lesson.name)
    saved = f"submitted/{student}/{lesson.name}.ipynb"
    executing.write(submission.saved, out / saved)
    regenerated = ""
    if again:
        regenerated = f"regenerated/{student}/{lesson.name}.ipynb"
        executing.write(again.notebook, out / regenerated)
    return SubmissionResult(
        student, lesson.name, submission.entry.relative, tuple(exercises), findings,
        saved_rows=submission.rows, regenerated_rows=again.rows if again else (), saved_notebook=saved,
        regenerated_notebook=regenerated,
    )  # fmt: skip


def _exercise(
    lesson: lessons.Lesson, task: lessons.Task, submission: Submission, trusted: session.Trusted, runner: Runner,
    options: Options,
) -> ExerciseResult:  # fmt: skip
    """One exercise scored; an answer that cannot even be prepared (an expression that no parser takes, half a
    character) costs this exercise alone. A sandbox that does not start is no answer's fault, and is raised."""
    student = submission.entry.student
    try:
        return session.grade(
            lesson, task, submission.sheet, trusted, runner, student=student, seconds=options.answer_seconds
        )
    except (UnicodeError, RecursionError, MemoryError) as error:
        runner.close()
        reason = f"the answer cannot be run ({type(error).__name__})"
        return ExerciseResult(student, lesson.name, task.name, 0, task.maximum, "error", reason, kind=task.kind)


def ledger_findings(
    saved: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]], lesson: str
) -> tuple[Finding, ...]:
    """What in a handed-in ledger cannot come from this notebook: memory that was predicted twice for the same card by
    the same PyTorch, with two results."""
    pairs = comparing.rows(saved, again, lesson) if saved else []
    wrong = [p for p in pairs if p.flagged and p.kind == "memory" and "must be equal" in p.why]
    return tuple(
        Finding("ledger", f"{p.what}: the ledger says {p.saved}, running the notebook gives {p.again}")
        for p in wrong[:5]
    )


def _overclaims(
    submission: Submission, task: lessons.Task, one: ExerciseResult, again: rerun.Rerun | None
) -> Iterator[str]:
    """What the saved output or the handed-in ledger says of an exercise beyond what our check of this answer gives."""
    if task.manual or one.status == "graded":
        return
    visible = one.points if task.kind != "code" else again.claimed().get(task.name) if again else None
    if visible is None:
        return
    for what, claims in (("saved output", submission.claims), ("ledger", rerun.claims(submission.rows))):
        claimed = claims.get(task.name)
        if claimed is not None and claimed > visible + 1e-6:
            yield f"the {what} says {claimed:g} points, running these cells gives {visible:g}"


def _marked(one: ExerciseResult, reasons: Sequence[str]) -> ExerciseResult:
    """An exercise whose cells or outputs were changed: its points stay what our own checks gave."""
    if not reasons or one.status == "tampered":
        return one
    message = f"{'; '.join(reasons)}. Scored with the course's own check: {one.message}"
    return dataclasses.replace(one, status="tampered", message=message)


def _unreadable(submission: Submission, lesson: lessons.Lesson | None) -> SubmissionResult:
    return _without(submission, lesson, "unreadable", submission.unreadable, "unreadable")


def _failed(submission: Submission, lesson: lessons.Lesson | None, reason: str) -> SubmissionResult:
    return _without(submission, lesson, "crashed", reason, "run")


def _without(
    submission: Submission, lesson: lessons.Lesson | None, status: str, reason: str, kind: str
) -> SubmissionResult:
    """A result without an answer that was run: every exercise of the lesson, or one line without a name."""
    student, name = submission.entry.student, submission.lesson
    tasks = [(t.name, t.maximum, t.kind) for t in lesson.tasks] if lesson else [("", 0.0, "")]
    exercises = tuple(ExerciseResult(student, name, t, 0, most, status, reason, kind=k) for t, most, k in tasks)
    return SubmissionResult(student, name, submission.entry.relative, exercises, (Finding(kind, reason),))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Tells how far grading is: a bar on a terminal, one line for each submission elsewhere."""
    done = [0]

    def line(result: SubmissionResult, again: bool) -> str:
        done[0] += 1
        counts: dict[str, int] = {}
        for e in result.exercises:
            counts[e.status] = counts.get(e.status, 0) + 1
        words = ", ".join(f"{n} {s}" for s, n in counts.items())
        spent = "kept" if again else f"{result.seconds:.0f} s"
        points = f"{result.points:g}/{result.maximum:g}"
        return f"[{done[0]}/{total}] {result.student} · {result.lesson} · {points} ({words}) · {spent}"

    if not sys.stdout.isatty():
        yield lambda result, again=False: print(line(result, again), flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("grading", total=total)

        def tell(result: SubmissionResult, again: bool = False) -> None:
            bar.console.print(line(result, again), highlight=False, markup=False)
            bar.advance(task)

        yield tell
