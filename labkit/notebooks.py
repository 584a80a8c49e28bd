"""lessons/ -> notebooks/: one text file becomes the notebook that learners open, without solutions and outputs.

A lesson is a jupytext percent file. Its header carries the front matter (`FrontMatter`), from which the title cell is
made::

    # ---
    # jupyter:
    #   labkit:
    #     title: Where do 8 GB go?
    #     question: What takes the memory of a training step, and what breaks first?
    #     after: name every gigabyte of a training step and say what will break before it does
    #     minutes: {gpu: 2, cpu: 0.5}
    #     memory: 8 GiB budget
    #     needs: [00_environment]
    #     fetch: []
    # ---

A cell line carries the exercise's name; nbgrader's metadata are made from it:

==============================================  =====================================================================
``# %% answer="bytes"``                         the learner's cell; a check below scores it (nbgrader: solution)
``# %% answer="why" points=2``                  a written answer, scored by a reader (nbgrader: manually graded)
``# %% check="bytes" points=1``                 the check right below (nbgrader: autograder tests, locked)
``# %% check="why"``                            the check of a written answer (nbgrader: read-only, no points)
``# %% name="baseline"``                        names an ordinary cell, for its id
==============================================  =====================================================================

Between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` stands the solution; nbgrader's own preprocessors take it out.
Where the line above the region is a blank already (``answer = ...``), nothing takes its place; else the stub ``...``.
The expected value, ``mistakes`` and ``ideas`` of a check, where they are constants, are sealed in the learner's copy
(`labkit.checks.seal`), so that the answer does not stand one cell below the question.

Run ``python -m labkit.notebooks [build | check | solutions]``. Needs jupytext and nbgrader (extra ``dev``).
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import checks, contract, places
from .frontmatter import FrontMatter
from .units import UserError

STUB = "..."
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_KEYS = {"answer", "check", "points", "name", "tags"}
_TELLING = {"number": ("expected", "mistakes"), "choice": ("expected", "mistakes"), "words": ("ideas", "against")}
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def master(path: Path) -> Any:
    """The notebook that a lesson's text file stands for, solutions included, with nbgrader's metadata and stable ids.

    Raises `UserError` naming file and cell when a cell line or the front matter is not understood.
    """
    jupytext = _need("jupytext")
    text = path.read_text(encoding="utf-8")
    notebook = jupytext.reads(text, fmt="py:percent")
    front = FrontMatter.of(notebook.metadata.get("labkit"), path.name)
    stored = {**front.__dict__, "name": path.stem, "needs": list(front.needs), "fetch": list(front.fetch)}
    notebook.metadata = type(notebook.metadata)(
        {"kernelspec": dict(_KERNEL), "language_info": {"name": "python"}, "labkit": stored}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    title = _need("nbformat").v4.new_markdown_cell(front.cell(path.stem), id="title")
    notebook.cells = [title, *(c for c in notebook.cells if c.source.strip())]
    for number, cell in enumerate(notebook.cells):
        _graded(cell, f"{path.name}, cell {number}")
    _name_cells(notebook)
    return notebook


def learner(notebook: Any) -> Any:
    """A copy of a master as learners get it: nbgrader clears the solutions, hidden tests and outputs, locks the check
    cells and adds its checksums."""
    from nbgrader import preprocessors

    notebook = copy.deepcopy(notebook)
    steps = [
        preprocessors.ClearSolutions(code_stub={"python": STUB}, text_stub=STUB),
        preprocessors.ClearHiddenTests(),
        preprocessors.LockCells(),
        preprocessors.ClearOutput(),
        preprocessors.CheckCellMetadata(),
    ]
    resources: dict[str, Any] = {}
    for step in steps:
        notebook, resources = step.preprocess(notebook, resources)
    for cell in notebook.cells:
        role = cell.metadata.get("nbgrader", {})
        if role.get("solution"):
            cell.source = tidy(cell.source)
        elif role.get("locked") and cell.cell_type == "code":
            cell.source = seal_answers(cell.source)
    notebook, _ = preprocessors.ComputeChecksums().preprocess(notebook, resources)
    return notebook


def solved(notebook: Any) -> Any:
    """A copy of a master with its solutions in place, the marks around them taken out."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        lines = [line for line in cell.source.split("\n") if line.strip() not in (BEGIN, END)]
        cell.source = "\n".join(lines)
    return notebook


def tidy(source: str) -> str:
    """A cleared cell without the stub below a line that is blank already (``answer = ...``)."""
    kept: list[str] = []
    for line in source.split("\n"):
        above = next((k for k in reversed(kept) if k.strip()), "")
        same_depth = re.match(r"\s*", line)[0] == re.match(r"\s*", above)[0]  # type: ignore[index]
        if line.strip() == STUB and same_depth and re.search(r"=\s*\.\.\.$", above.split("#")[0].rstrip()):
            continue
        kept.append(line)
    return "\n".join(kept).rstrip("\n")


def seal_answers(source: str) -> str:
    """The source of a check cell with the constants that give the answer away as ``lab.check.sealed("...")``."""
    telling: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        kind = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if isinstance(node, ast.Call) and kind in _TELLING:
            named = {k.arg: k.value for k in node.keywords}
            telling += node.args[2:3] + [named[k] for k in _TELLING[kind] if k in named]
    lines = source.split("\n")
    for node in sorted(telling, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        value = _constant(node)
        if value is None:
            continue
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head = lines[first].encode()[: node.col_offset].decode()
        tail = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = [f'{head}lab.check.sealed("{checks.seal(value)}"){tail}']
    return "\n".join(lines)


def _constant(node: ast.expr) -> Any:
    """The value of an expression made of constants and arithmetic only; None for any other."""
    plain = (ast.Constant, ast.Dict, ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
    if not all(isinstance(part, plain) for part in ast.walk(node)):
        return None
    return eval(compile(ast.Expression(node), "<check>", "eval"), {"__builtins__": {}})


def dumps(notebook: Any) -> str:
    """The notebook as text, the same bytes every time."""
    nbformat = _need("nbformat")
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook, version=4)).rstrip("\n") + "\n"


def build(lessons: Path, out: Path, only: Iterable[str] = ()) -> list[str]:
    """Make every learner notebook in `out` (or those named in `only`); write those that changed and remove those
    without a lesson.

    Returns one line for each file touched. Raises `UserError` for a name in `only` that is no lesson.
    """
    done, wanted, only = [], {}, set(only)
    for name in sorted(only - {path.stem for path in lessons.glob("*.py")}):
        raise UserError(f"{name} is no lesson: lessons/ has {', '.join(sorted(p.stem for p in lessons.glob('*.py')))}")
    for path in sorted(lessons.glob("*.py")):
        if only and path.stem not in only:
            continue
        wanted[f"{path.stem}.ipynb"] = dumps(learner(master(path)))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        target = out / name
        if not target.is_file() or target.read_bytes() != text.encode():
            partial = target.with_name(target.name + ".part")
            partial.write_bytes(text.encode())
            partial.replace(target)
            done.append(f"{name}: written")
    for stray in sorted(out.glob("*.ipynb")):
        if not (lessons / f"{stray.stem}.py").is_file():
            stray.unlink()
            done.append(f"{stray.name}: removed, it has no lesson")
    return done


def drift(lessons: Path, out: Path) -> list[str]:
    """What in `out` is not what `build` would make, one line each."""
    found = []
    names = {path.stem for path in lessons.glob("*.py")}
    for path in sorted(lessons.glob("*.py")):
        target = out / f"{path.stem}.ipynb"
        if not target.is_file():
            found.append(f"{target.name}: missing; make notebooks")
        elif target.read_bytes() != dumps(learner(master(path))).encode():
            found.append(f"{target.name}: is not what lessons/{path.name} gives; make notebooks")
    found += [f"{p.name}: has no lesson; make notebooks" for p in sorted(out.glob("*.ipynb")) if p.stem not in names]
    return found


def problems(lessons: Path, only: Iterable[str] = ()) -> list[str]:
    """What the lessons (or those named in `only`) owe to the lesson contract, one line each."""
    paths = [path for path in sorted(lessons.glob("*.py")) if not only or path.stem in only]
    return [line for path in paths for line in contract.problems(master(path), path.stem)]


def solutions(lessons: Path, folder: Path, only: Iterable[str] = ()) -> list[str]:
    """Make the solved notebooks in `folder` and run them. Returns what is wrong: failures, checks below full marks."""
    from . import course
    from .results import Ledger

    books = folder / "notebooks"
    books.mkdir(parents=True, exist_ok=True)
    for stray in books.glob("*.ipynb"):
        stray.unlink()
    for path in sorted(lessons.glob("*.py")):
        (books / f"{path.stem}.ipynb").write_bytes(dumps(solved(master(path))).encode())
    out = folder / "run"
    code = course.run(list(only), out=out, resume=False, notebooks=books)
    found = [f"a lesson failed: see {out / 'run.json'}"] if code else []
    latest = {(r["lesson"], r["exercise"]): r for r in Ledger(out / "ledger.jsonl").rows() if r.get("kind") == "check"}
    for (lesson, exercise), row in latest.items():
        if row["status"] != "right":
            found.append(f"{lesson}, {exercise}: the solution scores {row['status']}: {row['message']}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 1 for drift, a broken contract or a failing solution."""
    parser = argparse.ArgumentParser(prog="python -m labkit.notebooks", description="Make notebooks/ from lessons/.")
    parser.add_argument("what", nargs="?", default="build", choices=["build", "check", "solutions"])
    parser.add_argument("lessons", nargs="*", help="only these lessons (build, solutions)")
    parser.add_argument("--solutions", action="store_const", dest="what", const="solutions", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_const", dest="what", const="check", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    home = places.home()
    lessons, out = home / "lessons", home / "notebooks"
    try:
        if not any(lessons.glob("*.py")):
            raise UserError(f"{lessons} has no lessons")
        if given.what == "solutions":
            wrong = solutions(lessons, home / "instructor" / "solved", given.lessons)
        elif given.what == "check":
            wrong = drift(lessons, out) + problems(lessons)
        else:
            print("\n".join(build(lessons, out, given.lessons)) or "notebooks/ is up to date")
            wrong = problems(lessons, given.lessons)
    except UserError as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 2
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


def _graded(cell: Any, where: str) -> None:
    """Replace the short keys of a cell line by nbgrader's metadata, in place."""
    found = {k: v for k, v in cell.metadata.items() if k != "lines_to_next_cell"}  # the text format's own
    unknown = set(found) - _KEYS
    if unknown:
        raise UserError(f"{where}: unknown {', '.join(sorted(unknown))}; a cell line knows {', '.join(sorted(_KEYS))}")
    keep = {"tags": found["tags"]} if "tags" in found else {}
    answer, check, points = found.get("answer"), found.get("check"), found.get("points")
    if answer and check:
        raise UserError(f"{where}: a cell is an answer or a check, not both")
    if answer or check:
        if answer and cell.cell_type == "code" and (BEGIN not in cell.source or END not in cell.source):
            raise UserError(f"{where}: the answer {answer!r} has no {BEGIN} ... {END}")
        keep["nbgrader"] = {
            "grade": points is not None,
            "grade_id": answer or f"{check}-check",
            "locked": bool(check),
            "schema_version": 3,
            "solution": bool(answer),
            "task": False,
            **({"points": points} if points is not None else {}),
        }
    elif points is not None:
        raise UserError(f"{where}: points without an answer or a check")
    if name := found.get("name"):
        keep["name"] = name
    cell.metadata = type(cell.metadata)(keep)


def _name_cells(notebook: Any) -> None:
    """Give every cell an id that says where it stands: its own name, its exercise, or its section and number there."""
    section, count, used = "start", 0, set()
    for cell in notebook.cells:
        heading = re.match(r"##\s+(.+)", cell.source) if cell.cell_type == "markdown" else None
        if heading:
            section, count = _slug(heading[1]), 0
        count += 1
        own = cell.metadata.get("nbgrader", {}).get("grade_id") or cell.metadata.pop("name", None)
        wished = "title" if cell.get("id") == "title" else _slug(own) if own else f"{section}-{count}"
        identity, again = wished, 1
        while identity in used:
            again += 1
            identity = f"{wished}-{again}"
        used.add(identity)
        cell["id"] = identity


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")[:40] or "cell"


def _need(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"building notebooks needs {module}: pip install 'gpt2-small-gpu-lab[dev]'") from error


if __name__ == "__main__":
    sys.exit(main())
