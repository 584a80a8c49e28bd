"""A saved notebook laid beside ours: which of its cells are ours, which are answers, and what was done to them."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any

from ..units import UserError
from . import slicing
from .lessons import Lesson, Task, role
from .outcomes import Finding

MOST_LINES, MOST_CHARACTERS = 5_000, 300_000  # of code; a lesson has fewer than 2,000 and 80,000
_ROLE_KEYS = ("grade", "grade_id", "locked", "points", "solution", "task")


@dataclass
class Match:
    """``notebook``: ours, with the answers and the learner's own cells put in; ``roles`` of its code cells by id."""

    notebook: Any
    roles: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    tampered: dict[str, list[str]] = field(default_factory=dict)
    claims: dict[str, float] = field(default_factory=dict)


def bare(source: str) -> str:
    """A source without what does not count: spaces at the ends of lines, empty lines at the ends."""
    return "\n".join(line.rstrip() for line in source.strip().split("\n"))


def likeness(lesson: Lesson, saved: Any) -> float:
    """The share of our given and check cells of more than a line that stand in `saved` word for word, or by id."""
    theirs = {bare(c.source) for c in saved.cells}
    ids = {(str(c.get("id")), c.cell_type) for c in saved.cells}
    ours = [c for c in lesson.notebook.cells if role(c) != "answer" and len(c.source) > 80]
    found = sum(bare(c.source) in theirs for c in ours) / max(len(ours), 1)
    tasks = [t for t in lesson.tasks if len(t.name) > 5]
    named = sum((t.answer, "code") in ids for t in tasks) / max(len(tasks), 1)
    return max(found, 0.5 * named)


def match(lesson: Lesson, saved: Any) -> Match:
    """Lay `saved` beside the lesson's own notebook. Raises `UserError` when it holds more code than can be followed."""
    code = [c.source for c in saved.cells if c.cell_type == "code"]
    if sum(1 + source.count("\n") + source.count(";") for source in code) > MOST_LINES:
        raise UserError(f"more than {MOST_LINES:,} lines of code")
    if sum(map(len, code)) > MOST_CHARACTERS:
        raise UserError(f"more than {MOST_CHARACTERS:,} characters of code")
    ours, theirs = lesson.notebook.cells, list(saved.cells)
    pairs = _pairs(lesson, ours, theirs)
    found = Match(copy.deepcopy(lesson.notebook))
    stripped = not any(_graded(c) for c in theirs)
    if stripped:
        found.findings.append(Finding("tampered", "the cells' metadata were stripped: exercises were found by place"))
    for task in lesson.tasks:
        reasons = ["the cells' metadata were stripped"] if stripped else _reasons(lesson, task, ours, theirs, pairs)
        if reasons:
            found.tampered[task.name] = reasons
        claim = _claim(theirs[pairs[task.check]]) if task.check in pairs else None
        if claim is not None:
            found.claims[task.name] = claim
    _versions(found, lesson, ours, theirs, pairs)
    _assemble(found, theirs, pairs)
    return found


def _pairs(lesson: Lesson, ours: list[Any], theirs: list[Any]) -> dict[str, int]:
    """Number of the saved cell for the id of each of ours: by id, by exercise, by source, and answers by place."""
    pairs: dict[str, int] = {}
    taken: set[int] = set()

    def take(identity: str, candidates: list[int]) -> None:
        free = [i for i in candidates if i not in taken]
        if identity not in pairs and free:
            pairs[identity] = free[0]
            taken.add(free[0])

    known = {c.id: c for c in ours}
    sources = {c.id: bare(c.source) for c in ours}
    saved = [bare(c.source) for c in theirs]
    alike: dict[str, list[int]] = {}
    named: dict[str, list[int]] = {}
    for number, cell in enumerate(theirs):
        alike.setdefault(saved[number], []).append(number)
        named.setdefault(_graded(cell) or "", []).append(number)
    for same in (True, False):  # an id whose source fits before one whose source does not
        for number, cell in enumerate(theirs):
            mine = known.get(cell.get("id"))
            if mine is not None and mine.cell_type == cell.cell_type and (saved[number] == sources[mine.id]) >= same:
                take(mine.id, [number])
    for cell in ours:
        grade = (cell.metadata.get("nbgrader") or {}).get("grade_id")
        if grade:
            take(cell.id, [i for i in named.get(grade, []) if theirs[i].cell_type == cell.cell_type])
    for cell in ours:
        if role(cell) != "answer":
            take(cell.id, alike.get(sources[cell.id], []))
    for task in lesson.tasks:
        if task.answer not in pairs:
            take(task.answer, _by_place(task, ours, theirs, pairs))
    return pairs


def _by_place(task: Task, ours: list[Any], theirs: list[Any], pairs: dict[str, int]) -> list[int]:
    """Candidates for an answer without id and metadata: code between our cells around it that gives its variable."""
    at = next(i for i, c in enumerate(ours) if c.id == task.answer)
    above = [pairs[c.id] for c in ours[:at] if c.id in pairs]
    below = [pairs[c.id] for c in ours[at + 1 :] if c.id in pairs]
    low, high = max(above, default=-1), min((b for b in below if b > max(above, default=-1)), default=len(theirs))
    between = [i for i in range(low + 1, high) if theirs[i].cell_type == "code"]
    binding = [i for i in between if task.variable in slicing.binds(theirs[i].source)]
    return binding or between


def _reasons(lesson: Lesson, task: Task, ours: list[Any], theirs: list[Any], pairs: dict[str, int]) -> list[str]:
    """What was done to an exercise's cells, in words."""
    reasons = []
    cells = {c.id: c for c in ours}
    for identity, what in ((task.answer, "answer's cell"), (task.check, "check")):
        if identity not in pairs:
            reasons.append(f"the {what} was deleted")
            continue
        cell, mine = theirs[pairs[identity]], cells[identity]
        if what == "check" and bare(cell.source) != bare(mine.source) and not _consistent(cell):
            reasons.append("the check was edited")
        if _role(cell) != _role(mine):
            reasons.append(f"the metadata of the {what} were edited")
        grade = mine.metadata["nbgrader"]["grade_id"]
        if what == "check" and sum(_graded(t) == grade for t in theirs) > 1:
            reasons.append("the check is there twice")
    return reasons


def _versions(found: Match, lesson: Lesson, ours: list[Any], theirs: list[Any], pairs: dict[str, int]) -> None:
    """Notes what differs without being an attack: checks of another version, given cells that were edited or lost."""
    checks = {t.check for t in lesson.tasks}
    edited = []
    for cell in ours:
        if role(cell) == "answer" or cell.cell_type != "code":
            continue
        if cell.id not in pairs:
            if cell.id not in checks:
                edited.append(cell.id)
        elif bare(theirs[pairs[cell.id]].source) != bare(cell.source):
            if cell.id not in checks:
                edited.append(cell.id)
            elif _consistent(theirs[pairs[cell.id]]):
                say = "this check is that of another version of the course; ours was used"
                found.findings.append(Finding("version", say, cell.id))
    if edited:
        names = ", ".join(edited[:5]) + (" and more" if len(edited) > 5 else "")
        found.findings.append(Finding("edited", f"given cells were changed or deleted, ours were used: {names}"))


def _assemble(found: Match, theirs: list[Any], pairs: dict[str, int]) -> None:
    """Put the answers into our notebook, and each cell of the learner's own below the cell that it stood below."""
    import nbformat

    at = {number: identity for identity, number in pairs.items()}
    own: dict[str, list[Any]] = {}
    above, count = "", 0
    used = {c.id for c in found.notebook.cells}
    for number, cell in enumerate(theirs):
        if number in at:
            above = at[number]
        elif cell.source.strip():
            count += 1
            identity = f"own-{count}"
            while identity in used:
                identity += "-1"
            used.add(identity)
            if cell.cell_type in ("code", "markdown"):
                made = {"cell_type": cell.cell_type, "id": identity, "metadata": {}, "source": cell.source}
                made |= {"outputs": [], "execution_count": None} if cell.cell_type == "code" else {}
                own.setdefault(above, []).append(nbformat.from_dict(made))
    cells = list(own.get("", []))
    for cell in found.notebook.cells:
        if role(cell) == "answer":
            cell.source = theirs[pairs[cell.id]].source if cell.id in pairs else cell.source
        cells += [cell, *own.get(cell.id, [])]
        if cell.cell_type == "code":
            found.roles[cell.id] = role(cell)
    found.roles.update({c.id: "own" for several in own.values() for c in several if c.cell_type == "code"})
    found.notebook.cells = cells


def _claim(cell: Any) -> float | None:
    """The points that a saved check's output says."""
    for output in cell.get("outputs") or []:
        text = (output.get("data") or {}).get("text/plain", "") if output.get("output_type") == "execute_result" else ""
        found = re.fullmatch(r"\s*(\d+(\.\d+)?)\s*", text if isinstance(text, str) else "".join(text))
        if found:
            return float(found[1])
    return None


def _graded(cell: Any) -> str | None:
    meta = cell.metadata.get("nbgrader")
    grade = meta.get("grade_id") if isinstance(meta, dict) else None
    return grade if isinstance(grade, str) else None


def _role(cell: Any) -> dict[str, Any]:
    meta = cell.metadata.get("nbgrader")
    return {k: meta.get(k) for k in _ROLE_KEYS} if isinstance(meta, dict) else {}


def _consistent(cell: Any) -> bool:
    """Whether a check's checksum, made when the notebook was, is that of its source now."""
    from nbgrader.utils import compute_checksum

    try:
        return bool(cell.metadata["nbgrader"]["checksum"] == compute_checksum(cell))
    except (KeyError, TypeError, ValueError):
        return False
