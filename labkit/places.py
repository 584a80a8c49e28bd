"""Where things lie: the course folder, and the folder that results of this process go to."""

from __future__ import annotations

import os
from pathlib import Path

from .units import UserError


def home() -> Path:
    """The course folder: the one with ``notebooks/`` (or ``lessons/``) in it.

    Looked for in this order: the variable ``LABKIT_HOME``; the working directory and the folders above it (a learner
    works in ``work/``); the checkout that this package is installed from. Without any of them, the working directory.
    Raises `UserError` when ``LABKIT_HOME`` names no folder.
    """
    if wish := os.environ.get("LABKIT_HOME"):
        folder = Path(wish).expanduser()
        if not folder.is_dir():
            raise UserError(f"LABKIT_HOME names no folder: {wish}")
        return folder.resolve()
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parent.parent):
        if _is_course(folder):
            return folder
    return here


def environment(**more: str) -> dict[str, str]:
    """The environment of a new Python process that shall import this very package; `more` is added.

    An installed package is found anyway; and its folder, put first, would hide parts of the standard library.
    """
    package = Path(__file__).resolve().parents[1]
    paths = [] if "site-packages" in package.parts else [str(package)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}), **more}


def results_folder() -> Path:
    """Where a lesson writes its rows: ``LABKIT_RUN`` (set by the runner), else ``runs/interactive`` in `home`."""
    if wish := os.environ.get("LABKIT_RUN"):
        return Path(wish).expanduser()
    return home() / "runs" / "interactive"


def _is_course(folder: Path) -> bool:
    return (folder / "labkit" / "__init__.py").is_file() and any(
        (folder / n).is_dir() for n in ("notebooks", "lessons")
    )
