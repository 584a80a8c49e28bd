"""What keeps an answer from deciding its own score, tried without a sandbox: the protocol, the filter, the caps.

The same in sandboxes, and what only walls can keep out: test_grading_attacks.py and test_grading_walls.py.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from grading_samples import NAME, changed, hand_in, lesson, solved

from labkit.grading import (
    cgroups,
    channel,
    hidden,
    matching,
    running,
    sandbox,
    seccomp,
    slicing,
    sources,
    submissions,
    wire,
)
from labkit.grading.runner import Outcome, Runner, plain_launch
from labkit.grading.slicing import Cell, Piece
from labkit.units import UserError


class Counted(hidden.Exercise):
    """A number to be found with few questions."""

    name = "search"

    def cases(self, random: Any) -> Iterator[hidden.Case]:
        for number in (3, 5):
            yield hidden.case({"mark": f"inside-{number}", "outside": {"number": number, "mark": f"outside-{number}"}})

    @staticmethod
    def outside(given: Any) -> Any:
        """The number, and how often it was asked for."""

        class Number:
            def __init__(self) -> None:
                self.asked = 0

            def larger(self, than: int) -> bool:
                self.asked += 1
                return bool(given["outside"]["number"] > than)

            def seen(self) -> Any:
                return self.asked

        return Number()

    @staticmethod
    def probe(lesson: dict[str, Any], given: Any, outside: Any) -> Any:
        """What the answer finds."""
        return lesson["search"](outside.larger)

    def judge(self, given: Any, result: Any) -> bool | str:
        return (result["back"] == given["outside"]["number"] and 0 < result["seen"] < 9) or "wrong"


TEST = Counted()
HONEST = "def search(larger):\n    return next(n for n in range(9) if not larger(n))"
CHANNEL = """
import gc
(channel,) = [o for o in gc.get_objects() if type(o).__name__ == "Channel"]
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(plain_launch(tmp_path_factory.mktemp("answers")), {"preload": []})
    yield made
    made.close()


def tried(runner: Runner, source: str, outside: str | None = None, watched: bool = False) -> Outcome:
    """A code exercise answered with `source`."""
    return runner.run({
        "before": [], "answer": running.to_message([Piece(Cell("search", source, "answer"))])[0], "variable": "search",
        "seconds": 20, "probe": hidden.probe_source(Counted), "outside": outside or hidden.outside_source(Counted),
        "cases": [wire.encode(case.given) for case in TEST.cases(None)], "watched": watched,
    })  # fmt: skip


def value(runner: Runner, source: str, before: str = "") -> Any:
    """What `source`, run after `before`, leaves in the variable ``x``."""
    own = [Piece(Cell("own-1", before, "own"))] if before else []
    (answer,) = running.to_message([Piece(Cell("x", source, "answer"))])
    outcome = runner.run({"before": running.to_message(own), "answer": answer, "variable": "x", "seconds": 20})
    assert [m["kind"] for m in outcome.values] == ["value"], (outcome.values, outcome.tampered, outcome.reason)
    return wire.decode(outcome.values[0]["value"])


def judged(outcome: Outcome) -> list[bool]:
    """Whether each case is right, as the judge sees it."""
    cases = list(TEST.cases(None))
    results = [m for m in outcome.values if m["kind"] == "result"]
    return [TEST.judge(c.given, wire.decode(m["value"])) is True for c, m in zip(cases, results, strict=False)]


def test_what_is_outside_is_asked_and_counted(runner: Runner) -> None:
    outcome = tried(runner, HONEST)
    assert judged(outcome) == [True, True] and not outcome.tampered
    assert [wire.decode(m["value"]) for m in outcome.values] == [{"back": 3, "seen": 4}, {"back": 5, "seen": 6}]


@pytest.mark.slow
def test_an_answers_process_holds_neither_other_cases_nor_what_stands_outside(runner: Runner) -> None:
    """Every object there is, and all that it refers to, is searched for the marks of the cases."""
    look = """
import gc
def search(larger):
    found, seen, queue = set(), set(), gc.get_objects()
    while queue:
        one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) in (str, bytes):
            text = one if type(one) is str else one.decode("latin-1")
            found |= {m + "side-" + n for m in ("in", "out") for n in "35" if m + "side-" + n in text}
        else:
            queue += gc.get_referents(one)
    larger(1)
    return sorted(found)
"""
    outcome = tried(runner, look)
    assert [wire.decode(m["value"])["back"] for m in outcome.values] == [["inside-3"], ["inside-5"]]


def test_a_forged_result_is_no_more_than_data(runner: Runner) -> None:
    forged = CHANNEL + (
        'channel.say("ready")\n'
        'for guess in (3, 5):\n    channel.hear()\n    channel.say("result", value=guess, shown="")\n'
        'channel.say("end")\nimport os\nos._exit(0)'
    )
    outcome = tried(runner, forged)
    assert len(outcome.values) == 2 and judged(outcome) == [False, False], "who asks nothing has seen nothing"
    late = tried(runner, CHANNEL + 'channel.say("ready")\nchannel.say("ready")\nimport time\ntime.sleep(9)')
    assert late.tampered[-1:] == ["sends something else than an answer"] and judged(late) == []


@pytest.mark.parametrize(
    "sent",
    [
        'channel.say("failed")', 'channel.say("value", shown="1")', 'channel.say("exit", signal=0, strays=False)',
        'channel._end.sendall(b"[1]\\n")', 'channel.say("result", value=1, shown="")', 'channel.say(["end"])',
        'channel.say("ask", name="larger", arguments=[1], number=1)', 'channel.say("note", text=[1])',
        'channel._end.sendall(b"{" * 100_000 + b"\\n")', 'channel.say("broken", text="ours")',
    ],
)  # fmt: skip
def test_a_message_that_no_answer_sends_costs_its_exercise_alone(runner: Runner, sent: str) -> None:
    outcome = runner.run({
        "before": [], "answer": running.to_message([Piece(Cell("x", CHANNEL + sent + "\nx = 1", "answer"))])[0],
        "variable": "x", "seconds": 20,
    })  # fmt: skip
    assert outcome.tampered == ["sends something else than an answer"]
    assert value(runner, "x = 2") == 2, "the next exercise goes on"


def test_only_named_functions_outside_can_be_called(runner: Runner) -> None:
    for name in ("seen", "__init__", "_private", "asked"):
        source = HONEST.replace("return", f"channel.ask({name!r}, ())\n    return")
        outcome = tried(runner, CHANNEL + source)
        assert "sends something else than an answer" in outcome.tampered and judged(outcome) == [], name


def test_what_a_watched_answer_holds_is_weighed_and_how_long_it_waits_is_known(runner: Runner) -> None:
    taken = HONEST.replace("return", "import time\n    kept = b'x' * 2**26\n    time.sleep(0.2)\n    return")
    outside = str(hidden.outside_source(Counted)).replace("given: Any)", "given: Any, waited: Any)")
    outside = outside.replace("return self.asked", "return [self.asked, waited() > 0, waited() < 600]")
    weighed = tried(runner, taken, outside, watched=True)
    plain = tried(runner, HONEST, watched=True)
    for found, least, most in ((weighed, 2**26, 2**28), (plain, 0, 2**26)):
        (first, _) = [wire.decode(m["value"]) for m in found.values]
        assert first["back"] == 3 and least <= first["held"] < most
    assert wire.decode(weighed.values[0]["value"])["seen"] == [4, True, True]
    assert "held" not in wire.decode(tried(runner, HONEST).values[0]["value"])


def test_what_is_raised_outside_reaches_the_answer_and_its_time_is_limited(runner: Runner) -> None:
    raised = "def search(larger):\n    try:\n        larger('a')\n    except TypeError:\n        return 'raised'"
    assert [wire.decode(m["value"])["back"] for m in tried(runner, raised).values] == ["raised"] * 2
    slow = tried(runner, HONEST.replace("return", "import time, signal\n    signal.raise_signal(14)\n    return"))
    assert [m["error"] for m in slow.values] == ["timeout"], "after a time limit the next case is not tried"


@pytest.mark.parametrize("change", [("given: Any)", "given, more, most)"), ("return self.asked", "return 1 / 0")])
def test_a_hidden_test_that_fails_says_so(runner: Runner, change: tuple[str, str]) -> None:
    outcome = tried(runner, HONEST, str(hidden.outside_source(Counted)).replace(*change))
    assert outcome.ending == "crashed" and "stands outside fails" in outcome.reason and not outcome.tampered


def test_a_call_that_a_time_limit_breaks_off_does_not_answer_the_next_one() -> None:
    import socket

    ours, theirs = socket.socketpair()
    asking = channel.Channel(ours)
    theirs.sendall(b'{"answers": 0, "value": "old"}\n{"answers": 1, "value": "new"}\n')
    assert asking.ask("larger", (1,)) == "new"
    ours.close()
    theirs.close()


# ---------------------------------------------------------------------------------- what runs in Jupyter


RUNS = {
    "an operator first": "x = (7\n% 4)",
    "a text": 'x = """\n% one\n! two"""',
    "await": "import asyncio\nx = await asyncio.sleep(0, 3)",
    "async": "import asyncio\nasync with asyncio.Lock():\n    x = [await asyncio.sleep(0, 1) for _ in 'ab']",
    "help": "x = 1\nx?\n?x",
    "magics": "%matplotlib inline\nfiles = !ls\nx = 2 if files == [] else 1\n!pip install nothing",
    "timed": "%time x = 5",
    "a timed cell": "%%time\nx = 6",
    "a mark of order": "\ufeffx = 7",
    "display": "x = 1\ndisplay(x)\nget_ipython().run_line_magic('matplotlib', 'inline')",
    "indented": "  x = 1\n  y = 2",
}  # fmt: skip


def test_what_runs_in_a_notebook_runs_here(runner: Runner) -> None:
    found = {name: value(runner, source) for name, source in RUNS.items()}
    assert found == {
        "an operator first": 3, "a text": "\n% one\n! two", "await": 3, "async": [1, 1], "help": 1, "magics": 2,
        "timed": 5, "a timed cell": 6, "a mark of order": 7, "display": 1, "indented": 1,
    }  # fmt: skip


@pytest.mark.parametrize("source", RUNS.values())
def test_its_names_are_seen_before_it_runs(source: str) -> None:
    assert "x" in slicing.binds(source)
    sheet = [Cell("own-1", source, "own"), Cell("y", "y = x", "answer")]
    assert [p.cell.id for p in slicing.before(sheet, 1, {"x"})] == ["own-1"]


def test_line_numbers_stay_and_what_is_no_python_does_too() -> None:
    assert sources.python("%%time\nx = 1\ny = 2").split("\n") == ["", "x = 1", "y = 2"]
    assert sources.python("x = (").rstrip() == "x = (" and sources.outline("x = (") == ("x = (", False)
    shell = "%%bash\nx=1"
    assert sources.python(shell).startswith("get_ipython().run_cell_magic") and not slicing.binds(shell)


# ---------------------------------------------------------------------------------- what costs time


def test_following_names_takes_a_time_that_grows_with_the_length_only() -> None:
    """Every statement of this chain may change the name: looking above each of them again was quadratic."""
    sheet = [Cell("own-1", "a = 0\n" + "if a: a = a\n" * (matching.MOST_LINES - 20), "own")]
    slicing.binds(sheet[0].source)
    began = time.process_time()
    (piece,) = slicing.before(sheet, 1, {"a"})
    assert time.process_time() - began < 1 and len(piece.keep or ()) > 4900


@pytest.mark.parametrize(
    ("source", "say"),
    [("if a: a = a\n" * 100_000, "lines of code"), ("x = [" + "1," * 300_000 + "]", "characters of code"),
     ("a;" * 20_000, "lines of code")],
)  # fmt: skip
def test_a_hand_in_that_is_too_long_is_unreadable_at_once(tmp_path: Path, source: str, say: str) -> None:
    made = changed(solved(), lambda n: n.cells.append(nbformat.v4.new_code_cell(source, id="mine")))
    file = hand_in(tmp_path, "eve", made)
    entry = submissions.Entry("eve", file, f"eve/{file.name}")
    began = time.process_time()
    opened = submissions.open_one(entry, {NAME: lesson()})
    assert say in opened.unreadable and time.process_time() - began < 5


def test_many_cells_are_laid_beside_ours_in_little_time() -> None:
    def add(made: Any) -> None:
        made.cells += [nbformat.v4.new_code_cell(f"x = {i}", id=f"mine-{i}") for i in range(990)]

    made = changed(solved(), add)
    began = time.process_time()
    found = matching.match(lesson(), made)
    assert time.process_time() - began < 3
    assert len([role for role in found.roles.values() if role == "own"]) == 990
    assert not found.tampered and nbformat.validate(found.notebook) is None


# ---------------------------------------------------------------------------------- walls on paper


def decided(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What a filter says of a call: the error that it gives, 0 where it lets it through."""
    lines = list(struct.iter_unpack("<HBBI", program))
    memory = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    at, register = 0, 0
    while True:
        code, yes, no, k = lines[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("<I", memory, k)
        elif code == 0x54:
            register &= k
        elif code == 0x06:
            return k & 0xFFFF if k & 0x00050000 == 0x00050000 and k != 0x7FFF0000 else 0
        else:
            holds = {0x15: register == k, 0x35: register >= k, 0x45: bool(register & k)}[code]
            at += yes if holds else no


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_the_filter_refuses_what_would_undo_the_walls(machine: str, arch: int) -> None:
    calls = seccomp._CALLS[machine]
    bare, with_card = (seccomp.program(card=card, machine=machine) for card in (False, True))

    def says(name: str, *arguments: int, program: bytes = bare) -> int:
        return decided(program, arch, calls[name], *arguments)

    new_user, thread = 0x10000000, 0x3D0F00
    assert says("unshare", new_user) == says("clone", new_user | 17) == says("mount") == errno.EPERM
    assert says("clone", thread) == says("clone", 17) == 0 and says("clone3") == errno.ENOSYS
    assert says("memfd_create") == says("shmget") == says("ptrace") == says("process_vm_writev") == errno.EPERM
    assert says("mmap", 0, 4096, 3, 0x21) == errno.ENOMEM and says("mmap", 0, 4096, 3, 0x22) == 0
    assert says("mmap", 0, 4096, 3, 0x01) == 0, "a shared file is a file"
    assert decided(bare, 0x40000003, calls["mmap"]) == errno.EPERM, "calls of another kind of program"
    assert decided(bare, arch, 0) == 0
    assert says("memfd_create", program=with_card) == says("mmap", 0, 4096, 3, 0x21, program=with_card) == 0
    assert says("unshare", new_user, program=with_card) == says("shmget", program=with_card) == errno.EPERM


def test_bubblewraps_command_line_says_nothing() -> None:
    if sandbox.why_not() is None:
        with sandbox._handed(["--setenv", "SECRET", "word"]) as (command, pipes):
            assert len(pipes) == 4 and command[-4:] == ["--args", str(pipes[2]), "--seccomp", str(pipes[3])]
            assert "SECRET" not in command and "word" not in command


def test_the_graders_folders_are_not_seen_below_what_is_shown(tmp_path: Path) -> None:
    shown, secret, other = tmp_path / "usr", tmp_path / "usr" / "src" / "course", tmp_path / "other"
    for folder in (secret, other):
        folder.mkdir(parents=True)
    found = sandbox._masks([str(shown)], [secret, other, shown, tmp_path / "usr" / "not-there"])
    assert found == ["--tmpfs", str(secret), "--remount-ro", str(secret)]


def test_a_control_group_is_made_where_the_tree_is_handed_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, above = tmp_path / "own", tmp_path / "user.slice" / "app.slice"
    (above / "terminal.scope").mkdir(parents=True)
    (above / "cgroup.subtree_control").write_text("cpu memory pids\n")
    own.write_text("0::/user.slice/app.slice/terminal.scope\n")
    left, kept = above / "labkit-99999999-ab", above / f"labkit-{os.getpid()}-ab"
    left.mkdir()
    kept.mkdir()
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", own)
    group = cgroups.make(2**30)
    assert group is not None and group.folder.parent == above, "beside our own: no group may hold both"
    assert kept.exists() and not left.exists(), "what a killed grader left behind"
    assert (group.folder / "memory.max").read_text() == str(2**30)
    assert (group.folder / "memory.swap.max").read_text() == "0"
    (group.folder / "memory.events").write_text("low 0\noom_kill 0\n")
    assert not group.killed()
    (group.folder / "memory.events").write_text("low 0\noom_kill 3\n")
    assert group.killed()
    started = subprocess.run(group.command(["/bin/echo", "a word"]), capture_output=True, text=True, check=True)
    assert started.stdout == "a word\n" and (group.folder / "cgroup.procs").read_text().strip().isdigit()
    closed = cgroups.Group(tmp_path / "nowhere", "memory.max")
    ran = subprocess.run(closed.command(["/bin/echo", "a word"]), capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("a word\n", ""), "a group that lets nobody in keeps nothing from starting"
    (above / "cgroup.subtree_control").write_text("cpu\n")
    assert cgroups.make(2**30) is None, "memory is not counted there"
    (tmp_path / "memory" / "job").mkdir(parents=True)
    own.write_text("4:memory:/job\n0::/\n")
    older = cgroups.make(2**30)
    assert older is not None and older.folder.parent == tmp_path / "memory" / "job"
    assert (older.folder / "memory.limit_in_bytes").read_text() == str(2**30)


def test_no_sandbox_on_a_processor_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: name)
    monkeypatch.setattr(seccomp, "known", lambda: False)
    with pytest.raises(UserError, match="no processor of the kind"):
        sandbox.require()
