"""The open lesson: what a lesson's cells call, from `begin` to `finish`, and the ledger that everything goes to.

Used in a notebook as ``lab.begin``, ``lab.guess``, ``lab.answer``, ``lab.claim``, ``lab.settle``, ``lab.claims``,
``lab.finish``; checks under exercises are in `labkit.checks`. The open lesson is the only state of the package.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__, checks, guesses, machine, places, quiet, results, show, verdicts
from .units import UserError, parse_size, show_bytes

CONFIGURED = "LABKIT_BUDGET"
_DISTRIBUTIONS = ("torch", "transformers")
_WRITTEN = {"right": "words found", "partial": "some words found", "wrong": "words not found"}  # nobody judged it yet

_open: Lesson | None = None


class Lesson(show.Silent):
    """One lesson while it runs: its guesses, claims, checks and reports, each written to the ledger as it happens.

    Made by `begin`. ``budget`` is the memory budget in bytes; ``source`` is where memory numbers come from here
    (``measured`` or ``predicted``); ``card`` names the card they are for and ``sm`` its compute capability.
    """

    def __init__(self, name: str, budget: int, folder: Path):
        self.name, self.budget, self.folder = name, budget, folder
        self.session = uuid.uuid4().hex[:12]
        self.ledger = results.Ledger(folder / "ledger.jsonl")
        self.machine = machine.here()
        preset = None if self.machine.card else machine.preset()
        self.card = preset.name if preset else str(self.machine.card)
        self.sm = preset.sm if preset else str(self.machine.sm)
        self.source = "predicted" if preset else "measured"
        self.guesses: dict[str, guesses.Guess] = {}
        self.answers: dict[str, guesses.Answer] = {}
        self.claims: dict[str, verdicts.Claim] = {}
        self.checks: dict[str, checks.Check] = {}
        self.reports: list[results.Report] = []

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one row to the ledger, with lesson, session, card, versions, method and time in it."""
        row = {
            "kind": kind,
            "lesson": self.name,
            "session": self.session,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "card": self.card,
            "source": None,
            "method": results.METHOD,
            "versions": versions(),
        }
        return self.ledger.append({**row, **fields})

    def record(self, item: results.Report | checks.Check) -> None:
        """Take in a finished report or check. `measure` and the checks call this."""
        if isinstance(item, results.Report):
            self.reports.append(item)
            self.write("report", **_finite(item.to_dict()))
        else:
            self.checks[item.exercise] = item
            self.write(**item.row())

    def show_line(self) -> None:
        """Print the machine line."""
        print(f"labkit {__version__}  ·  {self.machine.line(self.budget)}")


def begin(name: str, budget: int | str | None = None) -> Lesson:
    """Open the lesson `name` (``"01_baseline_oom"``), print what this machine is, and start writing its rows.

    `budget` (8 GiB unless given) becomes ``lesson.budget`` in bytes; the variable ``LABKIT_BUDGET`` overrides it, and a
    card with less memory lowers it, which is said. Raises `UserError` when the ledger cannot be written.
    """
    global _open
    quiet.libraries()
    limit, reason = _budget(budget)
    close()
    lesson = Lesson(name, limit, places.results_folder())
    lesson.write("begin", budget_bytes=limit, source=lesson.source, machine=dataclasses.asdict(lesson.machine))
    _open = lesson
    results.listeners.append(lesson.record)
    checks.listeners.append(lesson.record)
    lesson.show_line()
    if reason:
        print(reason)
    quiet.imports_are_no_garbage()
    return lesson


def current() -> Lesson:
    """The open lesson. Raises `UserError` when there is none."""
    if _open is None:
        raise UserError("no lesson is open: run the cell with lab.begin(...) first")
    return _open


def close() -> None:
    """Close the open lesson, if there is one: nothing more is written to its ledger."""
    global _open
    if _open is None:
        return
    for listeners in (results.listeners, checks.listeners):
        if _open.record in listeners:
            listeners.remove(_open.record)  # type: ignore[arg-type]
    _open = None


def guess(name: str, value: Any, question: str, *, unit: str | None = None) -> guesses.Guess:
    """Commit the learner's guess `value` (a number in `unit`, True or False, or a word; None: no guess) and show it.

    Never raises for what the learner wrote. A guess that is changed after its answer was shown is not scored.
    """
    lesson = current()
    late = name in lesson.answers and lesson.answers[name].guess != value
    made = guesses.Guess.of(name, value, question, unit, late)
    lesson.guesses[name] = made
    lesson.write("commit", **_finite(dataclasses.asdict(made)))
    show.emit(made.text(), made.html())
    return made


def answer(
    name: str,
    *,
    measured: guesses.Value | None,
    formula: float | None = None,
    source: str | None = None,
    unit: str | None = None,
    note: str | None = None,
) -> guesses.Answer:
    """Show what came out beside the learner's guess called `name`, and score it.

    `measured` and `formula` are in the guess's unit; ``measured=None`` says that this machine cannot tell. `source` is
    one of `labkit.results.SOURCES`, by default where memory numbers come from here. `note` is one more sentence.
    """
    lesson = current()
    made = lesson.guesses.get(name) or guesses.Guess(name, name.replace("_", " "), None, unit)
    source = None if measured is None else source or lesson.source
    if source is not None and source not in results.SOURCES:
        raise UserError(f"source {source!r} is not one of {', '.join(results.SOURCES)}")
    first = lesson.answers.get(name)
    value = first.guess if made.late and first else made.value
    if measured is not None and not isinstance(measured, (bool, str)):
        measured = float(measured) if math.isfinite(measured) else None
    found = guesses.Answer(name, made.question, unit or made.unit, value, formula, measured, source, note)
    lesson.answers[name] = found
    lesson.write(**_finite(found.row()))
    show.emit(found.text(), found.html())
    return found


def claim(key: str, text: str, *, said_by: str) -> verdicts.Claim:
    """State what the field says: `text`, said by which kind of source (``"documentation"``, ``"blog posts"``)."""
    lesson = current()
    made = verdicts.Claim(key, text, said_by)
    lesson.claims[key] = made
    lesson.write(**made.row())
    return made


def settle(
    key: str, *, measured: str, verdict: str, source: str | None = None, scope: str | None = None
) -> verdicts.Claim:
    """Give the claim `key` its verdict: ``holds``, ``holds when ...``, ``does not hold`` or ``not measured here``.

    `measured` is the number it rests on, in words (``"exponent 0.97"``); `source` one of `labkit.results.SOURCES`, by
    default where memory numbers come from here; `scope` what it holds for, by default this machine's compute
    capability. The verdict is to be computed from this run. Raises `UserError` for an unknown claim or verdict.
    """
    lesson = current()
    if key not in lesson.claims:
        raise UserError(f"unknown claim {key!r}: {', '.join(lesson.claims) or 'none was made'}")
    nowhere = verdicts.outcome(verdict) == verdicts.ELSEWHERE
    where = None if nowhere else source or lesson.source
    verdicts.check_source(where, verdict)
    settled = dataclasses.replace(
        lesson.claims[key],
        measured=measured,
        verdict=verdict,
        source=where,
        scope=None if nowhere else scope or lesson.sm,
    )
    lesson.claims[key] = settled
    lesson.write(**settled.row())
    return settled


def claims() -> None:
    """Show the table of claims: what is said, by whom, what was measured here, the verdict and the card it is for."""
    lesson = current()
    if lesson.claims:
        show.emit(*verdicts.table(list(lesson.claims.values())))


def finish(checklist: str = "", *, next: str | None = None) -> None:
    """End the lesson: the claims with their verdicts, how good the guesses were, the exercises' points, the entry for
    the `checklist`, and a link to the `next` lesson (the one that follows in notebooks/ unless given).
    """
    lesson = current()
    score = guesses.Calibration.of(lesson.answers.values())
    scored = [c for c in lesson.checks.values() if not c.manual]
    points = (sum(c.points for c in scored), sum(c.maximum for c in scored))
    lesson.write(
        "finish",
        checklist=checklist,
        guesses=_finite(dataclasses.asdict(score)),
        points=points[0],
        maximum=points[1],
        outcomes=[c.outcome for c in lesson.claims.values()],
        leftover_bytes=sum(r.leftover_bytes for r in lesson.reports),
    )
    claims()
    lines = [("Guesses", score.sentence())] if score.asked else []
    if lesson.checks:
        done = ", ".join(
            f"{c.exercise} {_WRITTEN.get(c.status, c.status) if c.manual else f'{c.points:g}/{c.maximum:g}'}"
            for c in lesson.checks.values()
        )
        lines.append(("Exercises", f"{points[0]:g} of {points[1]:g} points ({done})"))
    if checklist:
        lines.append(("Checklist", checklist))
    lines.append(("Rows", f"in {_short(lesson.ledger.path)}"))
    text = "\n".join(f"{label:10s} {line}" for label, line in lines)
    html = "".join(f"<div><b>{label}</b> · {show.inline(line)}</div>" for label, line in lines)
    follower = next if next is not None else _next(lesson.name)
    if follower:
        text += f"\n{'Next':10s} {follower}.ipynb"
        html += f'<div><b>Next</b> · <a href="{follower}.ipynb">{show.inline(_title(follower))}</a></div>'
    show.emit(text, show.card(html, "info"))


def calibration() -> list[dict[str, Any]]:
    """The answered guesses of all lessons in this ledger, the latest of each: what `labkit.plots.calibration` draws."""
    latest = {(r["lesson"], r["name"]): r for r in current().ledger.rows() if r.get("kind") == "guess"}
    return list(latest.values())


def versions() -> dict[str, str | None]:
    """The versions that a number may depend on."""
    found: dict[str, str | None] = {"labkit": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _budget(wish: int | str | None) -> tuple[int, str | None]:
    """The budget of a lesson, and the sentence that explains it when it is not the one that was asked for."""
    ceiling = machine.default_budget()
    if os.environ.get(CONFIGURED):
        return ceiling, f"budget {show_bytes(ceiling)}: set by {CONFIGURED}"
    if wish is None:
        return ceiling, None
    limit = parse_size(wish)
    memory = machine.here().memory_bytes
    if memory is not None and limit > 0.9 * memory:
        lowered = int(0.9 * memory)
        return lowered, f"budget {show_bytes(lowered)} instead of {show_bytes(limit)}: 90 % of what this card has"
    return limit, None


def _next(name: str) -> str | None:
    home = places.home()
    names = sorted(path.stem for path in (home / "notebooks").glob("*.ipynb"))
    names = names or sorted(path.stem for path in (home / "lessons").glob("[0-9][0-9]_*.py"))  # before they are built
    later = [other for other in names if other > name]
    return later[0] if later else None


def _title(name: str) -> str:
    path = places.home() / "notebooks" / f"{name}.ipynb"
    try:
        title = json.loads(path.read_text(encoding="utf-8"))["metadata"]["labkit"]["title"]
    except (OSError, ValueError, KeyError):
        return name.replace("_", " ")
    return f"{name[:2]} {title}"


def _short(path: Path) -> str:
    try:
        return path.resolve().relative_to(places.home()).as_posix()
    except ValueError:
        return f"{path.parent.name}/{path.name}"  # elsewhere: the folder's name, not somebody's whole path


def _finite(value: Any) -> Any:
    """`value` with nan and infinities as None, because JSON has no word for them."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
