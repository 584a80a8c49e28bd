"""Copy notebooks/ to work/, where a learner's edits live: what is there already is never overwritten.

A copy that the learner has not touched follows the course when a lesson changes; an edited one stays, and is named.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copy(pristine: Path, work: Path) -> list[str]:
    """Bring new lessons from `pristine` into `work`; returns what there is to say, one line each."""
    record = work / ".copied.json"
    known: dict[str, str] = json.loads(record.read_text()) if record.is_file() else {}
    lines = []
    for source in sorted(p for p in pristine.rglob("*") if p.is_file() and ".ipynb_checkpoints" not in p.parts):
        name = source.relative_to(pristine).as_posix()
        target, new = work / name, digest(source)
        if target.exists() and known.get(name) != new:
            if digest(target) != known.get(name):
                lines.append(
                    f"work/{name}: yours is kept; the lesson has changed since (compare with notebooks/{name})"
                )
                continue
            lines.append(f"work/{name}: updated")
        elif target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        shutil.copyfile(source, partial)
        partial.replace(target)
        known[name] = new
    if known:
        record.write_text(json.dumps(known, indent=1, sort_keys=True))
    return lines


def digest(path: Path) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Copy, and say what happened; returns the exit code."""
    pristine, work = ROOT / "notebooks", ROOT / "work"
    if not any(pristine.glob("*.ipynb")):
        print("notebooks/ is empty: make notebooks", file=sys.stderr)
        return 2
    try:
        work.mkdir(exist_ok=True)
        print("\n".join(copy(pristine, work)))
    except (OSError, ValueError) as error:
        print(f"work/ cannot be prepared: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
