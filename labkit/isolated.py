"""One measurement in a fresh process: nothing that ran before can leak into it, and its death is not ours."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import places
from .results import Report


def measure_in_process(build: Any, *, settings: dict[str, Any], **options: Any) -> Report:
    """`labkit.measuring.measure` of `build` (also one defined in a notebook) in a new interpreter.

    Raises `RuntimeError` with the end of its error output when the process dies without a report.
    """
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        task, answer = Path(folder, "task"), Path(folder, "report.json")
        task.write_bytes(cloudpickle.dumps((build, options)))
        done = subprocess.run(
            [sys.executable, "-m", "labkit.isolated", str(task), str(answer)],
            env=places.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not answer.exists():
            end = "\n".join(done.stdout.strip().splitlines()[-5:])
            raise RuntimeError(f"the measuring process ended with code {done.returncode} and no report\n{end}")
        report = Report.from_dict(json.loads(answer.read_text()))
    return replace(report, settings=settings)


def _main(task: str, answer: str) -> None:
    import cloudpickle

    from .measuring import measure

    build, options = cloudpickle.loads(Path(task).read_bytes())
    report = measure(build, **options)
    Path(answer).write_text(json.dumps(report.to_dict()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
