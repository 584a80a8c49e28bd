"""Reference rows of your own card: made from a run, and checked before they are believed.

Kept are what the card measured (reports, facts, what came out of guesses, settled claims), with versions, driver and
the command; dropped are what a learner wrote, and whatever was predicted, computed on the processor or looked up.
"""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import executing, physics
from .comparing import card_name, identity
from .results import METHOD, SCHEMA, SOURCES, Ledger
from .runs import Run
from .units import UserError

KINDS = ("report", "fact", "claim", "guess")
_LEARNERS = ("guess", "error", "good", "late")  # fields of a guess's row that say what a learner thought
_HOME = re.compile(r"""(?:/home|/Users|/root|[A-Za-z]:\\+Users)(?:[/\\]+[^\s'",;:)]*)?""")
_FIRST_PROBLEMS = 20


def submit(run: Path, out: Path | None = None) -> tuple[Path, int]:
    """Write the rows of the run folder `run` that a card measured; returns the file and how many rows it has.

    `out` is the file, ``lessons-<card>.jsonl`` in the working directory by default. Raises `UserError` when the run has
    no measured row, or a row that `problems` refuses.
    """
    rows = measured(run)
    name = re.sub(r"[^a-z0-9]+", "-", card_name(str(rows[0]["card"]))).strip("-")
    target = out or Path(f"lessons-{name}.jsonl")
    found = problems(rows)
    if found:
        more = f"; and {len(found) - 1} more: labkit submit-reference --check says all" if len(found) > 1 else ""
        raise UserError(f"{run}: {found[0]}{more}")
    try:
        executing.write_text(target, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    return target, len(rows)


def measured(run: Path) -> list[dict[str, Any]]:
    """The rows of a run that its card measured, ready to be contributed. Raises `UserError` when there are none."""
    if not (run / "ledger.jsonl").is_file():
        raise UserError(f"{run} holds no run: no ledger.jsonl is there")
    rows = Ledger(run / "ledger.jsonl").rows()
    begun = next((row for row in rows if row.get("kind") == "begin" and isinstance(row.get("machine"), dict)), None)
    state = Run.load(run)
    machine = begun["machine"] if begun else state.machine if state else {}
    kept = [settled(row, machine.get("driver")) for row in rows if row.get("source") == "measured" and _settled(row)]
    if not kept:
        raise UserError(f"{run}: no card measured anything in this run, so there is nothing to contribute")
    last = {identity(row): row for row in kept}  # a lesson that ran twice gives its last numbers
    return [_without_paths(row) for row in last.values()]


def settled(row: dict[str, Any], driver: str | None) -> dict[str, Any]:
    """A ledger row as a reference row: the learner's own part taken out, the command and the driver put in."""
    row = {**row, **{field: None for field in _LEARNERS if field in row and row["kind"] == "guess"}}
    return {**row, "command": f"labkit run {row.get('lesson', '')}".strip(), "driver": driver}


def _settled(row: dict[str, Any]) -> bool:
    return row.get("kind") in KINDS and (row["kind"] != "claim" or bool(row.get("verdict")))


def check(file: Path) -> list[str]:
    """What is wrong in a file of reference rows, one sentence each, with its line. Raises `UserError` when it cannot
    be read."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    rows, found = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            found.append(f"line {number}: {error if 'not a number' in str(error) else 'is not JSON'}")
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            found.append(f"line {number}: is no row")
    if not rows and not found:
        found.append("has no rows")
    return found + problems([row for _, row in rows], [number for number, _ in rows])


def say(found: Sequence[str]) -> str:
    """The problems for people, the first twenty of them."""
    more = [f"and {len(found) - _FIRST_PROBLEMS} more"] if len(found) > _FIRST_PROBLEMS else []
    return "\n".join([*found[:_FIRST_PROBLEMS], *more])


def problems(rows: Sequence[dict[str, Any]], numbers: Sequence[int] | None = None) -> list[str]:
    """Why each of `rows` cannot be a reference row, one sentence each; an empty list when all can."""
    found: list[str] = []
    seen: dict[tuple[Any, ...], int] = {}
    for place, row in enumerate(rows, start=1):
        number = numbers[place - 1] if numbers else place
        said: list[str] = []
        for test in _TESTS:
            try:
                said += test(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said.append(f"has a field that cannot be read ({type(error).__name__}: {error})")
        if row.get("kind") in KINDS:
            key = (*identity(row), row.get("source"), card_name(str(row.get("card"))), row.get("remark"))
            if key in seen:
                said.append(f"says again what line {seen[key]} says")
            seen.setdefault(key, number)
        found += [f"line {number}: {_title(row)} {one}" for one in said]
    return found


def _title(row: dict[str, Any]) -> str:
    name = row.get("name") or row.get("key") or row.get("recipe") or row.get("experiment") or "row"
    return f"{row.get('lesson', '')} {str(name)[:60]!r}".strip()


def _no_constant(word: str) -> None:
    raise ValueError(f"has {word}, which is not a number")


def _provenance(row: dict[str, Any]) -> list[str]:
    """Who measured: card, driver, versions, the time, the command, the method."""
    found = []
    kind = row.get("kind")
    if kind is None and ("recipe" in row or "experiment" in row):  # rows of bench/: they carry their own provenance
        missing = [field for field in ("card", "driver", "versions", "date", "command") if not row.get(field)]
        return [f"does not say its {', '.join(missing)}"] if missing else []
    if kind not in KINDS:
        return [f"is of kind {kind!r}, not one of {', '.join(KINDS)}"]
    if row.get("schema") != SCHEMA:
        found.append(f"has schema {row.get('schema')!r}; this labkit writes {SCHEMA}")
    if row.get("method") != METHOD:
        found.append(f"was measured by method {row.get('method')!r}; this labkit's method is {METHOD!r}")
    missing = [field for field in ("lesson", "card", "versions", "at", "command") if not row.get(field)]
    if missing:
        found.append(f"does not say its {', '.join(missing)}")
    nowhere = kind == "claim" and row.get("outcome") == "not measured here"
    if row.get("source") not in SOURCES and not nowhere:
        found.append(f"comes from {row.get('source')!r}, not one of {', '.join(SOURCES)}")
    return found


def _really_measured(row: dict[str, Any]) -> list[str]:
    """A row that calls itself measured shows the traces that only a real card leaves."""
    if row.get("source") != "measured":
        return []
    found = []
    provenance, kind = row.get("provenance") or {}, row.get("kind")
    torch = str((provenance.get("versions") or {}).get("torch") or (row.get("versions") or {}).get("torch") or "")
    if not any((row.get("driver"), provenance.get("driver"), row.get("capability"))):
        found.append("calls itself measured and names neither driver nor compute capability")
    if "+cpu" in torch:
        found.append(f"calls itself measured, by a torch without CUDA ({torch})")
    if physics.preset(row) is None:
        found.append(
            f"is of a card that labkit has no data sheet of ({row.get('card')}): add a preset first (CONTRIBUTING)"
        )
    elif card_name(str(row["card"])) == str(row["card"]):
        found.append(f"names a preset ({row['card']}), not the card as its driver calls it: predictions do that")
    if kind != "report":
        return found
    if provenance.get("card") != row.get("card") or not provenance.get("driver"):
        found.append("calls itself measured, but its provenance names no such card and driver")
    steady = row.get("steady") or row.get("first")
    if row.get("status") == "ok" and not (steady and steady.get("device_bytes")):
        found.append("calls itself measured, but the driver's own count is missing, as in a prediction")
    if row.get("timing") and row["timing"].get("clock") != "cuda events":
        found.append(f"was timed by {row['timing'].get('clock')!r}, not by CUDA events")
    if row.get("band_bytes"):
        found.append("calls itself measured and carries the band of an estimate")
    return found


def _private(row: dict[str, Any]) -> list[str]:
    found = [text for text in _texts(row) if _private_part(text)]
    return [f"names somebody's folder ({_private_part(found[0])})"] if found else []


def _private_part(text: str) -> str | None:
    match = _HOME.search(text)
    return match[0] if match else None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in [str(key), *_texts(inner)]]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, (list, tuple)) else []


def _without_paths(value: Any) -> Any:
    """`value` with every path into somebody's home folder cut to ``~/`` and its last part, and the name of who runs
    this nowhere in a path."""
    if isinstance(value, str):
        user = re.escape(getpass.getuser())
        value = _HOME.sub(lambda match: "~/" + re.split(r"[/\\]+", match[0].rstrip("/\\"))[-1], value)
        return re.sub(rf"~/{user}\b", "~", value)
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    return [_without_paths(inner) for inner in value] if isinstance(value, (list, tuple)) else value


_TESTS: tuple[Callable[[dict[str, Any]], list[str]], ...] = (
    _provenance,
    _really_measured,
    physics.problems,
    _private,
)
