"""lessons/ -> notebooks/: cleared, deterministic, in step, and to the lesson contract."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from labkit import checks, contract, notebooks
from labkit.units import UserError

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = Path(__file__).parent / "data" / "lessons" / "00_sample.py"


@lru_cache
def _master() -> Any:
    return notebooks.master(SAMPLE)


@pytest.fixture
def master() -> Any:
    return copy.deepcopy(_master())


@pytest.fixture
def lessons(tmp_path: Path) -> Path:
    folder = tmp_path / "lessons"
    folder.mkdir()
    (folder / SAMPLE.name).write_text(SAMPLE.read_text())
    return folder


def cell(notebook: Any, name: str) -> Any:
    return next(c for c in notebook.cells if c.id == name)


def test_solutions_are_gone_and_blanks_are_left(master: Any) -> None:
    book = notebooks.learner(master)
    assert cell(book, "bytes_of_3000").source == "bytes_of_3000 = ..."
    assert cell(book, "largest").source.endswith('`budget` bytes."""\n    ...')
    assert cell(book, "why_heavier").source == "why_heavier = ..."
    text = notebooks.dumps(book)
    for solution in (
        "SOLUTION",
        "3000 * row",
        "budget // row",
        "Each element of a list is",
        "12_000",
        "24_000",
        "pointer",
    ):
        assert solution not in text, solution


def test_solved_copies_have_the_solutions_without_marks(master: Any) -> None:
    book = notebooks.solved(master)
    assert cell(book, "bytes_of_3000").source.endswith("bytes_of_3000 = 3000 * row(1).itemsize")
    assert "SOLUTION" not in notebooks.dumps(book) and "12_000" in notebooks.dumps(book)


def test_two_builds_give_the_same_bytes() -> None:
    first, second = (notebooks.dumps(notebooks.learner(notebooks.master(SAMPLE))) for _ in range(2))
    assert first == second


def test_ids_come_from_names_and_survive_an_edit_elsewhere(lessons: Path) -> None:
    def ids() -> list[str]:
        return [c.id for c in notebooks.master(lessons / SAMPLE.name).cells]

    before = ids()
    assert len(set(before)) == len(before) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i) for i in before)
    assert {"title", "row", "bytes_of_3000", "bytes_of_3000-check", "claims-1", "take-away-2"} <= set(before)
    text = (lessons / SAMPLE.name).read_text()
    (lessons / SAMPLE.name).write_text(text.replace("# ## Account\n", "# ## Account\n# More words.\n#\n# Many more.\n"))
    assert ids() == before


def test_nbgrader_finds_its_metadata_and_checksums(master: Any) -> None:
    from nbgrader import utils
    from nbgrader.nbgraderformat.v3 import MetadataValidatorV3

    book = notebooks.learner(master)
    MetadataValidatorV3().validate_nb(book)
    number, check, words = cell(book, "bytes_of_3000"), cell(book, "bytes_of_3000-check"), cell(book, "why_heavier")
    assert utils.is_solution(number) and not utils.is_grade(number) and number.metadata.deletable is False
    assert utils.is_grade(check) and utils.is_locked(check) and check.metadata.editable is False
    assert check.metadata.nbgrader.points == 1
    assert utils.is_grade(words) and utils.is_solution(words) and words.metadata.nbgrader.points == 2
    for one in (number, check, words):
        assert one.metadata.nbgrader.checksum == utils.compute_checksum(one)
    assert utils.determine_grade(words) == (0, 2)  # a blank written answer is no "needs manual"


def test_nothing_of_the_machine_is_in_a_notebook(master: Any) -> None:
    book = notebooks.learner(master)
    assert book.metadata.kernelspec == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert book.metadata.language_info == {"name": "python"} and "jupytext" not in book.metadata
    assert not any(c.get("outputs") or c.get("execution_count") for c in book.cells)


def test_front_matter_is_readable_and_makes_the_title(master: Any) -> None:
    front = notebooks.learner(master).metadata.labkit
    assert front["title"] == "How heavy is a list?" and front["minutes_cpu"] == 0.2 and front["name"] == "00_sample"
    title = cell(master, "title").source
    assert title.startswith("# 00 · How heavy is a list?") and "12 s without one" in title and "1 GiB budget" in title


def test_sealed_checks_still_work(master: Any) -> None:
    import labkit as lab

    source = cell(notebooks.learner(master), "bytes_of_3000-check").source
    for answer, status in ((12_000, "right"), (24_000, "wrong"), (..., "blank")):
        found = eval(source, {"lab": lab, "bytes_of_3000": answer})
        assert isinstance(found, checks.Check) and found.status == status
    assert "8 bytes each" in eval(source, {"lab": lab, "bytes_of_3000": 24_000}).message


def test_only_constants_are_sealed() -> None:
    source = 'lab.check.number("é", x, 2 * 3, mistakes={f(1): "hint"})\nother(1, 2, 3)'
    sealed = notebooks.seal_answers(source)
    told = notebooks.seal_answers('lab.check.words("w", w, {"a": "b"}, against={"telling": "?"})')
    assert "telling" not in told
    assert checks.seal(6) in sealed and 'mistakes={f(1): "hint"}' in sealed and "other(1, 2, 3)" in sealed
    assert notebooks.seal_answers('lab.check.number("n", x, report.peak)') == 'lab.check.number("n", x, report.peak)'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = ...\n...", "x = ..."),
        ("a = ...\nb = ...\n...", "a = ...\nb = ..."),
        ("x = ...  # GiB\n\n...", "x = ...  # GiB"),
        ("def f():\n    ...", "def f():\n    ..."),
        ("y = 3\n...", "y = 3\n..."),
        ("def f():\n    x = ...\n    ...\n    return x", "def f():\n    x = ...\n    return x"),
    ],
)
def test_a_second_blank_is_tidied_away(before: str, after: str) -> None:
    assert notebooks.tidy(before) == after


def test_build_writes_what_changed_and_check_sees_drift(lessons: Path, tmp_path: Path) -> None:
    out = tmp_path / "notebooks"
    assert notebooks.drift(lessons, out) == ["00_sample.ipynb: missing; make notebooks"]
    assert notebooks.build(lessons, out) == ["00_sample.ipynb: written"]
    assert notebooks.build(lessons, out) == [] and notebooks.drift(lessons, out) == []
    book = out / "00_sample.ipynb"
    book.write_text(book.read_text().replace("How many bytes do 3,000", "How many bytes do 4,000"))
    (out / "99_stray.ipynb").write_text("{}")
    assert len(notebooks.drift(lessons, out)) == 2
    assert notebooks.build(lessons, out) == ["00_sample.ipynb: written", "99_stray.ipynb: removed, it has no lesson"]
    assert notebooks.drift(lessons, out) == []


def test_the_command_line(
    lessons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    assert notebooks.main([]) == 0 and notebooks.main(["check"]) == 0
    lesson = lessons / SAMPLE.name
    lesson.write_text(lesson.read_text().replace("# ## Pitfalls", "# ## Traps"))
    assert notebooks.main(["check"]) == 1
    said = capsys.readouterr().err
    assert "is not what lessons/00_sample.py gives" in said and "Pitfalls" in said
    lesson.write_text(lesson.read_text().replace("labkit:", "other:", 1))
    assert notebooks.main([]) == 2
    lesson.unlink()
    assert notebooks.main([]) == 2


@pytest.mark.parametrize(
    ("old", "new", "say"),
    [
        ('answer="largest"', 'anwser="largest"', "unknown anwser"),
        ('check="largest" points=2', 'name="x" points=2', "points without"),
        ("    ### END SOLUTION\n\n\n# %% check", "\n\n# %% check", "has no ### BEGIN SOLUTION"),
        ("minutes: {gpu: 0.2, cpu: 0.2}", "minutes: 2", "minutes must be"),
        ("title: How heavy is a list?", "headline: x", "lacks ['title']"),
        ('answer="largest"', 'answer="largest" check="largest"', "not both"),
    ],
)
def test_a_cell_line_that_is_not_understood_is_named(lessons: Path, old: str, new: str, say: str) -> None:
    path = lessons / SAMPLE.name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=re.escape(say)):
        notebooks.master(path)


def test_the_sample_keeps_the_contract(master: Any) -> None:
    assert contract.problems(master, "00_sample") == []


def _replace(old: str, new: str) -> Callable[[Any], None]:
    def change(book: Any) -> None:
        hits = [c for c in book.cells if old in c.source]
        assert hits, old
        for c in hits:
            c.source = c.source.replace(old, new)

    return change


def _swap(book: Any) -> None:
    names = [c.id for c in book.cells]
    i, j = names.index("account-1"), names.index("negative-control-1")
    book.cells[i], book.cells[j] = book.cells[j], book.cells[i]


def _check_away(book: Any) -> None:
    book.cells.remove(cell(book, "largest-check"))


def _longer(book: Any) -> None:
    book.cells += [copy.deepcopy(cell(book, "account-1")) for _ in range(40)]
    for c in book.cells[-40:]:
        c.source = "more"


def _no_points(book: Any) -> None:
    cell(book, "largest-check").metadata.nbgrader["grade"] = False


@pytest.mark.parametrize(
    ("change", "say"),
    [
        (_replace("## Pitfalls", "## Traps"), "missing ['Pitfalls']"),
        (_replace("## Account", "## Account\n## Bonus"), "not in the contract ['Bonus']"),
        (_swap, "out of order"),
        (_replace("2 min", "soon"), "Exercise 1: says no time"),
        (_replace("medium", "so-so"), "Exercise 2: says no difficulty"),
        (_replace("<details>", "<b>"), "no hint in a folded block"),
        (_check_away, "the check of 'largest' is not right below it"),
        (_no_points, "'largest' needs points"),
        (_replace('"row_bytes", None', '"row_bytes", 4'), "must be None"),
        (_replace("lab.answer(", "print("), "'row_bytes' is never answered"),
        (_replace('lab.settle("float"', 'str("float"'), "'float' is never settled"),
        (_replace('lab.begin("00_sample"', 'lab.begin("01_sample"'), "lab.begin"),
        (_replace("lab.finish", "print"), "lab.finish is not the last call"),
        (_replace("print(sizes)", "!pip install x"), "installs a package"),
        (_replace("print(sizes)", "open('/home/me/x')"), "names somebody's folder"),
        (_replace("print(sizes)", "print(sizes"), "is not Python"),
        (_replace("print(sizes)", "import warnings"), "handles warnings"),
        (_longer, "fewer than 60"),
    ],
)
def test_the_contract_says_what_is_missing(master: Any, change: Callable[[Any], None], say: str) -> None:
    change(master)
    found = contract.problems(master, "00_sample")
    assert any(say in line for line in found), found


def test_magics_do_not_confuse_the_contract(master: Any) -> None:
    _replace("print(sizes)", "%matplotlib inline\n%%time\nprint(sizes)")(master)
    assert contract.problems(master, "00_sample") == []


@pytest.mark.slow
def test_untouched_runs_blank_and_solved_runs_right(lessons: Path, tmp_path: Path) -> None:
    from labkit import course
    from labkit.results import Ledger

    out = tmp_path / "notebooks"
    notebooks.build(lessons, out)
    assert course.run(out=tmp_path / "run", notebooks=out) == 0
    rows = [r for r in Ledger(tmp_path / "run" / "ledger.jsonl").rows() if r["kind"] == "check"]
    assert [(r["exercise"], r["status"], r["points"]) for r in rows] == [
        ("bytes_of_3000", "blank", 0), ("largest", "blank", 0), ("why_heavier", "blank", 0)
    ]  # fmt: skip
    text = (lessons / SAMPLE.name).read_text()
    (lessons / SAMPLE.name).write_text(text.replace("return budget // row(1).itemsize", "return -(-budget // 4)"))
    wrong = notebooks.solutions(lessons, tmp_path / "solved")
    assert len(wrong) == 1 and "largest: the solution scores partial" in wrong[0]  # the other two are right


def test_nbgrader_scores_the_check_cell_of_an_executed_notebook(lessons: Path, tmp_path: Path) -> None:
    """The convention end to end: what a kernel puts into the check cell's output is what nbgrader reads as points."""
    import nbformat
    from nbgrader import utils

    from labkit import executing

    book = notebooks.learner(notebooks.master(lessons / SAMPLE.name))
    cell(book, "largest").source = "def largest(budget):\n    return -(-budget // 4)"
    keep = ["largest", "largest-check"]
    book.cells = [nbformat.v4.new_code_cell("import labkit as lab", id="import"), *(cell(book, k) for k in keep)]
    path = tmp_path / "small.ipynb"
    path.write_text(notebooks.dumps(book))
    ending = executing.execute(path, tmp_path / "out.ipynb", folder=tmp_path / "work", environment={}, timeout=60)
    assert ending.status == "done"
    check = cell(nbformat.read(tmp_path / "out.ipynb", as_version=4), "largest-check")
    assert utils.determine_grade(check) == (1.0, 2.0)
    assert "does not fit whole" in check.outputs[0]["data"]["text/html"]


def test_the_course_is_in_step_and_keeps_the_contract() -> None:
    lessons = ROOT / "lessons"
    assert any(lessons.glob("*.py")), "lessons/ is empty"
    assert notebooks.drift(lessons, ROOT / "notebooks") == []
    assert notebooks.problems(lessons) == []


def test_no_solution_text_is_in_the_learners_notebooks() -> None:
    for path in sorted((ROOT / "lessons").glob("*.py")):
        regions = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", path.read_text(encoding="utf-8"), re.DOTALL)
        book = json.loads((ROOT / "notebooks" / f"{path.stem}.ipynb").read_text(encoding="utf-8"))
        answers = "\n".join(
            "".join(c["source"]) for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("solution")
        )
        for region in regions:
            for line in region.splitlines():
                assert len(line.strip()) < 8 or line.strip() not in answers, f"{path.stem}: {line.strip()}"
