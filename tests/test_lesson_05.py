"""Lesson 05: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_right, assert_written, assert_wrong

import labkit as lab
from labkit import offload

LESSON = Lesson("05_offload")
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solution
MiB = 2**20


def defined(*cell_ids: str) -> dict[str, Any]:
    """The functions, classes and tables that cells define."""
    from torch.autograd.graph import save_on_cpu

    names = {"offload": offload, "save_on_cpu": save_on_cpu, "d": 768, "L": 12, "V": 50257, "s": 1024}
    kinds = (ast.FunctionDef, ast.ClassDef)
    return LESSON.defined(
        *cell_ids,
        keep=lambda node: isinstance(node, kinds) or (isinstance(node, ast.Assign) and _is_table(node)),
        on_card=False,
        BATCH=1,
        **names,
    )


def _is_table(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id in ("KINDS", "SMALL", "fine", "carriers")


def peak(experiment: Callable[..., Any], **sizes: Any) -> int:
    report = lab.measure(
        experiment, card="h200", repeats=0, trace=False, nearest=False, record=False, stateless=True, **sizes
    )
    assert report.steady is not None
    return report.steady.requested_bytes


@pytest.mark.parametrize("exercise", ["bus_ms", "halves", "cured", "why"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("249", "1557.6e6", 'cured_run = "B"', "tensor.to(torch.bfloat16), torch", "One direction only"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1

PARAMETERS, RATE = 1557.6e6, 25e9


def test_exercise_1_right() -> None:
    found = checked("bus_ms", bus_ms=solution("bus_ms")["bus_ms"])
    assert (found.status, found.points) == ("right", 1)
    assert checked("bus_ms", bus_ms=249).status == "right"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (2 * PARAMETERS / RATE * 1000, "One direction"),
        (2 * 4 * PARAMETERS / RATE * 1000, "4 bytes"),
        (2 * 2 * PARAMETERS / RATE, "seconds"),
        (16 * PARAMETERS / RATE * 1000, "stays on the host"),
        (8 * 4 * PARAMETERS / RATE * 1000, "gigabytes"),
        (2 * 2 * 124.4e6 / RATE * 1000, "small gpt2"),
        (0, "small"),
        ("249 ms", "number"),
        (None, "number"),
    ],
)
def test_exercise_1_wrong(answer: Any, word: str) -> None:
    found = checked("bus_ms", bus_ms=answer)
    assert (found.status, found.points) == ("wrong", 0)
    assert word in found.message, found.message
    assert "249" not in found.message.replace(str(answer), "")


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    names = solution("halves")
    assert_right(checked("halves", pack=names["pack"], unpack=names["unpack"]), 2)


def test_exercise_2_takes_other_ways_to_write_it() -> None:
    def pack(tensor: torch.Tensor) -> Any:
        return {"small": tensor.bfloat16()} if tensor.dtype is torch.float32 else tensor

    def unpack(kept: Any) -> torch.Tensor:
        return kept["small"].float() if isinstance(kept, dict) else kept

    assert_right(checked("halves", pack=pack, unpack=unpack), 2)


@pytest.mark.parametrize(
    ("pack", "unpack", "below", "word"),
    [
        (lambda t: t, lambda k: k, 2, "bytes are kept"),
        (lambda t: t.bfloat16(), lambda k: k, 1, "comes back"),
        (lambda t: t.bfloat16(), lambda k: k.float(), 2, "comes back"),
        (lambda t: (t.half(), t.dtype), lambda k: k[0].to(k[1]), 2, "range"),
        (lambda t: (t.bfloat16(), t.dtype), lambda k: None, 1, "return"),
        (lambda t: (t.bfloat16(), t), lambda k: k[1], 2, "bytes are kept"),
        (lambda t: (t.bfloat16().flatten(), t.dtype), lambda k: k[0].to(k[1]), 1, "shape"),
        (lambda t: t.shape, lambda k: torch.zeros(k), 1, "no tensor"),
        (lambda t: (t.bfloat16() * 2, t.dtype), lambda k: k[0].to(k[1]), 1, "further off"),
        (
            lambda t: ((t / t.abs().max() * 127).round().to(torch.int8), t.abs().max() / 127, t.dtype),
            lambda k: (k[0] * k[1]).to(k[2]),
            1.1,
            "further off",
        ),
        (lambda t: t / 0 and 1 // 0, lambda k: k, 1, "raises"),
    ],
    ids=[
        "nothing",
        "no way back",
        "all float",
        "float16",
        "no return",
        "both kept",
        "flat",
        "none",
        "doubled",
        "int8",
        "raises",
    ],
)
def test_exercise_2_wrong(pack: Any, unpack: Any, below: float, word: str) -> None:
    assert_code(checked("halves", pack=pack, unpack=unpack), word, below=below)


def test_exercise_2_is_what_the_hooks_call() -> None:
    names = solution("halves")
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(names["pack"], names["unpack"]):
        y = x.exp().sum()
    y.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.detach().exp(), rtol=2**-8)
    assert not torch.equal(x.grad, x.detach().exp())


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("cured", cured_run=solution("cured")["cured_run"]), 1)
    written = checked("why", why=solution("why")["why"])
    assert (written.status, written.points, written.manual) == ("right", 2, True), written.message


@pytest.mark.parametrize(("answer", "word"), [("A", "momentum"), ("C", "LoRA"), ("all", "'A', 'B', 'C'"), (2, "'A'")])
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("cured", cured_run=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because B is large.", 0, "words"),
        (
            "In B the state of AdamW is larger than the whole card, and on the host it has room, so the step can run.",
            1,
            "momentum",
        ),
        (
            "SGD without momentum remembers nothing, so A gains nothing from it; with B it is not so, as I have said.",
            1.5,
            "LoRA",
        ),
        (
            "SGD has no state and LoRA trains few parameters, whose state is small; activations move, so "
            "it cures all of them in the end.",
            1.5,
            "cure",
        ),
        (
            "I do not know what is in there but the activations of the batch are certainly of some importance to it.",
            1,
            "momentum",
        ),
        (42, 0, "text"),
    ],
)  # fmt: skip
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    assert_written(checked("why", why=answer), most, word)


def test_exercise_3_takes_other_words_for_it() -> None:
    found = checked(
        "why",
        why="A has nothing to offload: plain SGD is stateless, its 16 sequences of activations are the problem. In C "
        "only the adapter is trained, its moments are tiny; again the activations of the batch dominate.",
    )
    assert (found.status, found.points) == ("right", 2), found.message


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def test_a_block_hands_over_its_activations_and_more() -> None:
    names = defined("counted")
    names["packed"] = packed = []
    from torch.autograd.graph import saved_tensors_hooks

    names["saved_tensors_hooks"] = saved_tensors_hooks
    lab.measure(names["one_block"], card="h200", repeats=0, trace=False, record=False)
    weights = sum(nbytes for kind, *_, nbytes in packed if kind == "weights")
    storages = {number: nbytes for kind, number, nbytes, _ in packed if kind == "activations"}
    assert weights == 4 * 12 * 768**2 + 4 * 4 * 768  # the matrices, and what two LayerNorms have
    assert sum(storages.values()) == pytest.approx(114 * 1024 * 768, rel=2e-3)
    assert sum(nbytes for *_, nbytes in packed) > sum(storages.values()) + weights


def test_prefetching_saves_what_the_blocks_keep_but_the_window() -> None:
    names = defined("keeping")
    sizes = {"seq": 512, "batch": 2}
    kept, away = (peak(names["keeping"], kind=kind, **sizes) for kind in ("on the card", "prefetching"))
    window = 128 * MiB
    assert 12 * 114 * 1024 * 768 - window - 80 * MiB < kept - away < 12 * 114 * 1024 * 768 - window + 80 * MiB
    half = peak(names["keeping"], kind="bfloat16", **sizes)
    assert kept - half == pytest.approx(12 * 114 * 1024 * 768 / 2, rel=0.1)


def test_copies_that_may_wait_are_gone_before_the_loss() -> None:
    names = defined("keeping")
    sizes = {"seq": 1024, "batch": 1}
    kept = peak(names["keeping"], **sizes)
    away = peak(names["keeping"], kind="prefetching", blocks=4, patient=True, **sizes)
    assert kept - away == pytest.approx(4 * 114 * 1024 * 768, rel=0.1)


@pytest.mark.parametrize(("tied", "least"), [(True, 11.5), (False, 15.9)])
def test_an_embedding_on_the_host_saves_its_training_state_where_the_optimizer_makes_the_peak(
    tied: bool, least: float
) -> None:
    names = defined("embedding")
    sizes = {"tied": tied, "layers": 2, "seq": 64}
    saved = peak(names["with_embedding"], **sizes) - peak(names["with_embedding"], host=True, **sizes)
    assert least < saved / (50257 * 768) < 17


def test_a_host_embedding_computes_what_the_card_would() -> None:
    names = defined("embedding")
    torch.manual_seed(0)
    there = names["OnHost"](50, 8)
    head = names["Borrowed"](there.table)
    tokens = torch.randint(0, 50, (2, 5))
    rows = there(tokens)
    assert torch.equal(rows, there.table.weight[tokens])
    assert torch.equal(head(rows), rows @ there.table.weight.T)
    assert list(head.parameters()) == []
    head(rows).sum().backward()
    assert there.table.weight.grad is not None  # through the lookup and through the head


@pytest.mark.slow
def test_gpt2_medium_needs_the_host_in_6_gib() -> None:
    names = defined("training")
    options = {"card": "h200", "repeats": 0, "trace": False, "nearest": False, "record": False, "stateless": True}
    sizes = {"budget": "6GiB", "size": "gpt2-medium", "batch": 1, "seq": 512}
    plain = lab.measure(names["training"], **sizes, **options)
    away = lab.measure(names["training"], on_host="state and gradients", **sizes, **options)
    assert plain.failure is not None and plain.failure.phase == "optimizer"
    assert away.ok and away.peak_bytes is not None
    formula = 4 * 354_823_168 + 24 * 114 * 512 * 1024 + 3 * 4 * 512 * 50257
    assert away.peak_bytes == pytest.approx(formula, rel=0.05)


def test_the_log_of_exercise_3_is_a_case_where_state_is_half() -> None:
    assert 16 * 774_030_080 > 8 * 2**30 > 4 * 774_030_080  # B does not fit, its weights do


def test_compressed_gradients_stay_within_the_tolerance_of_the_lesson() -> None:
    names = defined("keeping", "zero", "equivalence")
    _, wanted = names["small_gradients"](lambda model: None)
    for kind, most in {"save_on_cpu": 0, "prefetching": 0, "bfloat16": 0.01, "float16": 0.01, "int8": 0.02}.items():
        _, found = names["small_gradients"](names["carriers"][kind])
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
        assert off <= most, (kind, off)
