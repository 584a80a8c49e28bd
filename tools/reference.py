"""Make reference rows from a run: what was measured or predicted, without what a learner did.

    python tools/reference.py runs/ID data/reference/lessons-h200.jsonl
    python tools/reference.py runs/ID data/reference/lessons-h200.jsonl --add "beside other processes: times are rough"

Kept are reports, facts, guesses' answers and settled claims; each row gets the command that made it, and the driver.
With ``--add`` only those go in that the file has no row for yet, each with the text as its ``remark``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit.results import Ledger

KINDS = ("report", "fact", "claim", "guess")


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about: two rows with the same answer replace each other."""
    settings = json.dumps(row.get("settings"), sort_keys=True)
    return row["lesson"], row["kind"], row.get("name") or row.get("key"), row.get("what"), settings


def main(run: str, out: str, add: str = "", remark: str = "") -> None:
    """Write the reference rows of the run folder `run` to the file `out`, replacing it or (``--add``) what it lacks."""
    if add not in ("", "--add"):
        raise SystemExit(__doc__)
    rows = Ledger(Path(run) / "ledger.jsonl").rows()
    machine = next(row["machine"] for row in rows if row["kind"] == "begin")
    kept = [row for row in rows if row["kind"] in KINDS and (row["kind"] != "claim" or row.get("verdict"))]
    if not kept:
        raise SystemExit(f"{run}: nothing was measured")
    lines, there = [], set()
    if add:
        lines = Path(out).read_text().splitlines()
        there = {identity(json.loads(line)) for line in lines}
    before = len(lines)
    for row in kept:
        if identity(row) in there:
            continue
        if row.get("source") == "predicted":  # anybody can draw its timeline again; what a card did, only a card can
            row = {**row, "timeline": None}
        extra = {"command": f"labkit run {row.get('lesson', '')}".strip(), "driver": machine["driver"]}
        extra |= {"remark": remark} if remark else {}
        lines.append(json.dumps({**row, **extra}, ensure_ascii=False))
    Path(out).write_text("\n".join(lines) + "\n")
    print(f"{out}: {len(lines) - before} rows of {machine['card'] or 'a machine without a card'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
