"""Is this Python environment the one that the course was tested in?"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from .check import FAIL, OK, WARN, Check


def python() -> Check:
    """Whether this Python is one that the course supports."""
    version, detail = sys.version_info[:2], f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if version < (3, 10):
        return Check("python", FAIL, detail, "Python 3.10 or newer is needed: make setup PYTHON=python3.12")
    if version > (3, 13):
        return Check("python", WARN, f"{detail}; the lock file was made for 3.10 to 3.13")
    return Check("python", OK, detail)


def isolation() -> Check:
    """Whether the packages are kept apart from the rest of the system."""
    name = "environment"
    if sys.prefix != sys.base_prefix:
        if _inherits(Path(sys.prefix)):
            return Check(name, WARN, f"{sys.prefix} also sees the system's packages", "make it anew: make setup")
        return Check(name, OK, f"virtual environment {sys.prefix}")
    if (conda := os.environ.get("CONDA_PREFIX")) and Path(conda) == Path(sys.prefix):
        base = os.environ.get("CONDA_DEFAULT_ENV") == "base"
        fix = "conda env create -f environment.yml" if base else ""
        return Check(name, WARN if base else OK, f"conda {'base ' if base else ''}environment {conda}", fix)
    return Check(name, WARN, f"{sys.prefix} is shared with the system: versions can change under you", "make setup")


def _inherits(prefix: Path) -> bool:
    file = prefix / "pyvenv.cfg"
    text = file.read_text() if file.is_file() else ""
    return "include-system-site-packages = true" in text.lower()


def packages() -> Check:
    """Whether every package that the course needs is installed in a version that it was tested with."""
    from packaging.requirements import Requirement

    wrong = []
    try:
        wanted = metadata.requires("gpt2-small-gpu-lab") or []
    except metadata.PackageNotFoundError:
        return Check("packages", WARN, "labkit runs from a folder and is not installed", "pip install -e .")
    for line in wanted:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            have = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(have, prereleases=True):
            wrong.append(f"{requirement.name} {have} is not {requirement.specifier}")
    if wrong:
        return Check("packages", FAIL if any("missing" in w for w in wrong) else WARN, "; ".join(wrong), "make setup")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return Check("packages", OK, versions)


def kernel() -> Check:
    """Whether Jupyter starts its Python kernel with this interpreter."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return Check("jupyter kernel", FAIL, "there is no python3 kernel", "pip install ipykernel")
    program = Path(spec.argv[0])
    if program.name == spec.argv[0] or _same(program, Path(sys.executable)):  # a bare `python` is replaced by Jupyter
        return Check("jupyter kernel", OK, "python3 runs in this environment")
    return Check(
        "jupyter kernel",
        FAIL,
        f"the python3 kernel is another Python: {program}",
        f"{sys.executable} -m ipykernel install --sys-prefix --name python3",
    )


def _same(a: Path, b: Path) -> bool:
    return a.parent.resolve() == b.parent.resolve()  # python, python3 and python3.12 in one bin folder
