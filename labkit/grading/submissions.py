"""What was handed in: found, opened, and looked through before any of it runs.

``SUBMISSIONS/<student>/`` holds notebooks and files made by ``labkit submit``. Each is matched against our own notebook
of the lesson: given and check cells are replaced by ours, whatever was done to them; only the answer cells and the
cells that the learner added are taken from it. What was changed, deleted, stripped or faked is found on the way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import bundles, notebooks
from ..units import UserError
from . import matching
from .lessons import Lesson
from .outcomes import Finding
from .slicing import Cell

FILE_BYTES = 512 * 2**20  # of a notebook; larger is not opened
OUTPUT_BYTES = 4 * 2**20  # of one cell's saved output that are kept


@dataclass(frozen=True)
class Entry:
    """A file that was handed in."""

    student: str
    file: Path
    relative: str  # to the folder of submissions
    depth: int = 2  # how many of the last parts of the path lie inside that folder


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


def collect(folder: Path) -> list[Entry]:
    """Every notebook and ``.labkit.zip`` of every student, in order. Raises `UserError` when there are none."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: submissions are expected as {folder}/<student>/<lesson>.ipynb")
    found = []
    for student in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        for file in sorted([*student.glob("*"), *student.glob("*/*")]):
            named = file.name.endswith((".ipynb", bundles.SUFFIX)) and ".ipynb_checkpoints" not in file.parts
            if named and (file.is_symlink() or file.is_file()):
                inside = file.relative_to(folder)
                found.append(Entry(safe(student.name), file, safe(inside.as_posix(), 400), len(inside.parts)))
    if not found:
        raise UserError(f"no submissions in {folder}: they are expected as {folder}/<student>/<lesson>.ipynb")
    return found


def safe(name: str, most: int = 120) -> str:
    """A name as it may stand in a path, a table and a terminal: no half or control characters, at most `most` bytes."""
    clean = "".join(c if c.isprintable() else "?" for c in name.encode("utf-8", "replace").decode())
    if len(clean.encode()) <= most:
        return clean
    mark = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{clean.encode()[: most - 9].decode('utf-8', 'ignore')}-{mark}"


def open_all(entries: Iterable[Entry], course: Mapping[str, Lesson]) -> list[Submission]:
    """Every entry opened; where a student handed in a lesson more than once, the best of the files with the rest
    named: one made by ``labkit submit`` before a notebook, the lesson's own name before another, the newest."""
    chosen: dict[tuple[str, str], list[Submission]] = {}
    for entry in entries:
        made = open_one(entry, course)
        chosen.setdefault((entry.student, made.lesson), []).append(made)
    return [_best(several) for _, several in sorted(chosen.items())]


def _best(several: list[Submission]) -> Submission:
    def worth(one: Submission) -> tuple[bool, bool, bool, float]:
        file = one.entry.file
        zipped = file.name.endswith(bundles.SUFFIX)
        return not one.unreadable, zipped, _stem(file) == one.lesson, file.lstat().st_mtime

    several = sorted(several, key=worth)
    best = several[-1]
    others = tuple(
        Finding("renamed", f"{o.entry.relative} was handed in, too, and is not graded") for o in several[:-1]
    )
    return _replace(best, findings=best.findings + others)


def open_one(entry: Entry, course: Mapping[str, Lesson]) -> Submission:
    """One entry, opened and matched. Never raises for what is in the file."""
    stem = _stem(entry.file)
    try:
        return _opened(entry, stem, course)
    except UserError as error:
        return Submission(entry, safe(stem), _digest_of(entry.file), unreadable=str(error))
    except Exception as error:  # what no reader foresaw: source that no parser takes, say
        reason = f"cannot be looked through ({type(error).__name__})"
        return Submission(entry, safe(stem), _digest_of(entry.file), unreadable=reason)


def _opened(entry: Entry, stem: str, course: Mapping[str, Lesson]) -> Submission:
    """`open_one`, which keeps what it raises to this file."""
    content, digest, bundle = _read(entry)
    saved = _parse(content)
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


def _stem(file: Path) -> str:
    return file.name.removesuffix(bundles.SUFFIX).removesuffix(".ipynb")


def _read(entry: Entry) -> tuple[bytes, str, bundles.Bundle | None]:
    file = entry.file
    if any(part.is_symlink() for part in [file, *file.parents][: entry.depth]):
        raise UserError("a link, not a file of this student's own")
    if file.name.endswith(bundles.SUFFIX):
        bundle = bundles.read(file)
        return bundle.notebook, _digest_of(file), bundle
    try:
        if file.stat().st_size > FILE_BYTES:
            raise UserError(f"larger than {FILE_BYTES // 2**20} MiB")
        return file.read_bytes(), _digest_of(file), None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}") from error


def _digest_of(file: Path) -> str:
    if any(part.is_symlink() for part in [file, file.parent]) or not file.is_file():
        return ""
    with file.open("rb") as opened:
        found = hashlib.sha256()
        while block := opened.read(2**20):
            found.update(block)
    return found.hexdigest()[:16]


def _parse(content: bytes) -> Any:
    """The notebook in bytes, its outputs cut to a size. Raises `UserError` for what is none."""
    import nbformat

    if not content.strip():
        raise UserError("the file is empty")
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("not a notebook: the file is no JSON") from error
    try:
        for cell in found["cells"]:
            if len(json.dumps(cell.get("outputs", []))) > OUTPUT_BYTES:
                cell["outputs"] = []
        notebook = nbformat.convert(nbformat.from_dict(found), 4)
        for cell in notebook.cells:
            cell.source = cell.source if isinstance(cell.source, str) else "".join(cell.source)
            cell.metadata = cell.get("metadata", nbformat.from_dict({}))
        nbformat.validate(notebook)
    except Exception as error:  # nbformat's own errors, and what a file that is nearly a notebook leads to
        raise UserError(f"not a notebook ({type(error).__name__})") from error
    if not notebook.cells:
        raise UserError("a notebook without cells")
    return notebook


def _which(saved: Any, stem: str, bundled: str, course: Mapping[str, Lesson]) -> tuple[str, list[Finding]]:
    """The lesson that a notebook is of, by what is in it. Raises `UserError` when it is none, or not the one named."""
    shares = {name: matching.likeness(lesson, saved) for name, lesson in course.items()}
    best = max(shares, key=lambda name: shares[name])
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


def _replace(submission: Submission, **changes: Any) -> Submission:
    import dataclasses

    return dataclasses.replace(submission, **changes)
