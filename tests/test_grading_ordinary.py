"""Grading by an ordinary user: the same walls, the same scores; and where the system allows no sandbox, a refusal."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grading_samples import HOME, MAXIMUM, NAME, NUMBER, OTHER, course, hand_in, solved

from labkit.grading import grader, sandbox
from labkit.units import UserError

NOBODY = 64_321  # a user of no name


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can reach; pytest's own is closed to them."""
    made = Path(tempfile.mkdtemp(prefix="labkit-ordinary-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def as_ordinary_user(command: list[str], environment: dict[str, str], place: Path) -> list[str]:
    """The command for an ordinary user: as it is for one; root becomes nobody, in a view of the disk in which the
    closed folders above this Python and this checkout are open, and hold nothing else."""
    words = ["env", "-i", *(f"{k}={v}" for k, v in environment.items()), *command]
    if os.getuid() != 0:
        return words
    steps, kept = ["mount --make-rprivate /"], []
    for number, folder in enumerate({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), HOME}):
        closed = [p for p in reversed(folder.parents) if not p.stat().st_mode & 0o001]
        if closed:
            (place / f"keep{number}").mkdir()
            steps.append(f"mount --bind {shlex.quote(str(folder))} {place}/keep{number}")
            kept.append((closed[0], folder, place / f"keep{number}"))
    steps += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(top))}" for top in {top for top, _, _ in kept}]
    for _, folder, keep in kept:
        steps += [f"mkdir -p {shlex.quote(str(folder))}", f"mount --bind {keep} {shlex.quote(str(folder))}"]
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]
    return ["unshare", "--mount", "sh", "-ec", "; ".join([*steps, f"exec {shlex.join([*user, *words])}"])]


@pytest.mark.grading
def test_an_ordinary_user_grades_behind_the_same_walls(place: Path) -> None:
    home, folder, out = course(place / "course"), place / "in", place / "out"
    hand_in(folder, "ada", solved())
    peeps = {
        NUMBER: "import os\nproduct_rate = os.listdir('/proc/1/fd')",
        OTHER: f"copy_rate = open({str(folder / 'ada' / f'{NAME}.ipynb')!r}).read()",
        "slow_print": "import os\nslow_print = str((os.path.exists('/course/lessons'), os.listdir('/home')))",
    }
    hand_in(folder, "eve", solved(**peeps))
    for path in [place, *place.rglob("*")]:
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(place), "LANG": "C.UTF-8"}
    environment |= {"LABKIT_HOME": str(home), "PYTHONPATH": str(HOME), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "labkit.cli", "grade", str(folder), "--out", str(out), "--exercises-only"]
    ran = subprocess.run(as_ordinary_user(command, environment, place), capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    with (out / "scores.csv").open() as file:
        rows = {(r["student"], r["exercise"]): (float(r["points"]), r["status"]) for r in csv.DictReader(file)}
    assert {rows["ada", e][1] for e in MAXIMUM} == {"graded", "needs-manual"}
    assert sum(rows["ada", e][0] for e in MAXIMUM) == sum(MAXIMUM.values())
    assert rows["eve", NUMBER][0] == rows["eve", OTHER][0] == 0
    page = (out / "feedback" / "eve.html").read_text()
    assert "(False, [&#x27;learner&#x27;])" in page
    if os.getuid() == 0:
        assert (out / "scores.csv").stat().st_uid == NOBODY


def test_where_the_system_allows_no_sandbox_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox._trial.cache_clear()
    hand_in(tmp_path / "in", "ada", solved())
    try:
        with pytest.raises(UserError, match=r"cannot make a sandbox here: .*Permission denied; --no-sandbox grades"):
            grader.grade(tmp_path / "in", tmp_path / "out", home=HOME)
    finally:
        sandbox._trial.cache_clear()
