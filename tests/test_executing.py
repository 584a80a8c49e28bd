"""A kernel that dies while it starts: named, and nothing is left for the end of the process to trip over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from labkit import places

CODE = """
import sys
from pathlib import Path
import nbformat
from jupyter_client.kernelspec import KernelSpec
from labkit import executing

base = executing._manager_class()
class Dies(base):
    @property
    def kernel_spec(self):
        return KernelSpec(argv=[sys.executable, "-c", "raise SystemExit(3)"], language="python")
executing._manager_class = lambda: Dies
folder = Path(sys.argv[1])
nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", id="one")]), folder / "a.ipynb")
ending = executing.execute(folder / "a.ipynb", folder / "b.ipynb", folder=folder / "work", environment={}, timeout=60)
print(ending.status, ending.error)
"""


def test_a_kernel_that_dies_as_it_starts_leaves_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=120,
        env=places.environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("failed ") and "died" in done.stdout.lower(), done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "b.ipynb").is_file()
