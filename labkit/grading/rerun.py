"""A submission run again from top to bottom, in a sandbox, for the feedback: no score depends on it alone.

What comes back was made by the learner's kernel: outputs and ledger rows are shown beside those that were handed in,
and compared with them. They are data from a stranger: sizes are capped, the notebook is validated.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

from . import wire
from .outcomes import Finding
from .sandbox import Sandbox

CELL_SECONDS = 120.0
NOTEBOOK_SECONDS = 900.0
SILENT_SECONDS = 180.0  # besides those of a cell, without a word: whoever runs the cells was stopped by one of them
_MOST_ROWS = 5000
_SAY = {
    "timeout": "was stopped after {seconds:g} s",
    "flood": "was stopped: it printed too much",
    "stuck": "did not stop when it was interrupted; the cells below it were not run",
    "died": "ended the kernel; the cells below it were not run",
}


@dataclass(frozen=True)
class Rerun:
    """The notebook with new outputs, the rows it wrote to its ledger, and what happened on the way."""

    notebook: Any
    rows: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    seconds: float

    def claimed(self) -> dict[str, float]:
        """The points that each visible check gave in this run, by exercise; the last of each."""
        return claims(self.rows)


def claims(rows: Any) -> dict[str, float]:
    """The points of the last check row of each exercise in a ledger."""
    return {
        str(r["exercise"]): float(r["points"])
        for r in rows
        if r.get("kind") == "check" and isinstance(r.get("points"), (int, float)) and "exercise" in r
    }


def run(
    notebook: Any, sandbox: Sandbox, *, cell_seconds: float = CELL_SECONDS, seconds: float = NOTEBOOK_SECONDS
) -> Rerun:
    """Run a notebook's code cells in a sandbox of its own. Never raises for what the notebook does."""
    notebook = copy.deepcopy(notebook)
    began = time.monotonic()
    code = {c.id: c for c in notebook.cells if c.cell_type == "code"}
    for cell in code.values():
        cell.outputs, cell.execution_count = [], None
    process = sandbox.launch("labkit.grading.replay")
    rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    try:
        process.send(sandbox.setup())
        cells = [{"id": c.id, "source": c.source} for c in code.values()]
        process.send({"cells": cells, "seconds": cell_seconds})
        _listen(process, code, rows, findings, began + seconds, cell_seconds)
    except wire.Late:
        silent = time.monotonic() < began + seconds
        why = "nothing was heard of it any more" if silent else f"it took more than {seconds:g} s"
        findings.append(Finding("run", f"the notebook was stopped: {why}"))
    except wire.Gone as error:
        last = str(error).strip().splitlines()[-1:] or ["no reason is known"]
        said = getattr(process, "ended", "") or last[0]
        findings.append(Finding("run", f"running the notebook ended early: {said}"))
    except wire.TooMuch:
        findings.append(Finding("run", "the notebook was stopped: it sends more than a notebook can hold"))
    finally:
        process.kill()
        sandbox.close()
    return Rerun(_valid(notebook, findings), tuple(rows), tuple(findings), time.monotonic() - began)


def _listen(
    process: wire.Process,
    code: dict[str, Any],
    rows: list[dict[str, Any]],
    findings: list[Finding],
    deadline: float,
    cell_seconds: float,
) -> None:
    import nbformat

    while True:
        message = process.receive(min(deadline, time.monotonic() + cell_seconds + SILENT_SECONDS))
        kind = message.get("kind")
        if kind == "end":
            return
        if kind == "rows" and isinstance(message.get("rows"), list):
            rows += [r for r in message["rows"][:_MOST_ROWS] if isinstance(r, dict)]
        if kind != "cell" or message.get("id") not in code:
            continue
        cell = code[message["id"]]
        outputs = message.get("outputs")
        cell.outputs = (
            [nbformat.from_dict(o) for o in outputs if isinstance(o, dict)] if isinstance(outputs, list) else []
        )
        cell.execution_count = message.get("count") if isinstance(message.get("count"), int) else None
        say = _SAY.get(str(message.get("ending")))
        if say:
            findings.append(Finding("run", f"this cell {say.format(seconds=cell_seconds)}", cell.id))
        if message.get("cut"):
            findings.append(Finding("run", "its output is cut: it was larger than a page can show", cell.id))


def _valid(notebook: Any, findings: list[Finding]) -> Any:
    """The notebook, or what is left of it without outputs that no notebook can hold."""
    import nbformat

    try:
        nbformat.validate(notebook)
    except (nbformat.ValidationError, RecursionError, TypeError, AttributeError, KeyError):
        findings.append(Finding("run", "outputs that are no notebook's were left out"))
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = []
    return notebook
