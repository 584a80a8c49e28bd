"""One submission graded: each exercise in a process of its own, then the whole notebook run again for the feedback."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import executing
from . import comparing, lessons, rerun, session
from .outcomes import ExerciseResult, Finding, SubmissionResult
from .runner import Runner
from .sandbox import Sandbox
from .setting import Course, Options
from .submissions import Submission


def graded(
    course: Course,
    lesson: lessons.Lesson,
    submission: Submission,
    trusted: session.Trusted,
    out: Path,
    options: Options,
    folder: Path,
) -> SubmissionResult:
    """Grade a submission of `folder` that can be read, and leave its notebook as handed in, and as run again, in `out`.

    Neither folder, nor that of the hidden tests, is seen from the sandbox."""
    student = submission.entry.student
    threads, hide = max(1, (os.cpu_count() or 2) // options.jobs), [folder, out, course.hidden]
    sandbox = Sandbox(options.limits, walled=options.walled, threads=threads, hide=hide)
    setup = sandbox.setup(preload=course.preload[lesson.name])
    runner = Runner(lambda: sandbox.launch("labkit.grading.inside"), setup)
    key = session.key_of(out)
    try:
        found = [exercise(lesson, task, submission, trusted, runner, options, key) for task in lesson.tasks]
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
        findings += comparing.ledger_findings(submission.rows, again.rows, lesson.name)
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


def exercise(
    lesson: lessons.Lesson, task: lessons.Task, submission: Submission, trusted: session.Trusted, runner: Runner,
    options: Options, key: bytes,
) -> ExerciseResult:  # fmt: skip
    """One exercise scored; an answer that cannot even be prepared (an expression that no parser takes, half a
    character) costs this exercise alone. A sandbox that does not start is no answer's fault, and is raised."""
    student = submission.entry.student
    try:
        return session.grade(
            lesson, task, submission.sheet, trusted, runner, student=student, seconds=options.answer_seconds,
            seed=session.seed_of(key, student, lesson.name, task.name),
        )  # fmt: skip
    except (UnicodeError, RecursionError, MemoryError) as error:
        runner.close()
        reason = f"the answer cannot be run ({type(error).__name__})"
        return ExerciseResult(student, lesson.name, task.name, 0, task.maximum, "error", reason, kind=task.kind)


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


def unreadable(submission: Submission, lesson: lessons.Lesson | None) -> SubmissionResult:
    """The result of a file that is no notebook of this course."""
    return _without(submission, lesson, "unreadable", submission.unreadable, "unreadable")


def failed(submission: Submission, lesson: lessons.Lesson | None, reason: str) -> SubmissionResult:
    """The result of a submission that grading itself failed on."""
    return _without(submission, lesson, "crashed", reason, "run")


def _without(
    submission: Submission, lesson: lessons.Lesson | None, status: str, reason: str, kind: str
) -> SubmissionResult:
    """A result without an answer that was run: every exercise of the lesson, or one line without a name."""
    student, name = submission.entry.student, submission.lesson
    tasks = [(t.name, t.maximum, t.kind) for t in lesson.tasks] if lesson else [("", 0.0, "")]
    exercises = tuple(ExerciseResult(student, name, t, 0, most, status, reason, kind=k) for t, most, k in tasks)
    return SubmissionResult(student, name, submission.entry.relative, exercises, (Finding(kind, reason),))
