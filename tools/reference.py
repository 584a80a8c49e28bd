"""Make reference rows from a run: what was measured or predicted, without what a learner did.

    python tools/reference.py runs/ID data/reference/lessons-h200.jsonl

Kept are reports, facts, guesses' answers and settled claims; each row gets the command that made it, and the driver.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit.results import Ledger

KINDS = ("report", "fact", "claim", "guess")


def main(run: str, out: str) -> None:
    """Write the reference rows of the run folder `run` to the file `out`, replacing it."""
    rows = Ledger(Path(run) / "ledger.jsonl").rows()
    machine = next(row["machine"] for row in rows if row["kind"] == "begin")
    kept = [row for row in rows if row["kind"] in KINDS and (row["kind"] != "claim" or row.get("verdict"))]
    if not kept:
        raise SystemExit(f"{run}: nothing was measured")
    lines = []
    for row in kept:
        extra = {"command": f"labkit run {row.get('lesson', '')}".strip(), "driver": machine["driver"]}
        lines.append(json.dumps({**row, **extra}, ensure_ascii=False))
    Path(out).write_text("\n".join(lines) + "\n")
    print(f"{out}: {len(lines)} rows of {machine['card'] or 'a machine without a card'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
