"""Make requirements.lock again from pyproject.toml: every package of the course and of its tests, at one exact version.

    python tools/lock.py            resolve again, keep what is already locked where it still fits
    python tools/lock.py --upgrade  take the newest versions that the ranges allow

Needs `uv` (pip install uv), which resolves for Python 3.10 to 3.13 and for Linux, macOS and Windows at once.
torch's own CUDA packages are left out on purpose: which ones it needs follows from the wheel that is installed
(CPU, CUDA 13 from PyPI, CUDA 12.6 from another index, ...), and torch pins them exactly in its metadata.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
TORCH = "torch==2.13.0"
EXTRAS = ("dev", "grading")  # the others are rare parts that need a card or a toolkit: pip chooses their versions
PYTHONS = "3.10"  # the oldest; --universal covers the newer ones with markers
OF_TORCHS_WHEEL = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton\b|pytorch-triton|torch-c-dlpack|setuptools-triton)")
HEADER = """\
# Exact versions of everything the course and its tests use, for Python 3.10 to 3.13 on Linux, macOS and Windows.
# Made from pyproject.toml by `python tools/lock.py`; do not edit. The CUDA packages of torch are not listed:
# torch's own metadata pins them, and which ones they are depends on the index it came from.
"""


def main(arguments: list[str]) -> int:
    """Write requirements.lock; returns the exit code."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        print("tools/lock.py needs uv: pip install uv", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        pin, out = Path(scratch, "torch.txt"), Path(scratch, "lock.txt")
        pin.write_text(TORCH + "\n")
        if LOCK.exists():
            shutil.copy(LOCK, out)  # uv prefers versions that it finds in its output file
        command = [
            uv, "pip", "compile", "pyproject.toml", "--universal", "--python-version", PYTHONS,
            *(word for extra in EXTRAS for word in ("--extra", extra)),
            "--constraint", str(pin), "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet",
            "--output-file", str(out), *arguments,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT)
        if done.returncode:
            return done.returncode
        lines = [line for line in out.read_text().splitlines() if line and not line.startswith("#")]
    kept = [line for line in lines if not OF_TORCHS_WHEEL.match(line)]
    LOCK.write_text(HEADER + "\n".join(kept) + "\n")
    print(f"{LOCK.name}: {len(kept)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
