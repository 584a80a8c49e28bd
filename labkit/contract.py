"""The lesson contract, checked: headings, exercises, guesses and claims that every lesson must have."""

from __future__ import annotations

import ast
import re
from typing import Any

HEADINGS = (
    "Claims",
    "Experiment",
    "Account",
    "Equivalence",
    "Negative control",
    "Pitfalls",
    "Exercise 1",
    "Exercise 2",
    "Exercise 3",
    "Take-away",
)
MOST_CELLS = 60
_FORBIDDEN = {
    r"^\s*[!%]pip\b|\bpip install\b": "installs a package",
    r"\bimport warnings\b|filterwarnings": "handles warnings",
    r"/home/|/root/|C:\\Users|/content/": "names somebody's folder",
    r"\bcolab\b": "names Colab",
}


def problems(notebook: Any, name: str) -> list[str]:
    """What is missing in the master notebook of the lesson `name`, one line each, the lesson's name in front."""
    found = [*_headings(notebook), *_exercises(notebook), *_calls(notebook, name), *_habits(notebook)]
    return [f"{name}: {line}" for line in found]


def sections(notebook: Any) -> dict[str, list[Any]]:
    """The cells under each level-2 heading, in order; what stands before the first one is under ``""``."""
    current = ""
    found: dict[str, list[Any]] = {current: []}
    for cell in notebook.cells:
        heading = re.match(r"##\s+(.+)", cell.source) if cell.cell_type == "markdown" else None
        if heading:
            current = heading[1].strip()
        found.setdefault(current, []).append(cell)
    return found


def _headings(notebook: Any) -> list[str]:
    got = [
        line[3:].strip()
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for line in cell.source.split("\n")
        if line.startswith("## ")
    ]
    more = [f"Exercise {n}" for n in range(4, 10) if f"Exercise {n}" in got]
    wanted = [*HEADINGS[:-1], *more, HEADINGS[-1]]
    if got == wanted:
        return []
    missing, extra = [h for h in wanted if h not in got], [h for h in got if h not in wanted]
    if missing or extra:
        return [f"headings: missing {missing}, not in the contract {extra} (use ### below the contract's headings)"]
    return [f"headings: out of order or twice: {got}"]


def _exercises(notebook: Any) -> list[str]:
    found = []
    for title, cells in sections(notebook).items():
        if not title.startswith("Exercise"):
            continue
        prose = "\n".join(c.source for c in cells if c.cell_type == "markdown")
        if not re.search(r"\b\d+ min\b", prose):
            found.append(f"{title}: says no time ('5 min')")
        if not re.search(r"\b(easy|medium|hard)\b", prose):
            found.append(f"{title}: says no difficulty (easy, medium, hard)")
        if "<details>" not in prose or "</details>" not in prose:
            found.append(f"{title}: has no hint in a folded block (<details>)")
        roles = [_role(c) for c in cells]
        answers = [(i, name) for i, (kind, name) in enumerate(roles) if kind == "answer"]
        if not answers:
            found.append(f"{title}: has no answer cell")
        for place, answer in answers:
            if roles[place + 1 : place + 2] != [("check", f"{answer}-check")]:
                found.append(f"{title}: the check of {answer!r} is not right below it")
                continue
            scored = [c.metadata["nbgrader"]["grade"] for c in cells[place : place + 2]]
            if sum(scored) != 1:
                found.append(f"{title}: {answer!r} needs points on its check, or on the answer if a reader scores it")
    return found


def _role(cell: Any) -> tuple[str, str]:
    meta = cell.metadata.get("nbgrader")
    if not meta:
        return "", ""
    return ("answer" if meta["solution"] else "check"), meta["grade_id"]


def _calls(notebook: Any, name: str) -> list[str]:
    calls = _lab_calls(notebook)
    found = []
    begun = [c for c in calls if c[0] == "begin"]
    if [c[1] for c in begun] != [name]:
        found.append(f"lab.begin must be called once, with {name!r}")
    if not calls or calls[-1][0] != "finish":
        found.append("lab.finish is not the last call of the lesson")
    guessed, answered = {c[1] for c in calls if c[0] == "guess"}, {c[1] for c in calls if c[0] == "answer"}
    claimed, settled = {c[1] for c in calls if c[0] == "claim"}, {c[1] for c in calls if c[0] == "settle"}
    if not guessed:
        found.append("asks for no guess")
    if not claimed:
        found.append("makes no claim")
    if None not in answered:  # a name that is computed cannot be followed here
        found += [f"the guess {g!r} is never answered" for g in sorted(guessed - answered - {None}, key=str)]
    if None not in settled:
        found += [f"the claim {c!r} is never settled" for c in sorted(claimed - settled - {None}, key=str)]
    found += [f"the guess {c[1]!r} must be None as it comes" for c in calls if c[0] == "guess" and not c[2]]
    return found


def _lab_calls(notebook: Any) -> list[tuple[str, str | None, bool]]:
    """Calls ``lab.<name>(first, second)`` in order: name, the first argument if it is a text, whether the second is
    None."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in cell.source.split("\n")]
        try:
            tree = ast.parse("\n".join(lines))
        except SyntaxError:
            continue  # said by _habits
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            owner = node.func.value  # type: ignore[attr-defined]
            if not (isinstance(owner, ast.Name) and owner.id == "lab"):
                continue
            values = [a.value if isinstance(a, ast.Constant) else ... for a in node.args[:2]]
            first = values[0] if values and isinstance(values[0], str) else None
            found.append((node.func.attr, first, len(values) > 1 and values[1] is None))  # type: ignore[attr-defined]
    return found


def _habits(notebook: Any) -> list[str]:
    found = []
    if len(notebook.cells) >= MOST_CELLS:
        found.append(f"{len(notebook.cells)} cells; fewer than {MOST_CELLS} are allowed")
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in cell.source.split("\n")]
        try:
            ast.parse("\n".join(lines))
        except SyntaxError as error:
            found.append(f"cell {cell.id}: is not Python ({error.msg}, line {error.lineno})")
        for pattern, say in _FORBIDDEN.items():
            if re.search(pattern, cell.source, re.MULTILINE):
                found.append(f"cell {cell.id}: {say}")
    return found
