"""Which given statements an answer needs, and that plain data survive the pipe."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import pytest
from grading_samples import lesson

from labkit.grading import slicing, wire
from labkit.grading.slicing import Cell


def cells(*sources: str, role: str = "given") -> list[Cell]:
    return [Cell(f"c{n}", source, role) for n, source in enumerate(sources)]


def kept(sheet: list[Cell], *wanted: str) -> list[tuple[str, tuple[int, ...] | None]]:
    return [(p.cell.id, p.keep) for p in slicing.before(sheet, len(sheet), wanted)]


def test_only_the_statements_that_define_a_name_are_needed() -> None:
    sheet = cells("import math\nslow = math.factorial(9)\ndef area(r):\n    return math.pi * r * r", "print(slow)")
    assert kept(sheet, "area") == [("c0", (0, 2))]
    assert kept(sheet, "slow") == [("c0", (0, 1))]
    assert kept(sheet, "nothing") == []


def test_a_function_needs_what_its_body_names_wherever_that_stands() -> None:
    sheet = cells("def f():\n    return LATER", "LATER = 3", "LATER = 4")
    assert kept(sheet, "f") == [("c0", (0,)), ("c2", (0,))], "the last binding before the answer counts"


def test_what_runs_at_once_needs_the_binding_above_it() -> None:
    sheet = cells("x = 1", "y = x + 1", "x = 5")
    assert kept(sheet, "y") == [("c0", (0,)), ("c1", (0,))]


def test_changes_from_inside_belong_to_a_name() -> None:
    sheet = cells("table = {}", "table['a'] = 1", "other = 2", "if other:\n    table = {}")
    assert kept(sheet, "table") == [("c0", (0,)), ("c1", (0,)), ("c2", (0,)), ("c3", (0,))]


def test_comprehensions_and_classes_look_names_up_at_once() -> None:
    sheet = cells("n = 3", "rows = [n * i for i in range(2)]", "class K:\n    size = n", "n = 9")
    assert kept(sheet, "rows", "K") == [("c0", (0,)), ("c1", (0,)), ("c2", (0,))]


def test_checks_and_cells_that_are_no_python_are_left_out() -> None:
    sheet = [Cell("a", "x = 1", "check"), Cell("b", "x = (", "own"), Cell("c", "%time\nx = 2", "given")]
    assert kept(sheet, "x") == [("c", None)]
    assert [p.cell.id for p in slicing.everything(sheet, 3)] == ["b", "c"]


def test_names_of_a_cell_and_of_a_probe() -> None:
    assert slicing.needs("import a\nb = a.x + c\ndef f():\n    return d + b") == {"c", "d"}
    assert slicing.binds("a = 1\nfor i in b: c = i") == {"a", "i", "c"}
    assert slicing.binds("a = (") == set()
    assert slicing.keys_of("lesson['one']; lesson.get('two'); other['three']", "lesson") == {"one", "two"}


def test_what_is_imported_is_what_the_needed_names_come_from() -> None:
    sheet = cells(
        "import math, json\nfrom labkit import bus\nimport torch.nn as nn", "def f(): return math.pi, bus, nn"
    )
    assert slicing.imports(slicing.before(sheet, 2, {"f"})) == {"math", "json", "labkit", "labkit.bus", "torch.nn"}
    assert slicing.imports(slicing.before(sheet, 2, {"nn"})) == {"torch.nn"}


def test_an_exercise_of_a_real_lesson_needs_few_cells_and_no_measurement() -> None:
    sheet = lesson("01_baseline_oom").cells
    at = next(i for i, c in enumerate(sheet) if c.id == "largest_batch")
    source = "".join(p.cell.source.split("\n")[0] for p in slicing.before(sheet, at, {"fits", "largest_batch"}))
    pieces = slicing.before(sheet, at, {"fits"})
    assert 1 <= len(pieces) < 5, source
    assert len(slicing.everything(sheet, at)) > 15


@pytest.mark.parametrize(
    "value", [None, True, 3, -(10**30), 0.1, math.inf, "text", ..., (1, [2, (3,)]), {1: "a", (2, 3): {"t": None}}, []]
)
def test_plain_data_survive_the_pipe(value: Any) -> None:
    assert wire.decode(wire.encode(value)) == value
    assert type(wire.decode(wire.encode(value))) is type(value)


@pytest.mark.parametrize(
    "forged", [{"x": 1}, {"t": 3}, {"d": [[[1], 2]]}, {"f": "no"}, {"i": "zz"}, {}, {"t": 1, "d": 2}]
)
def test_what_no_encoder_makes_is_refused(forged: Any) -> None:
    with pytest.raises(ValueError):
        wire.decode(forged)


def test_a_process_is_read_with_a_deadline_and_a_cap() -> None:
    quiet = wire.Process([sys.executable, "-c", "import time; time.sleep(60)"])
    started = time.monotonic()
    with pytest.raises(wire.Late):
        quiet.receive(time.monotonic() + 0.2)
    quiet.kill()
    assert time.monotonic() - started < 20 and not quiet.alive
    loud = wire.Process([sys.executable, "-c", "while True: print('x' * 1000, end='')"])
    with pytest.raises(wire.TooMuch):
        loud.receive(time.monotonic() + 30, cap=10_000)
    loud.kill()
    gone = wire.Process([sys.executable, "-c", "import sys; print('no json'); sys.exit('why')"])
    with pytest.raises(wire.Gone, match="why"):
        gone.receive(time.monotonic() + 30)
    gone.kill()
