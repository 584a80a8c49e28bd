"""An ONNX export in a process of its own.

`labkit.generating.export_step` takes ten seconds and more, however small the model is::

    export = exporting.Exporting(model, "step.onnx")  # started, not waited for
    ...
    names = export.result()
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import generating, places


class Exporting:
    """An export that goes on while this process does something else.

    `model` lies on the processor; it is copied, so what is done to it afterwards does not matter. Raises `UserError`
    when onnx or onnxscript is missing.
    """

    def __init__(self, model: Any, file: Path | str):
        import torch

        generating.needs_onnx()
        self._folder = tempfile.TemporaryDirectory(prefix="labkit-export-")
        task, self._answer = (Path(self._folder.name, name) for name in ("task.pt", "names.json"))
        torch.save((model, str(file)), task)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "labkit.exporting", str(task), str(self._answer)],
            env=places.environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def result(self, timeout: float = 300) -> list[str]:
        """Wait for the graph, at most `timeout` seconds; returns what `export_step` returns.

        Raises `RuntimeError` with the end of its output when the process dies, `TimeoutError` when it takes too long.
        """
        try:
            said, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise TimeoutError(f"the export was not done after {timeout:g} s") from None
        if not self._answer.exists():
            end = "\n".join(said.strip().splitlines()[-5:])
            raise RuntimeError(f"the export ended with code {self._process.returncode} and no graph\n{end}")
        names: list[str] = json.loads(self._answer.read_text())
        return names


def _main(task: str, answer: str) -> None:
    import torch

    torch.set_num_threads(1)
    model, file = torch.load(task, weights_only=False)
    Path(answer).write_text(json.dumps(generating.export_step(model, file)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
