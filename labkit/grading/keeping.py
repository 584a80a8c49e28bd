"""What a result was made of: it is kept as long as that stays the same, and a change is named when it does not.

A result goes when its file goes; results that came from other folders of submissions stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from . import outcomes
from .outcomes import SubmissionResult

NAMES = {
    "file": "the file handed in",
    "name": "the file's name",
    "course": "the lesson, or labkit",
    "hidden": "the hidden tests",
    "data": "data/",
    "whole": "--exercises-only",
    "timeout": "--timeout",
    "answer": "the seconds of an answer",
    "sandbox": "--no-sandbox",
    "limits": "the sandbox's limits",
    "card": "LABKIT_CARD",
    "budget": "LABKIT_BUDGET",
    "device": "the machine's card",
    "versions": "the versions of Python or its libraries",
}
_LIBRARIES = ("torch", "transformers", "numpy", "torchao", "peft", "nbclient", "ipykernel")


def machine() -> dict[str, str]:
    """What of this machine and its settings decides a score."""
    found = []
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    devices = [p.name for p in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    return {
        "card": os.environ.get("LABKIT_CARD", ""),
        "budget": os.environ.get("LABKIT_BUDGET", ""),
        "device": f"{' '.join(devices)} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}".strip(),
        "versions": f"Python {platform.python_version()}, {', '.join(found)}",
    }


def digest_of_data(folder: Path) -> str:
    """A digest of what lies in the course's data: names and sizes (a pretrained model has hundreds of megabytes)."""
    found = hashlib.sha256()
    for path, _, files in sorted(os.walk(folder, followlinks=True)):
        for name in sorted(files):
            with contextlib.suppress(OSError):
                size = os.stat(os.path.join(path, name)).st_size
                found.update(f"{os.path.relpath(path, folder)}/{name} {size}\n".encode("utf-8", "replace"))
    return found.hexdigest()[:16]


def changes(before: SubmissionResult, now: Mapping[str, str]) -> list[str]:
    """What is no longer as it was when a result was made, in words; nothing when the result holds."""
    if not before.made_of:
        return ["nothing: grading it failed the last time"]
    return [NAMES.get(key, key) for key in {**before.made_of, **now} if before.made_of.get(key) != now.get(key)]


def forget(out: Path, folder: Path, current: Iterable[tuple[str, str]]) -> list[SubmissionResult]:
    """Remove results that were made of files of `folder` and are not among the `current` students' lessons; returns
    them."""
    there, gone = set(current), []
    for result in outcomes.load_all(out) if (out / "results").is_dir() else ():
        if (result.student, result.lesson) in there or result.folder != str(folder.resolve()):
            continue
        outcomes.path(out, result.student, result.lesson).unlink(missing_ok=True)
        for name in (result.saved_notebook, result.regenerated_notebook):
            if name:
                (out / name).unlink(missing_ok=True)
        gone.append(result)
    for kind in ("results", "submitted", "regenerated"):
        for student in {result.student for result in gone}:
            with contextlib.suppress(OSError):  # there is more in it
                (out / kind / student).rmdir()
    return gone


def removed(gone: Sequence[SubmissionResult]) -> list[str]:
    """A line on results that went, for the terminal; none when there are none."""
    names = [f"{result.student} {result.lesson}" for result in gone[:8]]
    more = f" and {len(gone) - 8} more" if len(gone) > 8 else ""
    return [f"removed, the file is not there any more: {', '.join(names)}{more}"] if gone else []


def again(reasons: Mapping[tuple[str, ...], int]) -> list[str]:
    """Lines on what is graded again: how many results, and what has changed."""
    return [
        f"graded again: {count} result{'' if count == 1 else 's'}; changed: {', '.join(names)}"
        for names, count in reasons.items()
        if count
    ]
