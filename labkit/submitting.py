"""`labkit submit`: a lesson as one file to hand in, looked over before it is written.

Nothing here needs nbgrader, or runs the notebook: what is said is what the saved notebook shows, so that a blank
answer, a deleted cell or a notebook that was never run is seen by its author and not first by an instructor.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bundles, course, executing, places
from .lesson import versions
from .results import Ledger
from .units import UserError, show_bytes

_TEXT = (str, list)


@dataclass(frozen=True)
class Look:
    """What a saved notebook shows of a lesson. ``answered``, ``blank`` and ``missing`` name exercises; ``problems`` are
    sentences on what would cost points unseen, ``warnings`` on what its author may want to know."""

    lesson: str
    answered: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def text(self) -> str:
        """A few lines for the terminal."""
        lines = [("answered", ", ".join(self.answered) or "none"), ("blank", ", ".join(self.blank))]
        lines += [("problem", line) for line in self.problems] + [("note", line) for line in self.warnings]
        return "\n".join(f"  {label:9s} {line}" for label, line in lines if line)


def submit(
    lesson: str, *, out: Path | str | None = None, student: str = "", anyway: bool = False
) -> tuple[Path, bundles.Bundle, Look]:
    """Write the file to hand in for `lesson`; returns its path, what is in it, and what was seen in the notebook.

    `lesson` is a name or a number (the notebook in ``work/`` is meant, where ``make lab`` puts it) or the path of a
    notebook. `out` is a folder, or a file called ``….labkit.zip``; by default the working directory. With `anyway`, a
    notebook with problems is handed in as it is. Raises `UserError` for an unknown lesson, a notebook that is none or
    another lesson's, problems without `anyway`, and parts that are too large.
    """
    book, name = _where(lesson)
    content = _content(book)
    notebook = parsed(content, book.name)
    pristine_path = places.home() / "notebooks" / f"{name}.ipynb"
    look = inspect(notebook, parsed(_content(pristine_path), pristine_path.name), name)
    if look.problems and not anyway:
        raise UserError(f"{'; '.join(look.problems)}. Repair it, or hand it in as it is with --anyway")
    rows, lost = _rows(name)
    warnings = [*look.warnings, *lost, *_foreign(rows, notebook)]
    target = _target(out, name)
    bundle = bundles.Bundle(name, content, tuple(rows), student, _made_with(name, pristine_path, book, rows))
    look = Look(name, look.answered, look.blank, look.missing, look.problems, tuple(warnings))
    return bundles.write(target, bundle), bundle, look


def parsed(content: bytes, name: str) -> dict[str, Any]:
    """The notebook in a file's bytes, as plain data with all that is needed here of the right kind.

    Raises `UserError` for what is no notebook of format 4.
    """
    try:
        notebook = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is no notebook: it is not JSON; save it again in JupyterLab") from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or notebook.get("nbformat") != 4:
        raise UserError(f"{name} is no notebook of format 4; save it again in JupyterLab")
    if not all(isinstance(c, dict) and isinstance(c.get("source"), _TEXT) and "cell_type" in c for c in cells):
        raise UserError(f"{name} is a damaged notebook: a cell has no source; save it again in JupyterLab")
    return notebook


def inspect(notebook: Mapping[str, Any], pristine: Mapping[str, Any], lesson: str) -> Look:
    """What `notebook` shows of `lesson`, beside the `pristine` one that learners get. Both as `parsed` returns them."""
    wanted, got = exercise_cells(pristine), exercise_cells(notebook)
    counts = Counter(grade_id(cell) for cell in notebook["cells"] if grade_id(cell))
    if not any(name in got for name in wanted):
        raise UserError(
            f"the notebook has no exercise of {lesson}: it is another lesson's, or lost its cells' metadata"
        )
    answers = [name for name, cell in wanted.items() if _meta(cell).get("solution")]
    missing = [name for name in answers if name not in got]
    blank = [name for name in answers if name in got and _same(source(got[name]), source(wanted[name]))]
    answered = [name for name in answers if name in got and name not in blank]
    checks = [name for name in wanted if name not in answers]
    problems = [f"the cell of {name} is gone" for name in missing]
    problems += [f"the check of {name.removesuffix('-check')} is gone" for name in checks if name not in got]
    problems += [f"{name} is there {counts[name]} times" for name in wanted if counts[name] > 1]
    warnings = [
        f"{name}: {wrong}" for name in answered if (wrong := _not_python(source(got[name]))) and _code(got[name])
    ]
    warnings += [
        f"the check of {name.removesuffix('-check')} was changed; grading uses the lesson's own"
        for name in checks
        if name in got and not _same(source(got[name]), source(wanted[name]))
    ]
    ids = {cell.get("id") for cell in notebook["cells"]} | {source(cell) for cell in notebook["cells"]}
    gone = [c["id"] for c in pristine["cells"] if not grade_id(c) and not {c["id"], source(c)} & ids]
    if gone:
        warnings.append(f"cells of the lesson are gone: {', '.join(gone[:6])}{' …' if len(gone) > 6 else ''}")
    warnings += run_state(notebook)
    return Look(lesson, tuple(answered), tuple(blank), tuple(missing), tuple(problems), tuple(warnings))


def run_state(notebook: Mapping[str, Any]) -> list[str]:
    """Whether the saved notebook was run, wholly and in order, and where it stopped; nothing when all is well."""
    cells = [c for c in notebook["cells"] if _code(c) and source(c).strip()]
    counts = [c.get("execution_count") for c in cells]
    ran = [n for n in counts if isinstance(n, int) and not isinstance(n, bool)]
    if not ran:
        return ["the notebook was never run, or saved without its results; grading runs it"]
    found = []
    if len(ran) < len(counts):
        found.append(f"{len(counts) - len(ran)} of {len(counts)} code cells were not run")
    if ran != sorted(ran):
        found.append("cells were run out of order; grading runs them top to bottom")
    for cell in cells:
        outputs = cell.get("outputs")
        for output in outputs if isinstance(outputs, list) else []:
            if isinstance(output, dict) and output.get("output_type") == "error":
                found.append(f"the cell {cell.get('id')} ended in an error: {str(output.get('ename'))[:60]}")
    return found


def source(cell: Mapping[str, Any]) -> str:
    """A cell's source as one text; the file may hold it as a list of lines."""
    text = cell["source"]
    return "".join(str(line) for line in text) if isinstance(text, list) else text


def exercise_cells(notebook: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Answer and check cells by their nbgrader id; the first of those that have the same."""
    found: dict[str, dict[str, Any]] = {}
    for cell in notebook["cells"]:
        if name := grade_id(cell):
            found.setdefault(name, cell)
    return found


def grade_id(cell: Mapping[str, Any]) -> str | None:
    """The name that nbgrader knows a cell by; None where it has none."""
    name = _meta(cell).get("grade_id")
    return name if isinstance(name, str) and name else None


def _where(lesson: str) -> tuple[Path, str]:
    """The notebook that is meant, and the lesson's name."""
    pristine = places.home() / "notebooks"
    if lesson.endswith(".ipynb"):
        book = Path(lesson).expanduser()
        metadata = parsed(_content(book), book.name).get("metadata")
        about = metadata.get("labkit") if isinstance(metadata, dict) else None
        name = about.get("name") if isinstance(about, dict) else book.stem
        if not isinstance(name, str) or not (bundles.is_lesson(name) and (pristine / f"{name}.ipynb").is_file()):
            raise UserError(f"{book.name} is none of the lessons in {pristine}")
        return book, name
    name = course.choose([lesson], pristine)[0].stem
    book = places.home() / "work" / f"{name}.ipynb"
    if not book.is_file():
        raise UserError(f"work/{name}.ipynb is not there: `make lab` makes it; or give the path of your notebook")
    metadata = parsed(_content(book), book.name).get("metadata")
    about = metadata.get("labkit") if isinstance(metadata, dict) else None
    if isinstance(about, dict) and about.get("name", name) != name:
        raise UserError(f"work/{name}.ipynb is not this lesson: inside it is {str(about['name'])[:80]}")
    return book, name


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > bundles.NOTEBOOK_BYTES:
            size, most = show_bytes(path.stat().st_size), show_bytes(bundles.NOTEBOOK_BYTES)
            raise UserError(f"{path.name} has {size}, at most {most} can be handed in: clear the largest outputs")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _target(out: Path | str | None, lesson: str) -> Path:
    target = Path(out).expanduser() if out else Path.cwd()
    if target.is_dir():
        return target / f"{lesson}{bundles.SUFFIX}"
    if not target.name.endswith(bundles.SUFFIX):
        raise UserError(f"--out must be a folder that is there, or a file called ….{bundles.SUFFIX.lstrip('.')}")
    return target


def _rows(lesson: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The lesson's rows in the ledger of this folder, the oldest sessions left out where they are too many."""
    rows, odd = [], 0
    for row in Ledger(places.results_folder() / bundles.LEDGER):
        if row.get("lesson") == lesson:
            try:
                size = len(json.dumps(row, ensure_ascii=False, allow_nan=False).encode()) + 1
            except ValueError:  # nan, or what no encoding can write: not written by labkit
                odd += 1
                continue
            rows.append((row, size))
    notes = [f"ledger rows that are not written by labkit and are left out: {odd}"] if odd else []
    total, kept = sum(size for _, size in rows), rows
    while total > bundles.LEDGER_BYTES:
        oldest = kept[0][0].get("session")
        kept = [(row, size) for row, size in kept if row.get("session") != oldest]
        total = sum(size for _, size in kept)
    if len(kept) < len(rows):
        notes.append(f"the oldest of your {len(rows)} ledger rows are left out: {len(kept)} are handed in")
    if not rows:
        notes.append("no ledger rows of this lesson are here: it was run in another folder, or never to lab.begin")
    return [row for row, _ in kept], notes


def _foreign(rows: list[dict[str, Any]], notebook: Mapping[str, Any]) -> list[str]:
    """Whether the last session in the ledger is one of this notebook: its checks are of exercises that are there."""
    begun = [row.get("session") for row in rows if row.get("kind") == "begin"][-1:]
    checks = [row for row in rows if row.get("kind") == "check" and [row.get("session")] == begun]
    unknown = sorted({str(row.get("exercise")) for row in checks} - set(exercise_cells(notebook)))
    return [f"the ledger speaks of exercises that this notebook does not have: {', '.join(unknown)}"] if unknown else []


def _made_with(lesson: str, pristine: Path, book: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    begin: dict[str, Any] = next((row for row in reversed(rows) if row.get("kind") == "begin"), {})
    machine = begin.get("machine")
    copied = executing.read_json(book.parent / ".copied.json")
    return {
        "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "card": machine.get("card") if isinstance(machine, dict) else None,
        "numbers": begin.get("source"),
        "course": {
            "notebook_sha256": hashlib.sha256(pristine.read_bytes()).hexdigest(),
            "copied_sha256": copied.get(f"{lesson}.ipynb") if isinstance(copied, dict) else None,
        },
    }


def _meta(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = cell.get("metadata")
    meta = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return meta if isinstance(meta, dict) else {}


def _code(cell: Mapping[str, Any]) -> bool:
    return cell.get("cell_type") == "code"


def _same(one: str, other: str) -> bool:
    """Whether two cells say the same, comments and layout aside."""
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what a learner wrote, or a cell of prose
        return one.split() == other.split()


def _not_python(text: str) -> str | None:
    """What keeps a cell from being Python; lines for the notebook itself (``%``, ``!``) aside."""
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.split("\n")]
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as error:
        return f"is not Python yet (line {error.lineno}: {error.msg})"
    except (ValueError, RecursionError, MemoryError):
        return "is not Python yet"
    return None
