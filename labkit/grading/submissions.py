"""What was handed in, opened and looked through before any of it runs.

Each file that `intake` found is matched against our own notebook of the lesson: given and check cells are replaced by
ours, whatever was done to them; only the answer cells and the cells that the learner added are taken from it. What was
changed, deleted, stripped or faked is found on the way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import bundles, notebooks
from ..units import UserError
from . import matching, reading
from .intake import Entry, safe
from .lessons import Lesson
from .outcomes import Finding
from .slicing import Cell


@dataclass(frozen=True)
class Submission:
    """One student's notebook of one lesson, ready to be graded.

    ``notebook`` is what will run: our cells with the student's answers; None when there is nothing to run, and
    ``unreadable`` says why. ``saved`` is the notebook as handed in. ``tampered`` has what was done to an exercise's
    cells, ``claims`` the points that saved outputs say, ``ledger`` those that the handed-in rows say.
    """

    entry: Entry
    lesson: str
    digest: str
    unreadable: str = ""
    notebook: Any = None
    saved: Any = None
    sheet: tuple[Cell, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    findings: tuple[Finding, ...] = ()
    tampered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claims: Mapping[str, float] = field(default_factory=dict)


def open_all(entries: Iterable[Entry], course: Mapping[str, Lesson]) -> list[Submission]:
    """Every entry opened. Of several files of one student for one lesson one is graded, and the rest are named: what
    can be read before what cannot, a file of ``labkit submit`` before a notebook, the lesson's own name before another,
    the newest by the files' times, the highest number that a download gave."""
    chosen: dict[tuple[str, str], list[Submission]] = {}
    for entry in entries:
        made = open_one(entry, course)
        chosen.setdefault((entry.student, made.lesson), []).append(made)
    return [_best(several) for _, several in sorted(chosen.items())]


_RULES = ("can be read", "was written by labkit submit", "has the lesson's name", "is newer", "is the later download")


def _best(several: list[Submission]) -> Submission:
    def worth(one: Submission) -> tuple[bool, bool, bool, float, int]:
        entry = one.entry
        time = entry.file.lstat().st_mtime
        return not one.unreadable, entry.bundled, entry.stem == one.lesson, time, entry.copy

    several = sorted(several, key=worth)
    best = several[-1]
    others = []
    for other in several[:-1]:
        pairs = zip(_RULES, worth(best), worth(other), strict=True)
        rule = next((rule for rule, ours, theirs in pairs if ours != theirs), "is the last by name")
        others.append(Finding("renamed", f"{other.entry.relative} is not graded: {best.entry.relative} {rule}"))
    return dataclasses.replace(best, findings=(*best.findings, *others))


def open_one(entry: Entry, course: Mapping[str, Lesson]) -> Submission:
    """One entry, opened and matched. Never raises for what is in the file."""
    stem = entry.stem
    try:
        return _opened(entry, stem, course)
    except UserError as error:
        reason = safe(str(error), 400)
    except Exception as error:  # what no reader foresaw: source that no parser takes, say
        reason = f"cannot be looked through ({type(error).__name__})"
    return Submission(entry, safe(stem), _digest_of(entry), unreadable=reason)


def _opened(entry: Entry, stem: str, course: Mapping[str, Lesson]) -> Submission:
    """`open_one`, which keeps what it raises to this file."""
    content, digest, bundle = _read(entry)
    saved = reading.notebook(content)
    name, findings = _which(saved, stem, bundle.lesson if bundle else "", course)
    lesson = course[name]
    findings += _version(lesson, bundle)
    matched = matching.match(lesson, saved)
    findings += matched.findings + order(lesson, saved)
    cells = [c for c in matched.notebook.cells if c.cell_type == "code"]
    sheet = tuple(Cell(c.id, c.source, matched.roles[c.id]) for c in cells)
    return Submission(
        entry, name, digest, "", matched.notebook, saved, sheet, bundle.rows if bundle else (), tuple(findings),
        {k: tuple(v) for k, v in matched.tampered.items()}, matched.claims,
    )  # fmt: skip


def order(lesson: Lesson, saved: Any) -> list[Finding]:
    """Whether the cells of a saved notebook were run from top to bottom."""
    last, where = 0, ""
    for cell in saved.cells:
        count = cell.get("execution_count") if cell.cell_type == "code" else None
        if not isinstance(count, int):
            continue
        if count < last:
            say = f"saved with its cells run out of order (this one before {where}); graded from top to bottom"
            return [Finding("order", say, str(cell.get("id", "")))]
        last, where = count, str(cell.get("id", "another"))
    return []


def _read(entry: Entry) -> tuple[bytes, str, bundles.Bundle | None]:
    file = entry.file
    if entry.linked:
        raise UserError("a link, not a file of this student's own")
    if entry.bundled:
        bundle = bundles.read(file)
        return bundle.notebook, _digest_of(entry), bundle
    return reading.content(file), _digest_of(entry), None


def _digest_of(entry: Entry) -> str:
    """What is in a file, in short; nothing for one that is not to be read."""
    return "" if entry.linked or not entry.file.is_file() else reading.digest(entry.file)


def _which(saved: Any, stem: str, bundled: str, course: Mapping[str, Lesson]) -> tuple[str, list[Finding]]:
    """The lesson that a notebook is of, by what is in it. Raises `UserError` when it is none, or not the one named."""
    shares = {name: matching.likeness(lesson, saved) for name, lesson in course.items()}
    best = max(shares, key=lambda name: (shares[name], name == stem))  # a file may hold the cells of two
    said = saved.metadata.get("labkit", {}).get("name") if isinstance(saved.metadata.get("labkit"), dict) else None
    if shares[best] < 0.2:
        raise UserError("no notebook of this course")
    for named in (stem, bundled):
        if named in course and named != best:
            raise UserError(f"holds the cells of {best}, not of {named}")
    findings = []
    if stem != best:
        findings.append(Finding("renamed", f"handed in as {stem}"))
    if said != best:
        what = "names no lesson" if said is None else f"names {str(said)[:60]!r}"
        findings.append(Finding("tampered", f"the notebook's own metadata {what}"))
    return best, findings


def _version(lesson: Lesson, bundle: bundles.Bundle | None) -> list[Finding]:
    """Whether a bundle was made with another version of the course, by what it says about itself."""
    if bundle is None:
        return []
    found = [Finding("tampered", note) if "changed after" in note else Finding("ledger", note) for note in bundle.notes]
    made = bundle.made_with.get("course")
    made = made if isinstance(made, dict) else {}
    theirs = made.get("copied_sha256") or made.get("notebook_sha256")
    ours = hashlib.sha256(notebooks.dumps(lesson.notebook).encode()).hexdigest()
    if theirs != ours:
        found.append(Finding("version", "made with another version of the course; graded with this one"))
    return found
