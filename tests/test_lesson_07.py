"""Lesson 07: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong
from torch.utils.checkpoint import checkpoint

import labkit as lab
from labkit import compiling

LESSON = Lesson("07_compile", before=["clipped"], compiling=compiling)
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solution


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch._logging.set_logs(dynamo=logging.ERROR)  # type: ignore[attr-defined]


def defined(cell: str, **names: Any) -> dict[str, Any]:
    """The functions and classes of a cell."""
    return LESSON.defined(cell, math=math, device=torch.device("cpu"), **names)


EXERCISES = ["caught_up", "clipped_in_one_graph", "gains", "why_little"]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("64.4 - 0.4", "1000", "torch.where(norm", 'gains_most = "B"', "at most a tenth"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def test_exercise_1_right() -> None:
    found = checked("caught_up", caught_up=solution("caught_up")["caught_up"])
    assert (found.status, found.points) == ("right", 1)
    assert checked("caught_up", caught_up=1000).status == "right"
    assert checked("caught_up", caught_up=1005).status == "right"  # the first step counted whole


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (800, 0.5, "ecompilation"),
        (805, 0.5, "ecompilation"),
        (200, 0, "brings back"),
        (201, 0, "brings back"),
        (80 / 0.48, 0, "brings back"),
        (1250, 0, "brought something back"),
        (1, 0, "Milliseconds"),
        (160, 0, "comes back with each step"),
        (-1000, 0, "sign"),
        ("1000 steps", 0, "number"),
        (None, 0, "number"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("caught_up", caught_up=answer), points, word, "1000", "1,000")


def test_exercise_1_is_what_the_formula_of_the_lesson_says() -> None:
    pays = compiling.Payback(64.4 + 16, 0.4, 0.48)
    assert pays.steps == 1000 and pays.steps > 250  # the recompilation comes before the run has caught up
    assert compiling.Payback(64.4, 0.4, 0.48).steps > 250


# ------------------------------------------------------------------------------------------- exercise 2


def with_where(x: torch.Tensor, limit: float) -> torch.Tensor:
    norm = x.norm()
    return torch.where(norm > limit, x * (limit / norm), x)


def with_clamp(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x * torch.clamp(limit / x.norm(), max=1.0)


def with_minimum(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x * torch.minimum(limit / (x.norm() + 1e-12), torch.ones(()))


@pytest.mark.parametrize("answer", [with_where, with_clamp, with_minimum])
def test_exercise_2_right(answer: Callable[..., Any]) -> None:
    assert_right(checked("clipped_in_one_graph", clipped_in_one_graph=answer), 2)


def test_exercise_2_solution() -> None:
    answer = solution("clipped_in_one_graph")["clipped_in_one_graph"]
    assert checked("clipped_in_one_graph", clipped_in_one_graph=answer).points == 2


def as_it_was(x: torch.Tensor, limit: float) -> torch.Tensor:
    norm = x.norm()
    if norm > limit:
        x = x * (limit / norm)
    return x


def with_item(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x * min(1.0, limit / max(x.norm().item(), 1e-12))


def always(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x * (limit / x.norm())


def never(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x * 1.0


def element_by_element(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.clamp(x, -limit, limit)


def in_place(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.mul_(torch.clamp(limit / x.norm(), max=1.0))


def turned_round(x: torch.Tensor, limit: float) -> torch.Tensor:
    norm = x.norm()
    return torch.where(norm > limit, x, x * (limit / norm))


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        (as_it_was, 0, "the graph breaks"),
        (with_item, 0, "the graph breaks"),
        (always, 1.2, "below the limit"),
        (lambda x, limit: torch.where(x > limit, x * (limit / x.norm()), x), 1.6, "above the limit"),
        (never, 1, "above the limit"),
        (element_by_element, 1, "above the limit"),
        (turned_round, 0, "above the limit"),
        (in_place, 1, "leaves it as it was"),
        (lambda x, limit: print(x), 0, "`return`"),
        (lambda x, limit: x.norm(), 0, "shape"),
        (lambda x, limit: x / 0, 0, "finite"),
        (lambda x: x, 0, "TypeError"),
        (3.0, 0, "function"),
    ],
)
def test_exercise_2_wrong(answer: Any, most: float, word: str) -> None:
    assert_code(checked("clipped_in_one_graph", clipped_in_one_graph=answer), word, most=most)


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("gains", gains_most=solution("gains")["gains_most"]), 1)
    written = checked("why_little", why_little=solution("why_little")["why_little"])
    assert (written.status, written.points, written.manual) == ("right", 2, True)


@pytest.mark.parametrize(
    ("answer", "word"),
    [("A", "no time"), ("C", "host"), ("all", "'A', 'B', 'C'"), (["B"], "'A', 'B', 'C'"), (2, "'A', 'B', 'C'")],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("gains", gains_most=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because A is slow.", 0, "words"),
        ("A is mostly matrix products, which are one kernel in the library; there fusion has almost nothing to do.",
         1.5, "stops the compiler"),
        ("In C every layer calls item, so the card must wait for the host, which breaks everything that is there.",
         1.5, "A spend"),
        ("A is limited by matrix products which compiling makes twice as fast, and C breaks at item: the card waits.",
         1.4, "Who computes"),
        ("Both are memory bound, so compiling fuses nothing; C has item, and A has many products.",
         1.4, "bytes or compute"),
        ("The models are both too large for the card and I do not know what the compiler does with them in a step.",
         0.5, ""),
        (42, 0, "text"),
    ],
)  # fmt: skip
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    text = f"{answer} That is what I think of it." if most else answer
    assert_written(checked("why_little", why_little=text), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "Most of A is large GEMMs that cuBLAS runs already, so fusing the remaining 9 % changes little. In C the card "
        "is idle because of the synchronisation with the CPU in every layer.",
        "Matmuls dominate A: little left to fuse. C has data-dependent control flow, graph breaks at each layer, and "
        "the GPU waits.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("why_little", why_little=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def test_a_compiled_block_keeps_what_a_fused_gelu_keeps() -> None:
    """48 b s d bytes less than with eight operations; the account says so in prose."""
    names = defined("regional") | defined("saved")
    small_gpt2, put_away = defined("regional")["small_gpt2"], names["put_away"]
    kept = {}
    for name in ("gelu_new", "fused", "compiled"):
        block = small_gpt2(1).transformer.h[0]
        if name == "fused":
            block.mlp.act = torch.nn.GELU(approximate="tanh")
        with compiling.fresh():
            if name == "compiled":
                block.compile(backend="aot_eager_decomp_partition")
            kept[name] = sum(n for *_, n in put_away(block, torch.randn(2, 96, 64, requires_grad=True)))
    assert kept["compiled"] == kept["fused"]
    assert kept["gelu_new"] - kept["fused"] == 48 * 2 * 96 * 64
    assert 12 * 48 * 3 * 1024 * 768 == 1296 * 2**20 and "1296 MiB" in "\n".join(cells().values())


def test_the_silent_function_computes_what_the_chatty_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    names = defined("breaks")
    for x in (torch.linspace(-1, 2, 50), torch.linspace(-2, 1, 50)):
        assert torch.allclose(names["chatty"](x), names["silent"](x))
        compiling.forget()
        assert compiling.watched(torch.compile(names["silent"], backend="eager"), x).graphs == 1
        compiling.forget()
        assert len(compiling.watched(torch.compile(names["chatty"], backend="eager"), x).breaks) == 3
    compiling.forget()


def test_what_the_shapes_section_says_of_lengths() -> None:
    padded = defined("shapes")["padded"]
    assert [padded(n, 256) for n in (1, 256, 257)] == [256, 256, 512]
    lengths = [64 * i - 17 for i in range(4, 16)]
    assert len(lengths) == 12 and len({padded(n, 256) for n in lengths}) == 4


def tiny(cell: str) -> dict[str, Any]:
    """The functions of a cell with small sizes in place of the full ones."""
    source = cells()[cell].replace("768", "32").replace("1024", "16")
    keep = [n for n in ast.parse(source).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names: dict[str, Any] = {"lab": lab, "torch": torch, "half": torch.bfloat16, "checkpoint": checkpoint}
    exec(compile(ast.Module(keep, []), "<cell>", "exec"), names)
    return names


@pytest.mark.slow
def test_the_steps_that_the_card_measures_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every experiment of the full-size sections builds and steps, compiled by a backend that needs no compiler."""
    method, function, gpt2 = torch.nn.Module.compile, torch.compile, lab.models.gpt2
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: method(self, backend="aot_eager"))
    monkeypatch.setattr(torch, "compile", lambda f, **_: function(f, backend="aot_eager"))
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2}
    monkeypatch.setattr(lab.models, "gpt2", lambda name, **changes: gpt2(name, **{**changes, **sizes}))
    graphs: dict[str, int] = {}

    def stepped(name: str, experiment: Callable[..., Any], **how: Any) -> Any:
        note = compiling.FirstCall()
        result = experiment(torch.device("cpu"), note=note, **how)()
        assert note.activity is not None
        graphs[name] = note.activity.graphs
        compiling.forget()
        return result

    for how in ("eager", "blocks", "whole"):
        assert torch.isfinite(stepped(how, tiny("training")["training"], how=how))
    assert graphs == {"eager": 0, "blocks": 1, "whole": 1}
    graphs.clear()
    for how in ("eager", "blocks", "whole"):
        stepped(how, tiny("checkpointing")["twice"], how=how)
    assert graphs == {"eager": 0, "blocks": 2, "whole": 1}  # blocks: a layer's input without and with a gradient
    graphs.clear()
    for mode in ("eager", "default"):
        stepped(mode, tiny("modes")["mlp"], mode=mode, batch=1, seq=8)
    assert graphs == {"eager": 0, "default": 1}


def test_another_activation_is_found_by_the_comparison() -> None:
    """What must fail does: SiLU is no rounding of GELU."""
    names = defined("regional") | defined("equivalence")
    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(0))

    def step(change: Callable[[Any], Any] = lambda model: model) -> Any:
        return names["loss_and_gradient"](change(names["small_gpt2"](1)), tokens)

    def other(model: Any) -> Any:
        model.transformer.h[0].mlp.act = torch.nn.SiLU()
        return model

    truth = step(lambda model: model.double())
    tolerance = 100 * torch.finfo(torch.float32).eps
    assert max(names["off"](step(), truth)) < tolerance < max(names["off"](step(other), truth))
