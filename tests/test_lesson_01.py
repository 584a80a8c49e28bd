"""Lesson 01: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong, run

import labkit as lab
from labkit.checks import Check

LESSON = Lesson("01_baseline_oom", before=["fits"])
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solution
MiB = 2**20


@pytest.mark.parametrize("exercise", ["block_mib", "largest_batch", "cured", "why"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("276", "66 * 4", 'cured_run = "A"', "12.4 GB", "low, high = 0, 64", "gelu_new`: what does"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def medium(tokens_part: float, square_part: float, width: int = 1024, heads: int = 16, batch: int = 4) -> float:
    """MiB of ``tokens_part`` b s d + ``square_part`` b h s² + 16 b s bytes at 512 tokens."""
    seq = 512
    return (tokens_part * batch * seq * width + square_part * batch * heads * seq**2 + 16 * batch * seq) / MiB


def test_exercise_1_right() -> None:
    found = checked("block_mib", block_mib=solution("block_mib")["block_mib"])
    assert (found.status, found.points) == ("right", 1)
    assert checked("block_mib", block_mib=276.0).status == "right"


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (medium(114, 9), 0, "gelu_new"),
        (medium(50, 9), 0, "own input"),
        (medium(64, 8), 0.5, "ropout"),
        (medium(66, 8), 0.5, "inside attention"),
        (medium(64, 9), 0.5, "wo dropouts"),
        (medium(72, 12), 0.5, "true or false"),
        (medium(66, 4), 0, "more than once"),
        (medium(66, 5), 0, "three times"),
        (medium(34, 9), 0, "line of the MLP is missing"),
        (medium(98, 9), 0, "four of the five"),
        (medium(82, 9), 0, "three of the five"),
        (medium(66, 9) / 2, 0, "4 bytes"),
        (medium(66, 9, width=768, heads=12), 0, "small gpt2"),
        (medium(66, 9, batch=1), 0, "one sequence"),
        (24 * medium(66, 9), 0, "whole model"),
        (medium(66, 9) * MiB, 0, "unit"),
        (medium(66, 9) * MiB / 1e6, 0, "10⁶"),
        ("276 MiB", 0, "number"),
        (None, 0, "number"),
        (-1.0, 0, "sign"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("block_mib", block_mib=answer), points, word, "276")


# ------------------------------------------------------------------------------------------- exercise 2


def searching(search: Callable[[Callable[[int], bool]], Any]) -> Check:
    """The check's verdict on a learner's function that searches with ``fits(batch)``."""

    def largest_batch(experiment: Any, budget: Any) -> Any:
        def fits(batch: int) -> bool:
            return lab.measure(
                experiment, budget=budget, batch=batch, repeats=0, trace=False, nearest=False, record=False
            ).ok

        return search(fits)

    return checked("largest_batch", largest_batch=largest_batch)


def bisection(fits: Callable[[int], bool], low: int = 0, high: int = 64) -> tuple[int, int]:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def test_exercise_2_right() -> None:
    assert_right(checked("largest_batch", largest_batch=solution("largest_batch")["largest_batch"]), 2)


def upwards(fits: Callable[[int], bool]) -> int:
    batch = 0
    while batch < 63 and fits(batch + 1):
        batch += 1
    return batch


def doubling(fits: Callable[[int], bool]) -> int:
    batch = 1
    while batch < 63 and fits(batch):
        batch *= 2
    return batch // 2


@pytest.mark.parametrize(
    ("search", "below", "word"),
    [
        (lambda fits: bisection(fits)[0] - 1, 1, "larger batch still fits"),
        (lambda fits: bisection(fits)[1], 1, "does not fit"),
        (lambda fits: max(1, bisection(fits)[0]), 2, "does not fit"),
        (upwards, 2, "measurements"),
        (doubling, 2, "larger batch still fits"),
        (lambda fits: bisection(fits, high=32)[0], 2, "larger batch still fits"),
        (lambda fits: print(bisection(fits)[0]), 1, "return"),
        (lambda fits: 6, 1, "measures nothing"),
        (lambda fits: fits(1 / 0), 1, "ZeroDivisionError"),
    ],
    ids=[
        "one early",
        "one late",
        "never 0",
        "linear",
        "doubling",
        "half the range",
        "no return",
        "no search",
        "raises",
    ],
)
def test_exercise_2_wrong(search: Callable[..., Any], below: float, word: str) -> None:
    assert_code(searching(search), word, below=below)


def test_exercise_2_is_no_function() -> None:
    assert_wrong(checked("largest_batch", largest_batch=30))


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("cured", cured_run=solution("cured")["cured_run"]), 1)
    written = checked("why", why=solution("why")["why"])
    assert (written.status, written.points, written.manual) == ("right", 2, True)


@pytest.mark.parametrize(
    ("answer", "word"),
    [("B", "optimizer"), ("C", "sequences"), ("all", "'A', 'B', 'C'"), (["A"], "'A', 'B', 'C'"), (1, "'A', 'B', 'C'")],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("cured", cured_run=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because A is too big.", 0, "words"),
        (
            "Accumulation makes a batch smaller; that is why it helps with A and why it does not help with the others.",
            1.5,
            "B",
        ),
        (
            "In B the optimizer state and the weights are too large, whatever the batch is: sixteen bytes each.",
            1.5,
            "C",
        ),
        (
            "C is one sequence already, so it changes nothing there; A has many sequences, and those come apart.",
            1.5,
            "B",
        ),
        (
            "The optimizer likes pizza and the batch 1 is square and I do not know.",
            1,
            "B",
        ),
        (
            "The weights and the optimizer state fill B. C is one sequence whose length is squared, and it cures both.",
            1.5,
            "cure",
        ),
        (42, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    text = f"{answer} That is what I think of it." if most else answer
    assert_written(checked("why", why=text), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "In B weights and moments alone take more than the budget. In C the micro-batch already has size one, and its "
        "attention grows with the square of the length.",
        "B: the running averages fill the memory together with weights. C is a single sequence and cannot be split; "
        "its probabilities are quadratic in its tokens. It does not cure B or C.",
        "Gradients and momentum need 12 GB in B. C runs at batch 1 with s^2 probabilities, there is nothing smaller.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("why", why=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def account() -> dict[str, Any]:
    """The names that the account's cells define, without what they measure and draw."""
    names: dict[str, Any] = {"lab": lab, "torch": torch, "show": lab.show_bytes, "kept": [(0, 0, 0, 0)]}
    wanted = {"saved": ("saved_tensors", "part_of", "one_block"), "terms": ("block_bytes", "terms", "term_of")}
    for cell, functions in wanted.items():
        tree = ast.parse(cells()[cell])
        keep = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in functions]
        keep += [n for n in tree.body if isinstance(n, ast.ImportFrom)]
        exec(compile(ast.Module(keep, []), "<cell>", "exec"), names)
    names.update(N=124_439_808, L=12, d=768, h=12, V=50257, capability=(9, 0))
    return names


@pytest.mark.parametrize(("batch", "seq"), [(1, 64), (2, 256), (3, 128)])
def test_a_block_keeps_what_the_formula_says(batch: int, seq: int) -> None:
    names = account()
    lab.measure(names["one_block"], batch=batch, seq=seq, repeats=0, trace=False, card="h200")
    assert sum(row[3] for row in names["kept"]) == names["block_bytes"](batch, seq)
    if seq == 64:  # a head is 64 wide as well: q kᵀ's operands look like its result
        return
    units = {"b s d": batch * seq * 768, "b h s²": 12 * batch * seq**2, "b s": batch * seq}
    sums: dict[tuple[str, str], float] = {}
    for operator, shape, _, nbytes in names["kept"]:
        part, unit = names["part_of"](operator, shape, seq)
        sums[part, unit] = sums.get((part, unit), 0) + nbytes / units[unit]
    assert sums == {
        ("LayerNorms", "b s d"): 8,
        ("LayerNorms", "b s"): 16,
        ("products", "b s d"): 24,
        ("attention probabilities", "b h s²"): 9,
        ("dropouts", "b s d"): 2,
        ("MLP activation", "b s d"): 80,
    }
    assert names["kept"][0][0] == "NativeLayerNorm" and names["kept"][-1][0] == "NativeDropout"  # as forward goes


def test_exercise_1_is_what_a_block_of_gpt2_medium_keeps() -> None:
    names, kept = account(), []

    def block_of_medium(device: torch.device) -> Callable[[], None]:
        with device:
            model = lab.models.gpt2("gpt2-medium", n_layer=1, activation_function="gelu_pytorch_tanh")
            block = model.transformer.h[0].train()
            x = torch.randn(4, 512, 1024, requires_grad=True)
            mask = torch.zeros(4, 1, 512, 512)
        weights = {p.untyped_storage()._cdata for p in block.parameters()}

        def step() -> None:
            y = block(x, attention_mask=mask)
            y = y[0] if isinstance(y, tuple) else y
            kept[:] = names["saved_tensors"](y, weights)
            y.sum().backward()

        return step

    lab.measure(block_of_medium, repeats=0, trace=False, card="h200")
    assert sum(row[3] for row in kept) / MiB == pytest.approx(medium(66, 9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "batch", "seq", "phase", "module", "wanted"),
    [
        ("gpt2", 16, 1024, "forward", "transformer.h.2.attn", 768),
        ("gpt2-large", 1, 512, "optimizer", "", 25),
        ("gpt2", 1, 4096, "forward", "transformer.h.3.attn", 768),
    ],
)
def test_the_logs_of_exercise_3_are_real(size: str, batch: int, seq: int, phase: str, module: str, wanted: int) -> None:
    source = cells()["baseline"].replace('gpt2("gpt2"', f'gpt2("{size}"')
    names: dict[str, Any] = {"lab": lab, "torch": torch}
    run(source, names)
    told = size == "gpt2-large"  # the log of B also says what was alive
    report = lab.measure(names["baseline"], budget="8GiB", batch=batch, seq=seq, nearest=False, trace=told, card="h200")
    assert report.failure is not None
    found = (report.failure.phase, report.failure.module, report.failure.wanted_bytes)
    assert found == (phase, module, wanted * MiB)
    assert f"{wanted} MiB" in cells()["exercise-3-1"]
    if told:
        alive = next(line for line in str(report).splitlines() if "alive:" in line).split(" · input")[0]
        assert alive.strip() in cells()["exercise-3-1"]


def test_the_replay_starts_with_the_workspaces_and_ends_as_the_card_did() -> None:
    """605 and 965 MiB allocated, 966 MiB reserved: an H200 (torch 2.11) with the same budget."""
    names: dict[str, Any] = {"lab": lab, "torch": torch, "on_card": False, "capability": (9, 0), "MiB": MiB}
    run("from labkit.memory.workspaces import workspaces", names)
    for cell in ("counters", "fragmentation"):
        tree = ast.parse(cells()[cell])
        keep = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom))]
        exec(compile(ast.Module(keep, []), "<cell>", "exec"), names)
    for expandable, rounds, allocated in ((False, 9, 605), (True, 15, 965)):
        found, counters = names["rounds_until_full"]("1GiB", expandable)
        assert (found, counters[0] / MiB, counters[1] / MiB) == (rounds, allocated, 966)


def test_the_terms_add_up_to_the_peak_of_a_whole_step() -> None:
    names = account()
    run(cells()["baseline"], names)
    report = lab.measure(names["baseline"], batch=2, seq=512, card="h200")
    total = sum(names["terms"](2, 512).values())
    assert report.steady is not None
    assert report.steady.requested_bytes == pytest.approx(total, rel=0.002)
    found = dict.fromkeys(names["terms"](2, 512), 0)
    for holding in report.alive:
        found[names["term_of"](holding)] += holding.nbytes
    for term in ("weights", "optimizer state", "gradients", "blocks", "logits and loss"):
        assert found[term] == pytest.approx(names["terms"](2, 512)[term], rel=0.001), term


def test_accumulation_computes_the_same_step() -> None:
    names: dict[str, Any] = {"lab": lab, "torch": torch}
    tree = ast.parse(cells()["equivalence"])
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    exec(compile(ast.Module(functions, []), "<cell>", "exec"), names)
    for dtype in (torch.float32, torch.float64):
        loss, gradients = names["both_ways"](dtype, torch.device("cpu"))
        assert max(loss, gradients) < 100 * torch.finfo(dtype).eps
