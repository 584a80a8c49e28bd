"""``labkit grade``: a folder of submissions to scores, one result at a time, whatever is in them.

A result is written as soon as it is there, with what it was made of; the next call keeps those of which nothing has
changed (`keeping`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .. import places
from . import (
    feedback,
    intake,
    keeping,
    lessons,
    manual,
    occupied,
    outcomes,
    scores,
    scratch,
    session,
    single,
    submissions,
    summary,
    telling,
)
from .outcomes import SubmissionResult
from .sandbox import require
from .setting import Course as Course
from .setting import Options as Options
from .submissions import Submission


def grade(
    folder: Path, out: Path, *, hidden: Path | None = None, options: Options | None = None, home: Path | None = None
) -> int:
    """Grade every submission in `folder` into `out`. Returns 1 when one could not be graded for a reason of ours.

    `hidden` is the folder of hidden tests (instructor/hidden unless given), `home` the course's folder. Raises
    `UserError` when there is nothing to grade, a code exercise has no hidden test, no sandbox can be made, or `out`
    cannot be used; `occupied.Stopped` when the machine itself (a full disk) ends it; KeyboardInterrupt says how far it
    came. In both cases the same call goes on from there.
    """
    options, home = options or Options(), home or places.home()
    occupied.apart(folder, out)
    found = intake.collect(folder)
    with occupied.only(out):
        scratch.sweep()
        if options.walled:
            require()
        course = Course.read(home / "lessons", hidden or home / "instructor" / "hidden", home / "data")
        opened = submissions.open_all(found.entries, course.lessons)
        for name in sorted({s.lesson for s in opened if not s.unreadable}):
            tests = lessons.tests(course.lessons[name], course.hidden)  # raises before anything runs
            course.preload[name] = session.modules(course.files[name], course.lessons[name], tests)
        try:
            gone = keeping.forget(out, folder, {(s.entry.student, s.lesson) for s in opened})
            intake.save(out, folder, found.left_out)
            session.key_of(out)  # made before several need it
        except OSError as error:
            raise occupied.unwritable(out, error) from error
        failed = _all(course, opened, out, folder, options, [*intake.lines(found.left_out), *keeping.removed(gone)])
        finish(out)
    return 1 if failed else 0


def finish(out: Path) -> list[SubmissionResult]:
    """Write what is made of all results: scores.csv (a reader's marks counted in), the pages, the class summary."""
    found = results(out)
    try:
        scores.write(out, found)
    except OSError as error:
        raise occupied.unwritable(out, error) from error
    feedback.write(out)
    summary.write(out)
    return found


def results(out: Path) -> list[SubmissionResult]:
    """All results in `out`, a reader's marks counted in. Raises `UserError` when there are none."""
    return manual.apply(out, outcomes.load_all(out))


@dataclass(frozen=True)
class _Job:
    """A submission to be graded: what its result will be made of, and whether the run is over for all."""

    submission: Submission
    made_of: dict[str, str]
    out: Path
    folder: Path
    options: Options
    over: threading.Event


def _all(
    course: Course, opened: Sequence[Submission], out: Path, folder: Path, options: Options, notes: Sequence[str]
) -> int:
    """Grade what is not graded yet, lesson by lesson. Returns how many failed."""
    over, failed = threading.Event(), 0
    kept: list[SubmissionResult] = []
    jobs: dict[str, list[_Job]] = {}
    again: Counter[tuple[str, ...]] = Counter()
    for submission in opened:
        job = _Job(submission, _made_of(course, submission, options), out, folder, options, over)
        there = outcomes.load(outcomes.path(out, submission.entry.student, submission.lesson))
        changed = keeping.changes(there, job.made_of) if there else []
        if there and not changed and not options.fresh:
            kept.append(_from(there, folder, out))
            continue
        again[tuple(changed)] += there is not None and not options.fresh
        jobs.setdefault(submission.lesson, []).append(job)
    todo = sum(map(len, jobs.values()))
    for line in (*notes, *keeping.again(again), f"notebooks to grade: {todo}; graded before: {len(kept)}"):
        print(line, flush=True)
    with telling.progress(len(opened)) as progress:
        try:
            for result in kept:
                progress.tell(result, kept=True)
            for name, those in sorted(jobs.items()):
                failed += _lesson(course, name, those, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{progress}; the same command goes on from there") from None
    return failed


def _made_of(course: Course, submission: Submission, options: Options) -> dict[str, str]:
    about = repr((submission.entry.relative, submission.unreadable, submission.findings))
    mine = {"file": submission.digest, "name": hashlib.sha256(about.encode("utf-8", "replace")).hexdigest()[:16]}
    return mine | course.made_of(submission.lesson, options)


def _from(there: SubmissionResult, folder: Path, out: Path) -> SubmissionResult:
    """A result that is kept: from now on that of a file in `folder`."""
    if there.folder != str(folder.resolve()):
        there = dataclasses.replace(there, folder=str(folder.resolve()))
        outcomes.save(out, there)
    return there


def _lesson(course: Course, name: str, jobs: Sequence[_Job], progress: telling.Progress) -> int:
    """Grade the submissions of one lesson; they share the process that judges. Returns how many failed."""
    trusted = session.Trusted(course.files[name], course.hidden) if name in course.files else None
    pool = ThreadPoolExecutor(jobs[0].options.jobs)
    failed = 0
    try:
        for job in jobs:
            path = outcomes.path(job.out, job.submission.entry.student, name)
            path.unlink(missing_ok=True)  # an old score is no score
        for future in as_completed([pool.submit(_one, course, job, trusted) for job in jobs]):
            result = future.result()
            failed += not result.made_of
            progress.tell(result)
    except BaseException:
        jobs[0].over.set()  # what is in flight is not written: it may fail for the processes that end now
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # on Ctrl-C nobody waits for what is in flight
        if trusted:
            trusted.close()
    return failed


def _one(course: Course, job: _Job, trusted: session.Trusted | None) -> SubmissionResult:
    """Grade one submission and write its result; a failure of the grader's own becomes a result made of nothing.

    Raises `occupied.Stopped`, and writes nothing, when the failure is the machine's, which no student answers for.
    """
    began = time.monotonic()
    submission, made_of = job.submission, job.made_of
    lesson = course.lessons.get(submission.lesson)
    try:
        _stop_if(job)
        if submission.unreadable or lesson is None or trusted is None:
            result = single.unreadable(submission, lesson)
        else:
            result = single.graded(course, lesson, submission, trusted, job.out, job.options, job.folder)
    except occupied.Stopped:
        raise
    except Exception as error:  # one submission never stops the batch
        _stop_if(job, error)
        result, made_of = single.failed(submission, lesson, f"grading failed: {type(error).__name__}: {error}"), {}
    seconds = round(time.monotonic() - began, 2)
    result = dataclasses.replace(result, seconds=seconds, made_of=made_of, folder=str(job.folder.resolve()))
    try:
        _stop_if(job)
        outcomes.save(job.out, result)
    except (ValueError, RecursionError) as error:  # rows of a strange depth, say
        result = single.failed(submission, lesson, f"its result cannot be written: {type(error).__name__}")
        result = dataclasses.replace(result, folder=str(job.folder.resolve()))
        outcomes.save(job.out, result)
    except OSError as error:
        _stop_if(job, error)
        raise
    return result


def _stop_if(job: _Job, error: Exception | None = None) -> None:
    """Raises `occupied.Stopped` when the run is over, or `error` is the machine's: then it is over for all."""
    trouble = occupied.the_machines(error) or (occupied.full(job.out, Path(tempfile.gettempdir())) if error else None)
    if trouble:
        job.over.set()
        raise occupied.unwritable(job.out, trouble) from error
    if job.over.is_set():
        raise occupied.Stopped("the run is over")
