"""Make reference rows from a run: what was measured or predicted, without what a learner did.

    python tools/reference.py runs/ID data/reference/lessons-h200.jsonl
    python tools/reference.py runs/ID data/reference/lessons-h200.jsonl --add "beside other processes: times are rough"

Kept are reports, facts, guesses' answers and settled claims of each lesson's last session; each row gets the command
that made it, and the driver.
With ``--add`` only those go in that the file has no row for yet, each with the text as its ``remark``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit.comparing import identity
from labkit.contributing import KINDS, settled
from labkit.results import Ledger


def main(run: str, out: str, add: str = "", remark: str = "") -> None:
    """Write the reference rows of the run folder `run` to the file `out`, replacing it or (``--add``) what it lacks."""
    if add not in ("", "--add"):
        raise SystemExit(__doc__)
    rows = Ledger(Path(run) / "ledger.jsonl").rows()
    machine = next(row["machine"] for row in rows if row["kind"] == "begin")
    last = {
        row["lesson"]: row["session"] for row in rows if row["kind"] == "begin"
    }  # a run that went on ran some again
    rows = [row for row in rows if row.get("session") == last.get(row.get("lesson"))]
    kept = [row for row in rows if row["kind"] in KINDS and (row["kind"] != "claim" or row.get("verdict"))]
    kept = [row for row in kept if row.get("source")]  # a guess without an answer says nothing
    if not kept:
        raise SystemExit(f"{run}: nothing was measured")
    lines: list[str] = []
    there: set[tuple[str, ...]] = set()
    if add:
        lines = Path(out).read_text().splitlines()
        there = {identity(json.loads(line)) for line in lines}
    before = len(lines)
    for row in kept:
        if identity(row) in there:
            continue
        if row.get("source") == "predicted":  # anybody can draw its timeline again; what a card did, only a card can
            row = {**row, "timeline": None}
        row = settled(row, machine["driver"]) | ({"remark": remark} if remark else {})
        lines.append(json.dumps(row, ensure_ascii=False))
    Path(out).write_text("\n".join(lines) + "\n")
    print(f"{out}: {len(lines) - before} rows of {machine['card'] or 'a machine without a card'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
