"""Lesson 04: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong, run

import labkit as lab
from labkit import quantising

LESSON = Lesson("04_eight_bit")
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solution
GiB = 2**30
LAYER = 1024 * 4096 + 4096


def functions(cell: str, names: dict[str, Any]) -> dict[str, Any]:
    """The functions and classes of a cell, and what it imports by name."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.ImportFrom)
    return LESSON.defined(cell, keep=lambda node: isinstance(node, kinds), **names)


@pytest.mark.parametrize("exercise", ["state_kib", "int8_rows", "cured", "why"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("8328", "1024 * 4096 + 4096", 'cured_run = "A"', "5.8 GiB more", "torch.where(scales > 0"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def test_exercise_1_right() -> None:
    assert checked("state_kib", state_kib=solution("state_kib")["state_kib"]).points == 1
    really = sum(n for part, n in quantising.adam_state_bytes([1024 * 4096, 4096]).items() if part != "tables")
    assert checked("state_kib", state_kib=really / 1024).status == "right"


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (2 * LAYER / 1024, 0.5, "scales are missing"),
        ((1024 * 4096 * (2 + 8 / 256) + 8 * 4096) / 1024, 0.5, "32-bit states for the bias"),
        (1024 * 4096 * (2 + 8 / 256) / 1024, 0.5, "bias is missing"),
        (LAYER * (2 + 4 / 256) / 1024, 0.5, "scales of its own"),
        ((1024 * 4096 * 2 + 8 * 4096) / 1024, 0, "Two things"),
        (LAYER * (1 + 4 / 256) / 1024, 0, "one moment"),
        (LAYER / 1024, 0, "one moment, without"),
        (8 * LAYER / 1024, 0, "32-bit states"),
        (LAYER * (2 + 8 / 64) / 1024, 0, "NF4"),
        (LAYER * (2 + 8 / 4096) / 1024, 0, "how long is a block"),
        (LAYER * (2 + 8 / 256), 0, "1024"),
        (LAYER * (2 + 8 / 256) / 2**20, 0, "1024"),
        ("8 MiB", 0, "number"),
        (None, 0, "number"),
        (-1.0, 0, "sign"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("state_kib", state_kib=answer), points, word, "8328")


# ------------------------------------------------------------------------------------------- exercise 2


def rowwise(weight: torch.Tensor, most: float = 127) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (weight.abs().amax(1) / most).clamp(min=1e-30)
    return (weight / scales[:, None]).round().to(torch.int8), scales


def per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale.expand(len(weight))


def one_scale(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 127
    return (weight / scale).round().to(torch.int8), scale


def columns(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(0) / 127
    return (weight / scales).round().to(torch.int8), scales


def signed_maximum(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.amax(1) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return (weight / scales[:, None]).round().to(torch.int8), scales


def divides_by_zero(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), 1 / (1 / scales) * scales / scales


def cut_off(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
    return (weight / scales[:, None]).to(torch.int8), scales


def test_exercise_2_right() -> None:
    found = checked("int8_rows", int8_rows=solution("int8_rows")["int8_rows"])
    assert (found.status, found.points) == ("right", 2), found.message
    assert checked("int8_rows", int8_rows=rowwise).points == 2
    assert checked("int8_rows", int8_rows=lambda w: (rowwise(w)[0], rowwise(w)[1][:, None])).points == 2


@pytest.mark.parametrize(
    ("function", "most", "word"),
    [
        (per_tensor, 1.5, "half a step"),
        (one_scale, 0, "each row"),
        (columns, 0, "scales for"),
        (signed_maximum, 1.9, ""),
        (divides_by_zero, 1.9, "zeros"),
        (cut_off, 0.5, "half a step"),
        (lambda w: rowwise(w, 128), 1, "128"),
        (lambda w: rowwise(w, 63), 0.5, "half a step"),
        (lambda w: (rowwise(w)[0].float(), rowwise(w)[1]), 0, "not int8"),
        (lambda w: rowwise(w)[0], 0, "two tensors"),
        (lambda w: (rowwise(w)[0].T, rowwise(w)[1]), 0, "shape"),
        (lambda w: print(rowwise(w)), 0, "return"),
        (lambda w: (1, 2), 0, "tensors"),
        (lambda w: w.missing, 0, "AttributeError"),
    ],
)
def test_exercise_2_wrong(function: Callable[..., Any], most: float, word: str) -> None:
    assert_code(checked("int8_rows", int8_rows=function), word, most=most)


def test_exercise_2_is_no_function() -> None:
    assert checked("int8_rows", int8_rows=8).status == "wrong"


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert checked("cured", cured_run=solution("cured")["cured_run"]).points == 1
    written = checked("why", why=solution("why")["why"])
    assert (written.status, written.points, written.manual) == ("right", 2, True), written.message


@pytest.mark.parametrize(
    ("answer", "word"),
    [("B", "LoRA"), ("C", "does not train"), ("none", "'A', 'B', 'C'"), (["A"], "'A', 'B', 'C'"), (1, "'A', 'B', 'C'")],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("cured", cured_run=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because A trains.", 0, "words"),
        (
            "A trains all of its parameters so it is the one that needs a smaller optimizer, not the two others here.",
            1,
            "B",
        ),
        (
            "In B the activations of eight sequences are what fills the memory, so a smaller batch would be the cure.",
            1.4,
            "C",
        ),
        (
            "B is full of activations. C does not train, so it has no state; I would buy a larger card for that one.",
            1.4,
            "weights of C",
        ),
        (
            "B has activations and it cures B and C, since C has no optimizer and its weights go to int8 afterwards.",
            1.4,
            "cure",
        ),
        (
            "B runs out because the weights of gpt2-xl are too large, so quantise them. C has no optimizer, so fewer "
            "tokens in a batch would help it.",
            1.4,
            "B's weights",
        ),
        (
            "C: use a paged optimizer. B: use a paged optimizer. Then everything is in int8 and without an optimizer "
            "on the card, the batch stays.",
            1.4,
            "paged",
        ),
        (
            "B and C do not have any optimizer state, as LoRA has no optimizer; fewer activations help both, and int8 "
            "weights help none.",
            1.4,
            "LoRA train",
        ),
        (42, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    assert_written(checked("why", why=answer), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "A: 8 bytes of state become 2. B: the batch is what is too large, take fewer sequences. C is only inference, "
        "load it with weights in 4 bits.",
        "It does not cure B or C. B needs checkpointing of activations; C has no gradients and should be quantised.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("why", why=answer), 2)


def paged_verdict(beyond_the_process: dict[str, int]) -> str:
    """The verdict on the paged optimizer when the card has so much more in use than the process shows."""
    settled: dict[str, Any] = {}

    def known(name: str, value: Any, unit: str, what: str) -> dict[str, Any]:
        value = 10**9 + (beyond_the_process[what] if name == "bytes of the card" else 0)
        return {"value": value, "label": "reference", "capability": "sm_90"}

    stub = SimpleNamespace(known=known, table=lambda head, rows: None, settle=lambda key, **what: settled.update(what))
    report = SimpleNamespace(steady=SimpleNamespace(allocated_bytes=1))
    names = {
        "lab": stub,
        "on_card": False,
        "OPTIMIZERS": dict.fromkeys(beyond_the_process),
        "by_optimizer": dict.fromkeys(beyond_the_process, report),
        "elements": [100_000_000, 768],
        "show": lab.show_bytes,
        "lesson": SimpleNamespace(source="predicted"),
    }
    run(cells()["paged"], names)
    return str(settled["verdict"])


@pytest.mark.parametrize(
    ("plain", "paged", "verdict"),
    [
        (0, 200_000_000, "does not hold"),
        (0, 1_000_000, "holds"),
        (0, 90_000_000, "not measured here"),  # neither there nor gone
        (150_000_000, 200_000_000, "not measured here"),  # somebody else is on the card
    ],
)
def test_paged_memory_is_there_or_gone_only_where_nobody_else_is(plain: int, paged: int, verdict: str) -> None:
    found = paged_verdict({"AdamW": plain, "AdamW8bit": 0, "PagedAdamW8bit": paged})
    assert found == verdict or found.startswith(verdict + ":")


def lesson_names() -> dict[str, Any]:
    import bitsandbytes as bnb

    optimizers = {"AdamW": torch.optim.AdamW, "AdamW8bit": bnb.optim.AdamW8bit}
    more = {"HALF": torch.bfloat16, "contextlib": contextlib, "io": io}
    return {"lab": lab, "torch": torch, "quantising": quantising, "OPTIMIZERS": optimizers, **more}


@pytest.mark.slow
def test_run_a_of_exercise_3_is_cured_by_8_bit_states_and_dies_without() -> None:
    train = functions("optimizers", lesson_names())["full_training"]
    sizes = {"model": "gpt2-large", "batch": 1, "seq": 128, "nearest": False, "trace": False, "card": "h200"}
    plain, eight = (lab.measure(train, budget="12GiB", optimizer=name, **sizes) for name in ("AdamW", "AdamW8bit"))
    assert eight.ok
    assert plain.failure is not None and plain.failure.phase == "optimizer"


@pytest.mark.slow
def test_run_b_of_exercise_3_dies_in_forward_with_either_optimizer() -> None:
    train = functions("lora", lesson_names())["adapters"]
    sizes = {"weights": "16 bits", "batch": 8, "seq": 1024, "nearest": False, "trace": False, "card": "h200"}
    for name in ("AdamW", "AdamW8bit"):
        report = lab.measure(train, budget="12GiB", optimizer=name, **sizes)
        assert report.failure is not None and report.failure.phase == "forward"


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def test_the_predicted_state_is_the_formula_to_the_byte() -> None:
    train = functions("optimizers", lesson_names())["full_training"]
    with torch.device("meta"):
        sizes = [p.numel() for p in lab.models.gpt2("gpt2").parameters()]
    for name, bits in (("AdamW", 32), ("AdamW8bit", 8)):
        report = lab.measure(train, optimizer=name, seq=32, card="h200", stateless=True)
        expected = sum(quantising.adam_state_bytes(sizes, bits=bits).values())
        assert report.held_by()["optimizer state"] == expected


def test_gpt2_xl_in_nf4_holds_what_the_formula_says() -> None:
    read = functions("xl", lesson_names())["reading"]
    report = lab.measure(read, scheme="nf4", seq=16, card="h200", stateless=True)
    with torch.device("meta"):
        xl = lab.models.gpt2("gpt2-xl")
    held = report.held_by()
    assert held["parameter"] + held["input"] == pytest.approx(
        sum(quantising.weight_bytes(xl, "nf4").values()), rel=1e-3
    )


def test_calibrated_rounding_beats_rounding_to_the_nearest() -> None:
    names = functions("gptq", {"torch": torch})
    torch.manual_seed(0)
    strength = torch.where(torch.arange(64) % 16 == 0, 20.0, 1.0)
    inputs = torch.randn(1024, 64) @ (torch.eye(64) + torch.randn(64, 64) / 8) * strength
    weight = torch.randn(64, 64)
    seen, other = inputs.split(512)

    def error(changed: torch.Tensor) -> float:
        return float((other @ (changed - weight).T).norm())

    nearest = error(names["rounded"](weight))
    assert error(names["gptq"](weight, seen)) < 0.95 * nearest
    assert error(names["awq"](weight, seen)) < 0.95 * nearest
    codes = names["gptq"](weight, seen) / (weight.abs().amax(1, keepdim=True) / 7)
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)  # sixteen levels
    assert codes.min() >= -8.001 and codes.max() <= 7.001


def test_rounding_in_training_helps_at_two_bits_only() -> None:
    names: dict[str, Any] = {"lab": lab, "torch": torch}
    tree = ast.parse(cells()["qat"])
    stop = next(i for i, n in enumerate(tree.body) if isinstance(n, ast.Assign) and n.targets[0].id == "with_all_bits")  # type: ignore[attr-defined]
    exec(compile(ast.Module(tree.body[:stop], []), "<cell>", "exec"), names)
    import copy

    def held_out(model: Any) -> float:
        with torch.no_grad():
            return float(names["next_byte_loss"](model, names["unseen"]))

    whole = names["taught"]()
    base = held_out(whole)
    afterwards = {bits: held_out(names["rounding"](copy.deepcopy(whole), bits)) - base for bits in (8, 2)}
    assert abs(afterwards[8]) < 0.01
    assert held_out(names["taught"](2)) - base < 0.8 * afterwards[2]
