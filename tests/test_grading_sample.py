"""A small sample of grading for every test run: three submissions in a sandbox, and a clear refusal where none can be.

All attacks are in test_grading_attacks.py (``make test-grading``).
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest
from grading_samples import (
    CODE,
    HOME,
    MAXIMUM,
    NAME,
    NUMBER,
    OTHER,
    WORDS,
    hand_in,
    lesson,
    notebook,
    solutions,
    solved,
)

from labkit.grading import grader, intake, lessons, matching, outcomes, sandbox, session, submissions, wire
from labkit.grading.outcomes import ExerciseResult, SubmissionResult
from labkit.units import UserError

OPTIONS = grader.Options(exercises_only=True, answer_seconds=10)


@pytest.mark.slow
def test_three_submissions(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader.Course, "digest", lambda self, lesson: "the same")
    folder, out = tmp_path / "in", tmp_path / "out"
    hand_in(folder, "ada", solved())
    peep = "import os\nproduct_rate = os.listdir('/course'), os.getuid()"
    hand_in(folder, "eve", solved(product_rate=peep, copy_rate="import os\nos._exit(1)", slow_print="slow_print = ..."))
    hand_in(folder, "bob", "{")
    if sandbox.why_not():
        with pytest.raises(UserError, match="--no-sandbox"):
            grader.grade(folder, out, options=OPTIONS, home=HOME)
        assert not (out / "scores.csv").exists()
        return
    assert grader.grade(folder, out, options=OPTIONS, home=HOME) == 0
    found = {r.student: {e.exercise: e for e in r.exercises} for r in outcomes.load_all(out)}
    assert {e: (r.status, r.points) for e, r in found["ada"].items()} == {
        NUMBER: ("graded", 1), OTHER: ("graded", 1), CODE: ("graded", 4), WORDS: ("needs-manual", 2)
    }  # fmt: skip
    assert [found["eve"][e].status for e in (NUMBER, OTHER, CODE, WORDS)] == ["tampered", "crashed", "graded", "blank"]
    assert "lessons" not in found["eve"][NUMBER].answer and "instructor" not in found["eve"][NUMBER].answer
    assert {e.status for e in found["bob"].values()} == {"unreadable"}
    assert len((out / "scores.csv").read_text().splitlines()) == 1 + 3 * len(MAXIMUM)
    assert capsys.readouterr().out.count("[3/3]") == 1
    file = outcomes.path(out, "ada", NAME)
    before = file.stat().st_mtime_ns
    grader.grade(folder, out, options=OPTIONS, home=HOME)
    assert file.stat().st_mtime_ns == before, "what is graded already is kept"
    assert capsys.readouterr().out.count("kept") == 3


def test_without_bubblewrap_it_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    hand_in(tmp_path / "in", "ada", solved())
    with pytest.raises(UserError, match=r"apt install bubblewrap.*--no-sandbox"):
        grader.grade(tmp_path / "in", tmp_path / "out", options=OPTIONS, home=HOME)


def test_a_sandbox_shows_neither_lessons_nor_submissions(tmp_path: Path) -> None:
    """The command line itself: what is mounted, and that nothing of the network or of root is left."""
    command = " ".join([*sandbox._walls(), *sandbox._python(), *sandbox._course(), *sandbox._home(2**20)])
    assert "--unshare-net" in command and "--unshare-pid" in command and "--die-with-parent" in command
    for secret in ("lessons", "instructor", "submissions", str(HOME / "tests")):
        assert secret not in command
    if os.getuid() == 0:
        user = sandbox.Sandbox().setup()["user"]
        assert user >= 61_000 and sandbox.Sandbox().setup()["user"] != user


def test_nothing_to_grade_and_lessons_without_hidden_tests_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="<student>/<lesson>"):
        intake.collect(tmp_path)
    with pytest.raises(UserError, match="no folder"):
        intake.collect(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no hidden test for honest_timer"):
        lessons.tests(lesson(), tmp_path)
    (tmp_path / f"{NAME}.py").write_text("def broken(:")
    with pytest.raises(UserError, match="cannot be imported"):
        lessons.tests(lesson(), tmp_path)


def test_every_lesson_says_what_its_exercises_are() -> None:
    kinds = {t.name: t.kind for t in lesson("01_baseline_oom").tasks}
    assert kinds == {"block_mib": "number", "largest_batch": "code", "cured": "choice", "why": "words"}
    task = lesson("01_baseline_oom").task("cured")
    assert (task.variable, task.maximum, task.manual) == ("cured_run", 1, False)
    with pytest.raises(UserError, match="block_mib"):
        lesson("01_baseline_oom").task("nothing")


def test_a_score_is_kept_until_something_that_decides_it_changes(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").write_text("# one")
    course = grader.Course({NAME: HOME / "lessons" / f"{NAME}.py"}, {}, tmp_path)
    before = course.made_of(NAME, OPTIONS)
    (tmp_path / f"{NAME}.py").write_text("# another")
    assert course.made_of(NAME, OPTIONS) != before


def test_results_survive_their_file(tmp_path: Path) -> None:
    one = ExerciseResult("ada", NAME, NUMBER, 0.5, 1, "partial", "half", ("a note",), "number", "12", 7)
    result = SubmissionResult("ada", NAME, "ada/x.ipynb", (one,), (outcomes.Finding("order", "late"),), 1.5)
    outcomes.save(tmp_path, result)
    assert outcomes.load_all(tmp_path) == [result]
    assert (result.points, result.maximum) == (0.5, 1)
    with pytest.raises(ValueError, match="status"):
        dataclasses.replace(one, status="excellent")
    outcomes.path(tmp_path, "ada", NAME).write_text('{"schema": 1}')
    assert outcomes.load_all(tmp_path) == []


def test_a_cell_that_was_edited_by_hand_is_told_from_one_of_another_version() -> None:
    made = solved()
    check = next(c for c in made.cells if c.id == f"{NUMBER}-check")
    check.source += "\n# edited"
    assert matching.match(lesson(), made).tampered[NUMBER] == ["the check was edited"]
    from nbgrader.utils import compute_checksum

    check.metadata["nbgrader"]["checksum"] = compute_checksum(check)
    found = matching.match(lesson(), made)
    assert NUMBER not in found.tampered
    assert [f.kind for f in found.findings] == ["version"]
    ours = next(c for c in found.notebook.cells if c.id == f"{NUMBER}-check")
    assert "edited" not in ours.source


def test_what_is_ours_comes_back_whatever_was_done_to_it() -> None:
    made = solved()
    given = next(c for c in made.cells if c.cell_type == "code" and "nbgrader" not in c.metadata)
    given.source = "raise SystemExit"
    made.cells.remove(next(c for c in made.cells if c.id == f"{CODE}-check"))
    found = matching.match(lesson(), made)
    assert [(c.id, c.source) for c in found.notebook.cells] == [
        (c.id, solutions().get(c.id, c.source)) for c in lesson().notebook.cells
    ]
    assert "edited" in {f.kind for f in found.findings} and CODE in found.tampered


def test_untouched_is_blank_without_any_process() -> None:
    nobody = session.Trusted(HOME / "lessons" / f"{NAME}.py", None)
    for task in lesson().tasks:
        one = session.grade(lesson(), task, lesson().cells, nobody, None)  # type: ignore[arg-type]
        assert (one.status, one.points) == ("blank", 0)
    nobody.close()


def test_the_seed_of_hidden_inputs_is_the_students_own_stays_and_is_nobodys_to_know(tmp_path: Path) -> None:
    key = session.key_of(tmp_path / "out")
    assert session.key_of(tmp_path / "out") == key != session.key_of(tmp_path / "another")
    assert (tmp_path / "out" / "seeds.key").stat().st_mode & 0o077 == 0
    (tmp_path / "another" / "seeds.key").write_bytes(b"")  # killed while it was made
    assert len(session.key_of(tmp_path / "another")) == session.KEY_BYTES
    seeds = {session.seed_of(key, s, NAME, e) for s in ("ada", "bob") for e in MAXIMUM}
    assert len(seeds) == 8 and session.seed_of(key, "ada", NAME, CODE) in seeds
    assert session.seed_of(b"another", "ada", NAME, CODE) not in seeds


def test_of_several_files_the_best_is_graded_and_the_others_are_named(tmp_path: Path) -> None:
    hand_in(tmp_path, "ada", notebook(), "old (1).ipynb")
    hand_in(tmp_path, "ada", solved())
    hand_in(tmp_path, "ada", "{", f"sub/{NAME}.ipynb")
    (one,) = submissions.open_all(intake.collect(tmp_path).entries, {NAME: lesson()})
    assert one.entry.relative == f"ada/{NAME}.ipynb" and not one.unreadable
    assert len([f for f in one.findings if "is not graded" in f.text]) == 2


def test_a_process_without_walls_ends_with_its_group(tmp_path: Path) -> None:
    source = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
    process = wire.Process([sys.executable, "-c", source + "print('{}', flush=True); time.sleep(99)"])
    assert process.receive(time.monotonic() + 60) == {}
    process.kill()
    assert not process.alive
