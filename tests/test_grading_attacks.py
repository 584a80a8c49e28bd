"""Grading against everything that was thought of: one run over many submissions of lesson 00, then what came out.

Exercises run in processes of their own, so one submission carries an attack in each exercise. Whole notebooks are run
again only for what a kernel must survive.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grading_samples as samples
import pytest
from grading_samples import CODE, HOME, MAXIMUM, NAME, NUMBER, OTHER, WORDS, body, cell, hand_in, notebook, solved

from labkit import bundles, notebooks
from labkit.grading import comparing, grader, outcomes, sandbox
from labkit.grading.outcomes import ExerciseResult, SubmissionResult

pytestmark = pytest.mark.grading
SMALL = sandbox.Limits(memory=2 * 2**30, total=4 * 2**30, processes=64)
QUICK = grader.Options(jobs=2, exercises_only=True, answer_seconds=25, limits=SMALL)
WHOLE = grader.Options(jobs=2, answer_seconds=25, cell_seconds=60, limits=SMALL)

DEAF = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
LOOSE = "class Loose:\n    def __eq__(self, other): return True\n    def __float__(self): return 1.0\n"
CHANNEL = "import gc\n(channel,) = [o for o in gc.get_objects() if type(o).__name__ == 'Channel']\n"
TIMER = "def honest_timer(call, wait, repeats=9):\n"
ANSWERS: dict[str, dict[str, str]] = {
    "raises": {
        NUMBER: "product_rate = 1 / 0", OTHER: "copy_rate = (", CODE: body("raise RuntimeError('no')"),
        WORDS: "slow_print = input('why? ')",
    },
    "hangs": {NUMBER: "while True: pass", OTHER: DEAF},
    "hangs_in_code": {CODE: body("while True: pass")},
    "deaf": {NUMBER: "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"},
    "dies": {
        NUMBER: "import os\nos._exit(3)", OTHER: "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        CODE: body("import os\nos._exit(0)"), WORDS: "import ctypes\nctypes.string_at(0)",
    },
    "greedy": {
        NUMBER: "product_rate = bytearray(40 * 2**30)",
        OTHER: "rows = []\nwhile True: rows.append(bytearray(2**26))",
    },
    "forks": {NUMBER: "import os\nwhile True: os.fork()"},
    "prints": {
        NUMBER: "while True: print('x' * 1000)", OTHER: "print('x' * 200_000_000)\n" + samples.solutions()[OTHER],
        CODE: body("print('x' * 10_000_000)"),
    },
    "warns": {
        NUMBER: "import warnings\nwarnings.warn('old')\n" + samples.solutions()[NUMBER],
        CODE: body("import warnings\nwarnings.warn('old')"),
    },
    "equal": {
        NUMBER: "class Same(float):\n    def __eq__(self, other): return True\nproduct_rate = Same(1)",
        OTHER: LOOSE + "copy_rate = Loose()",
        CODE: LOOSE + "def honest_timer(call, wait, repeats=9): return Loose()",
    },
    "patches": {
        NUMBER: "import labkit\nlabkit.checks.number = lambda *a, **k: 'right'\nproduct_rate = 1",
        OTHER: "import torch\ntorch.cuda.max_memory_allocated = lambda *a: 0\n" + samples.solutions()[OTHER],
        CODE: body("import time\ntime.perf_counter = lambda: 0.0"),
    },
    "peeps": {
        NUMBER: "product_rate = open('../../lessons/00_environment.py').read()",
        OTHER: "import os\ncopy_rate = os.listdir('/')",
        CODE: body("open('../../instructor/hidden/00_environment.py')"),
        WORDS: "from pathlib import Path\nslow_print = Path('/etc/passwd').read_text()",
    },
    "writes": {
        NUMBER: "open('/course/labkit/checks.py', 'w')\n" + samples.solutions()[NUMBER],
        OTHER: "open('mine.txt', 'w').write('this is allowed')\n" + samples.solutions()[OTHER],
    },
    "calls_home": {
        NUMBER: "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)",
        CODE: body("import urllib.request\nurllib.request.urlopen('http://192.0.2.1')"),
    },
    "pries": {
        NUMBER: CHANNEL + "channel.say('failed')\nproduct_rate = 1",  # without its fields
        OTHER: "copy_rate = " + "1+" * 5000 + "1",  # too deep for the parser
        CODE: TIMER + "    card = call.__self__\n    card.calls, card.late = 99, [1e6] * 99\n    return 1.0",
    },
    "pries_further": {
        NUMBER: CHANNEL + "channel.say('exit', signal=0, strays=False)\nproduct_rate = 1",
        OTHER: CHANNEL + "channel.say('end')\nimport os\nos._exit(0)",
        CODE: TIMER + "    import sys\n    return getattr(sys, '_get' + 'frame')(1).f_code.co_argcount / 60",
    },
    "forges": {
        CODE: CHANNEL + "channel.say('ready')\nfor _ in range(4):\n    channel.hear()\n"
        "    channel.say('result', value=0.033, shown='')\nchannel.say('end')\nimport os\nos._exit(0)",
    },
    "waits_long": {  # what the card says of its own lateness is not for the answer to widen
        CODE: TIMER + "    import time\n    for _ in range(repeats + 1):\n        call()\n        wait()\n"
        "    for _ in range(repeats):\n        time.sleep(0.2)\n        call()\n        time.sleep(0.2)\n"
        "        wait()\n    return 0.2",
    },
    "shares": {
        NUMBER: "import mmap\nproduct_rate = len(mmap.mmap(-1, 2**30))",
        OTHER: "import os\ncopy_rate = os.memfd_create('x')",
        WORDS: "import ctypes\nassert ctypes.CDLL(None).unshare(0x10020000) == 0",
    },
    "modern": {  # what runs in Jupyter
        NUMBER: f"{samples.solutions()[NUMBER]}\nimport asyncio\nproduct_rate = await asyncio.sleep(0, product_rate)",
        OTHER: "\ufeff%time " + samples.solutions()[OTHER].strip().split("\n")[-1] + "\ncopy_rate?",
        CODE: samples.solutions()[CODE] + "\n%timeit -n1 -r1 (7\\\n% 4)",
    },
    "wrong": {NUMBER: "product_rate = 12.0"},
    "own_helper": {NUMBER: samples.solutions()[NUMBER]},
}  # fmt: skip


def submissions(folder: Path) -> None:
    hand_in(folder, "right", solved())
    hand_in(folder, "untouched", notebook())
    for student, answers in ANSWERS.items():
        hand_in(folder, student, solved(**answers))
    hand_in(folder, "not_json", "{" * 100_000)
    hand_in(folder, "not_json_either", b"\x00\xff" * 100)
    hand_in(folder, "empty", "")
    hand_in(folder, "long", samples.changed(solved(), lambda n: n.cells.append(_code("if a: a = a\n" * 100_000))))
    hand_in(folder, "no_cells", {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    hand_in(folder, "another", notebook("01_baseline_oom"))
    hand_in(folder, "renamed", solved(), "my homework (2).ipynb")
    hand_in(folder, "stranger", {"cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "Hello"}],
                                 "metadata": {}, "nbformat": 4, "nbformat_minor": 5})  # fmt: skip
    (folder / "link").mkdir()
    (folder / "link" / f"{NAME}.ipynb").symlink_to("/etc/passwd")
    wrong = {NUMBER: "product_rate = 12.0"}
    easy = 'lab.check.number("product_rate", 1, 1)'
    hand_in(
        folder,
        "edited_check",
        samples.changed(solved(**wrong), lambda n: cell(n, f"{NUMBER}-check").update(source=easy)),
    )
    hand_in(folder, "edited_points", samples.changed(solved(**wrong), _raise_points))
    hand_in(
        folder, "deleted_check", samples.changed(solved(**wrong), lambda n: n.cells.remove(cell(n, f"{NUMBER}-check")))
    )
    hand_in(folder, "deleted_answer", samples.changed(solved(), lambda n: n.cells.remove(cell(n, NUMBER))))
    hand_in(folder, "second_check", samples.changed(solved(**wrong), _second_check))
    hand_in(folder, "faked", samples.claiming(solved(**wrong), product_rate=1.0))
    hand_in(folder, "stripped", samples.stripped(solved(**wrong)))
    hand_in(folder, "huge_output", samples.changed(solved(), _huge_output))
    forged = {"kind": "check", "lesson": NAME, "exercise": NUMBER, "points": 1.0, "maximum": 1.0, "status": "right"}
    book = notebooks.dumps(solved(**wrong)).encode()
    made_with = {"course": {"notebook_sha256": "0" * 64, "copied_sha256": None}}
    target = folder / "forged" / f"{NAME}{bundles.SUFFIX}"
    bundles.write(target, bundles.Bundle(NAME, book, ({"schema": 1, **forged},), "Eve", made_with))
    helper = "def flops(m, k, n):\n    return 2 * m * k * n"
    made = solved(product_rate="product_rate = flops(4096, 1024, 8192) / 0.8e-3")
    made.cells.insert(next(i for i, c in enumerate(made.cells) if c.id == NUMBER), _code(helper))
    hand_in(folder, "own_helper", made)


def _code(source: str) -> Any:
    import nbformat

    return nbformat.v4.new_code_cell(source, id="mine")


def _raise_points(made: Any) -> None:
    cell(made, f"{NUMBER}-check").metadata["nbgrader"]["points"] = 100


def _second_check(made: Any) -> None:
    copy = _code('lab.check.number("product_rate", 1, 1)')
    copy.metadata = cell(made, f"{NUMBER}-check").metadata
    made.cells.append(copy)


def _huge_output(made: Any) -> None:
    cell(made, NUMBER).outputs = [{"output_type": "stream", "name": "stdout", "text": "x" * 200_000_000}]


Found = dict[str, dict[str, ExerciseResult]]


@pytest.fixture(autouse=True, scope="module")
def _course_stays() -> Iterator[None]:
    """A file of the course that changes while the tests run must not change what is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grader.Course, "digest", lambda self, lesson: "the same")
        yield


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, out = tmp_path_factory.mktemp("submissions"), tmp_path_factory.mktemp("graded")
    submissions(folder)
    assert grader.grade(folder, out, options=QUICK, home=HOME) == 0
    return out


@pytest.fixture(scope="module")
def found(graded: Path) -> Found:
    return {r.student: {e.exercise: e for e in r.exercises} for r in outcomes.load_all(graded)}


@pytest.fixture(scope="module")
def results(graded: Path) -> dict[str, SubmissionResult]:
    return {r.student: r for r in outcomes.load_all(graded)}


EXPECTED: list[tuple[str, str, str, float]] = [
    *(("right", e, "needs-manual" if e == WORDS else "graded", m) for e, m in MAXIMUM.items()),
    *(("untouched", e, "blank", 0) for e in MAXIMUM),
    ("wrong", NUMBER, "wrong", 0),
    *(("raises", e, "error", 0) for e in MAXIMUM),
    ("hangs", NUMBER, "timeout", 0), ("hangs", OTHER, "timeout", 0), ("hangs_in_code", CODE, "timeout", 0),
    ("deaf", NUMBER, "timeout", 0),
    *(("dies", e, "crashed", 0) for e in MAXIMUM),
    ("greedy", NUMBER, "error", 0), ("greedy", OTHER, "error", 0),
    ("prints", NUMBER, "timeout", 0), ("prints", OTHER, "graded", 1), ("prints", CODE, "graded", 4),
    ("warns", NUMBER, "graded", 1), ("warns", CODE, "graded", 4),
    *(("equal", e, "tampered", 0) for e in (NUMBER, OTHER, CODE)),
    *(("patches", e, "tampered", 0) for e in (NUMBER, OTHER, CODE)),
    *(("peeps", e, "tampered", 0) for e in MAXIMUM),
    *(("pries", e, s, 0) for e, s in ((NUMBER, "tampered"), (OTHER, "error"), (CODE, "tampered"))),
    *(("pries_further", e, s, 0) for e, s in ((NUMBER, "tampered"), (OTHER, "crashed"), (CODE, "tampered"))),
    ("forges", CODE, "tampered", 0), ("waits_long", CODE, "wrong", 0),
    *(("shares", e, "error", 0) for e in (NUMBER, OTHER, WORDS)),
    ("modern", NUMBER, "graded", 1), ("modern", OTHER, "graded", 1), ("modern", CODE, "graded", 4),
    ("writes", NUMBER, "tampered", 0), ("writes", OTHER, "graded", 1),
    ("calls_home", NUMBER, "tampered", 0), ("calls_home", CODE, "tampered", 0),
    *((s, e, "unreadable", 0) for s in ("not_json", "not_json_either", "empty", "long") for e in MAXIMUM),
    *((s, e, "unreadable", 0) for s in ("no_cells", "link") for e in MAXIMUM),
    ("renamed", NUMBER, "graded", 1),
    ("edited_check", NUMBER, "tampered", 0), ("edited_points", NUMBER, "tampered", 0),
    ("deleted_check", NUMBER, "tampered", 0), ("deleted_answer", NUMBER, "tampered", 0),
    ("second_check", NUMBER, "tampered", 0), ("faked", NUMBER, "tampered", 0), ("stripped", NUMBER, "tampered", 0),
    ("stripped", CODE, "tampered", 4), ("forged", NUMBER, "tampered", 0), ("huge_output", NUMBER, "graded", 1),
    ("own_helper", NUMBER, "graded", 1),
]  # fmt: skip


@pytest.mark.parametrize(("student", "exercise", "status", "points"), EXPECTED)
def test_status_and_points(found: Found, student: str, exercise: str, status: str, points: float) -> None:
    one = found[student][exercise]
    assert (one.status, one.points, one.maximum) == (status, points, MAXIMUM[exercise]), one.message


def test_a_fork_bomb_is_over_and_gains_nothing(found: Found) -> None:
    one = found["forks"][NUMBER]
    assert one.points == 0 and one.status in ("error", "timeout", "crashed")
    assert "starts another process" in one.notes


def test_only_the_exercise_that_is_wrong_loses(found: Found) -> None:
    for student, answers in ANSWERS.items():
        others = [e for e in MAXIMUM if e not in answers]
        for exercise in others:
            assert found[student][exercise].points == MAXIMUM[exercise], (student, exercise)
    for student in ("edited_check", "edited_points", "deleted_check", "faked", "forged", "second_check"):
        assert sum(e.points for e in found[student].values()) == 7, student


def test_a_notebook_of_another_lesson_scores_nothing(results: dict[str, SubmissionResult]) -> None:
    one = results["another"]
    assert (one.lesson, one.points) == (NAME, 0)
    assert {e.status for e in one.exercises} == {"unreadable"}
    assert "01_baseline_oom" in one.exercises[0].message
    assert results["stranger"].points == 0 and results["stranger"].exercises[0].status == "unreadable"


def test_findings_say_what_was_done(results: dict[str, SubmissionResult]) -> None:
    def kinds(student: str) -> set[str]:
        return {f.kind for f in results[student].findings}

    assert not results["right"].findings
    assert "renamed" in kinds("renamed")
    assert {"version", "tampered"} <= kinds("forged")
    for student in ("edited_check", "edited_points", "deleted_check", "deleted_answer", "faked", "stripped"):
        assert "tampered" in kinds(student), student
    assert "ledger" in found_text(results["forged"])
    assert "saved output" in found_text(results["faked"])


def found_text(one: SubmissionResult) -> str:
    return " ".join(f.text for f in one.findings)


def test_messages_give_no_hidden_input_away(results: dict[str, SubmissionResult]) -> None:
    """The raised text could: the learner's code has seen the inputs."""
    raised = next(e for e in results["raises"].exercises if e.exercise == CODE)
    assert "RuntimeError" in raised.message and "no" not in raised.message.split("RuntimeError")[1].split()


def test_scores_and_pages_are_written_for_all(graded: Path, results: dict[str, SubmissionResult]) -> None:
    with (graded / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["student", "lesson", "exercise", "points", "maximum", "status"]
    assert len(rows) == sum(len(r.exercises) for r in results.values())
    assert {r["status"] for r in rows} <= set(outcomes.STATUSES)
    for student in results:
        assert (graded / "feedback" / f"{student}.html").is_file(), student
    assert (graded / "summary.html").is_file()


def test_feedback_holds_nothing_of_the_hidden_tests(graded: Path) -> None:
    words = [w for w in ("pattern", "probe", "free_at") if w in (HOME / f"instructor/hidden/{NAME}.py").read_text()]
    assert words
    for page in (graded / "feedback").glob("*.html"):
        text = page.read_text()
        assert "free_at" not in text and "def probe" not in text, page.name


WHOLE_ANSWERS: dict[str, dict[str, str]] = {
    "right": {},
    "dies": {OTHER: "import os\nos._exit(1)"},
    "deaf": {
        OTHER: "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    },
    "floods": {
        NUMBER: "while True: print('x' * 100_000)",
        OTHER: "print('x' * 200_000_000)\n" + samples.solutions()[OTHER],
    },
    "asks": {NUMBER: "product_rate = input()"},
    "forks": {NUMBER: "import os\nfor _ in range(10**6): os.fork()"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, SubmissionResult]]]:
    folder, out = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("again")
    for student, answers in WHOLE_ANSWERS.items():
        hand_in(folder, student, solved(**answers))
    shuffled = solved()
    for count, one in zip(itertools.count(100, -1), (c for c in shuffled.cells if c.cell_type == "code"), strict=False):
        one.execution_count = count
    hand_in(folder, "shuffled", shuffled)
    hand_in(
        folder,
        "faked",
        samples.claiming(
            solved(honest_timer=f"{samples.solutions()[CODE].splitlines()[0]}\n    return 1"), honest_timer=4.0
        ),
    )
    assert grader.grade(folder, out, options=WHOLE, home=HOME) == 0
    yield out, {r.student: r for r in outcomes.load_all(out)}


def _outputs(out: Path, result: SubmissionResult, identity: str) -> list[Any]:
    cells = json.loads((out / result.regenerated_notebook).read_text())["cells"]
    return next(c for c in cells if c["id"] == identity).get("outputs", [])


def test_a_notebook_is_run_again_from_top_to_bottom(whole: tuple[Path, dict[str, SubmissionResult]]) -> None:
    out, results = whole
    right = results["right"]
    assert not right.findings and right.points == 8
    assert {r["exercise"] for r in right.regenerated_rows if r["kind"] == "check"} == set(MAXIMUM)
    assert any(r["kind"] == "finish" for r in right.regenerated_rows)
    shown = _outputs(out, right, f"{NUMBER}-check")
    scores = ["".join(o["data"]["text/plain"]) for o in shown if o["output_type"] == "execute_result"]
    assert [float(score) for score in scores] == [1]
    cells = json.loads((out / right.regenerated_notebook).read_text())["cells"]
    assert not [o for c in cells for o in c.get("outputs", []) if o.get("name") == "stderr"]
    assert [c["id"] for c in cells] == [c.id for c in samples.lesson().notebook.cells]


@pytest.mark.parametrize(
    ("student", "exercise", "status", "say"),
    [
        ("dies", OTHER, "crashed", "ended the kernel"),
        ("deaf", OTHER, "timeout", "did not stop"),
        ("floods", NUMBER, "timeout", "too much"),
        ("asks", NUMBER, "error", ""),
    ],
)
def test_what_a_kernel_does_is_survived_and_said(
    whole: tuple[Path, dict[str, SubmissionResult]], student: str, exercise: str, status: str, say: str
) -> None:
    out, results = whole
    one = results[student]
    assert {e.exercise: e.status for e in one.exercises}[exercise] == status
    assert say in found_text(one)
    assert {e.exercise: e.points for e in one.exercises}[CODE] == 4
    assert (out / one.regenerated_notebook).is_file()


def test_cells_below_a_flood_are_run(whole: tuple[Path, dict[str, SubmissionResult]]) -> None:
    _, results = whole
    assert {e.exercise: e.status for e in results["floods"].exercises}[OTHER] == "graded"
    assert any(r["kind"] == "finish" for r in results["floods"].regenerated_rows)
    assert results["forks"].points == 7


def test_saved_order_is_said(whole: tuple[Path, dict[str, SubmissionResult]]) -> None:
    _, results = whole
    assert results["shuffled"].points == 8
    assert "order" in {f.kind for f in results["shuffled"].findings}


def test_a_faked_output_of_a_code_exercise_is_compared_with_the_run(
    whole: tuple[Path, dict[str, SubmissionResult]],
) -> None:
    _, results = whole
    one = next(e for e in results["faked"].exercises if e.exercise == CODE)
    assert one.status == "tampered" and one.points < 4
    assert "says 4 points" in one.message


def test_a_forged_number_in_the_ledger_is_said(whole: tuple[Path, dict[str, SubmissionResult]]) -> None:
    rows = whole[1]["right"].regenerated_rows
    assert comparing.ledger_findings(rows, rows, NAME) == ()
    forged = [
        {**r, "value": r["value"] / 2} if (r["kind"], r.get("source")) == ("fact", "predicted") else r for r in rows
    ]
    found = comparing.ledger_findings(forged, rows, NAME)
    assert found and {f.kind for f in found} == {"ledger"}


def test_what_is_graded_already_is_kept_and_an_old_score_is_not(graded: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    hand_in(folder, "ada", solved())
    options = dataclasses.replace(QUICK, jobs=1)
    grader.grade(folder, out, options=options, home=HOME)
    file = outcomes.path(out, "ada", NAME)
    before = file.stat().st_mtime_ns
    grader.grade(folder, out, options=options, home=HOME)
    assert file.stat().st_mtime_ns == before, "the same submission is not graded twice"
    hand_in(folder, "ada", "no notebook any more")
    grader.grade(folder, out, options=options, home=HOME)
    again = outcomes.load(file)
    assert again is not None and again.points == 0 and {e.status for e in again.exercises} == {"unreadable"}


def test_every_lesson_solved_scores_full_in_the_sandbox(tmp_path: Path) -> None:
    """Exercises alone: what the sandbox keeps from an answer must not be what an answer needs."""
    folder, out = tmp_path / "in", tmp_path / "out"
    names = sorted(file.stem for file in (HOME / "lessons").glob("[0-9][0-9]_*.py"))
    for name in names:
        hand_in(folder, "right", notebook(name, **samples.answers(name)), f"{name}.ipynb")
        hand_in(folder, "blank", notebook(name), f"{name}.ipynb")
    assert grader.grade(folder, out, options=grader.Options(exercises_only=True), home=HOME) == 0
    results = outcomes.load_all(out)
    assert len(results) == 2 * len(names)
    for one in results:
        assert one.points == (one.maximum if one.student == "right" else 0), (one.lesson, one.exercises)
        assert not one.findings
