"""Hand-ins that nobody foresaw: one of them never stops the others, and links and pried-out inputs gain nothing."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import grading_samples as samples
import pytest
from grading_samples import NAME, hand_in

from labkit.grading import grader, intake, outcomes, prying, reading, rerun, scores, single, submissions, wire
from labkit.grading.outcomes import ExerciseResult, SubmissionResult


def result(student: str = "ada", **changes: object) -> SubmissionResult:
    one = ExerciseResult(student, "00_environment", "rate", 0, 1, "wrong", "too \ud83d small")
    return SubmissionResult(student, "00_environment", "f.ipynb", (one,), **changes)  # type: ignore[arg-type]


def test_half_a_character_is_written_and_read_back(tmp_path):
    file = outcomes.save(tmp_path, result())
    assert outcomes.load(file).exercises[0].message == "too ? small"


def test_a_result_that_cannot_be_written_becomes_one_that_can(tmp_path, monkeypatch):
    deep: dict = {}
    for _ in range(3000):
        deep = {"a": deep}
    entry = intake.Entry("eve", tmp_path / "f.ipynb", "eve/f.ipynb")
    submission = submissions.Submission(entry, "00_environment", "x", unreadable="no notebook")
    monkeypatch.setattr(single, "unreadable", lambda *_: result("eve", saved_rows=(deep,)))
    course = grader.Course({}, {}, tmp_path)
    job = grader._Job(submission, {"file": "x"}, tmp_path, tmp_path, grader.Options(), threading.Event())
    found = grader._one(course, job, None)
    assert found.exercises[0].status == "crashed" and not found.made_of
    assert outcomes.load_all(tmp_path) == [found]


def test_an_answer_that_no_parser_takes_costs_its_exercise_alone(tmp_path, monkeypatch):
    def grade(lesson, task, *_, **__):
        if task.name == "long":
            raise RecursionError
        return ExerciseResult("eve", "x", task.name, 1, 1, "graded", "right")

    monkeypatch.setattr(single.session, "grade", grade)
    lesson = SimpleNamespace(name="x", tasks=[SimpleNamespace(name=n, maximum=1, kind="number") for n in ("long", "b")])
    submission = submissions.Submission(intake.Entry("eve", tmp_path, "eve/x.ipynb"), "x", "")
    runner = SimpleNamespace(close=lambda: None)
    found = [single.exercise(lesson, t, submission, None, runner, grader.Options(), b"") for t in lesson.tasks]
    assert [(e.status, e.points) for e in found] == [("error", 0), ("graded", 1)]


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("ada", "ada"),
        ("Jos\udce9", "Jos?"),
        ("a\nb\x1b[31m", "a?b?[31m"),
        ("evil\u202e", "evil?"),
        ("=cmd()", "=cmd()"),
    ],
)
def test_names_are_fit_for_paths_and_terminals(name, safe):
    assert intake.safe(name) == safe


def test_a_long_name_is_cut_and_stays_its_own():
    one, two = (intake.safe("字" * 83 + end) for end in "ab")
    assert len(one.encode()) <= 120 and one != two


def test_a_formula_is_no_formula_in_the_scores(tmp_path):
    text = scores.write(tmp_path, [result("=HYPERLINK(1)")]).read_text()
    assert "\n'=HYPERLINK(1)," in text


def test_links_are_nobodys_hand_in(tmp_path):
    real = tmp_path / "in" / "ada"
    real.mkdir(parents=True)
    (real / "00_environment.ipynb").write_text("{}")
    os.symlink("ada", tmp_path / "in" / "eve")
    (tmp_path / "in" / "mal").mkdir()
    os.symlink("../ada", tmp_path / "in" / "mal" / "linked")
    os.symlink("../ada/00_environment.ipynb", tmp_path / "in" / "mal" / "00_environment.ipynb")
    found = intake.collect(tmp_path / "in")
    assert [(e.student, "link" in submissions.open_one(e, {}).unreadable) for e in found.entries] == [
        ("ada", False),
        ("mal", True),
    ]
    assert [(o.path, o.reason.split(";")[0]) for o in found.left_out] == [("eve", "a link"), ("mal/linked", "a link")]


def test_what_costs_more_to_read_than_a_notebook_is_not_read(tmp_path, monkeypatch, recwarn):
    """A file with holes, JSON of nothing but values, metadata of megabytes, cells there a hundred times."""
    course = {NAME: samples.lesson()}
    whole = json.dumps(samples.solved())
    hand_in(tmp_path, "bomb", f'{whole[:-1]}, "x": [{"[]," * 500_000} 0]}}')
    hand_in(tmp_path, "holes", "x")
    hand_in(tmp_path, "holes", b"x", f"{NAME}.labkit.zip")
    for file in (tmp_path / "holes").iterdir():
        os.truncate(file, 2**42)
    many = json.loads(whole)
    many["metadata"]["x"] = many["cells"][0]["metadata"]["x"] = ["x"] * 100_000
    many["cells"] += [c for c in many["cells"] if c["id"] == samples.NUMBER] * 50
    hand_in(tmp_path, "many", many)
    monkeypatch.setattr(reading, "_SMALL", 2**20)
    monkeypatch.setattr(reading, "MOST_VALUES", 900_000)
    began = time.monotonic()
    found = [submissions.open_one(entry, course) for entry in intake.collect(tmp_path).entries]
    assert time.monotonic() - began < 60
    assert {(s.entry.student, s.unreadable) for s in found} == {
        ("bomb", "holds more than 900,000 values, which no notebook has"),
        ("holes", "larger than 512 MiB"), ("holes", f"{NAME}.labkit.zip: larger than 24.0 MiB"), ("many", ""),
    }  # fmt: skip
    assert found[-1].saved.metadata == {} and not recwarn.list
    assert [s.digest for s in found] == [submissions._digest_of(s.entry) for s in found]


def test_values_are_counted_outside_of_texts():
    texts = json.dumps({"a": ["[,{" * 1000, '\\"[[[', "\\\\", '"'], "b": 1}).encode()
    assert reading.values(texts, 100) < 25 < reading.values(texts.replace(b'"', b""), 100)
    assert reading.values(b'{"a": "never ends, [[[' + b"[" * 200, 100) < 10
    assert reading.values(b"[" * 200, 100) > 100


def test_of_two_lessons_in_one_file_that_counts_by_which_it_is_called(tmp_path):
    other = "01_baseline_oom"
    both = json.loads(json.dumps(samples.solved()))
    both["cells"] += json.loads(json.dumps(samples.notebook(other)))["cells"]
    course = {NAME: samples.lesson(), other: samples.lesson(other)}
    for name in (NAME, other):
        hand_in(tmp_path, "ada", both, f"{name}.ipynb")
    found = [submissions.open_one(entry, course) for entry in intake.collect(tmp_path).entries]
    assert [(s.lesson, s.unreadable) for s in found] == [(NAME, ""), (other, "")]


@pytest.mark.parametrize(("seconds", "said"), [(60, "nothing was heard of it any more"), (1, "it took more than 1 s")])
def test_a_notebook_that_stops_whoever_runs_it_is_not_waited_for(monkeypatch, seconds, said):
    class Stopped:
        def launch(self, module):
            return wire.Process([sys.executable, "-c", "import time; time.sleep(600)"])

        def setup(self):
            return {}

        def close(self):
            pass

    monkeypatch.setattr(rerun, "SILENT_SECONDS", 1.0)
    began = time.monotonic()
    found = rerun.run(samples.notebook(), Stopped(), cell_seconds=1, seconds=seconds)
    assert [f.text for f in found.findings] == [f"the notebook was stopped: {said}"]
    assert time.monotonic() - began < 30


def test_what_no_parser_takes_is_unreadable(tmp_path, monkeypatch):
    def fails(*_):
        raise RecursionError

    monkeypatch.setattr(submissions, "_opened", fails)
    (tmp_path / "00_environment.ipynb").write_text("{}")
    entry = intake.Entry("ada", tmp_path / "00_environment.ipynb", "ada/00_environment.ipynb")
    assert "RecursionError" in submissions.open_one(entry, {}).unreadable


@pytest.mark.parametrize(
    "source",
    [
        "def f(call):\n    return call.__self__.late",
        "import sys\nsys._getframe(1).f_locals",
        "from inspect import currentframe",
        "getattr(call, '__closure__')",
        "import gc\ngc.get_objects()",
        "%timeit 1\ndef f(call):\n    return call.__self__",
    ],
)
def test_prying_answers_are_found(source):
    assert prying.found([source])


@pytest.mark.parametrize(
    "source", ["self.frame = 1", "import gc\ngc.collect()", "x = 'the frame f_back of'", "def f(:"]
)
def test_other_answers_are_not(source):
    assert not prying.found([source])
