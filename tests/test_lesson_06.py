"""Lesson 06: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import ast
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong, run

import labkit as lab
from labkit import attention

LESSON = Lesson("06_attention")
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solved
MiB = 2**20


def defined(*wanted: str) -> dict[str, Any]:
    """The functions, constants and imports from torch that these names need, from all cells."""

    def keep(node: ast.stmt) -> bool:
        if isinstance(node, ast.ImportFrom):
            return str(node.module).startswith("torch")
        if isinstance(node, ast.Assign):
            return getattr(node.targets[0], "id", "") in wanted
        return isinstance(node, ast.FunctionDef) and node.name in wanted

    here = {"math": math, "attention": attention, "on_card": False, "HALF": "bfloat16", "device": torch.device("cpu")}
    return LESSON.defined(keep=keep, **here)


@pytest.mark.parametrize("exercise", ["flash_mib", "merge", "runs_flash", "refusals_why"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("40.3", "2 * 20 * 2048", "logaddexp", 'runs_flash = "C"', "In which dtype is the logsumexp"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def kept(tensors: int = 4, nbytes: int = 2, row: float = 4, heads: int = 20, batch: int = 2) -> float:
    """MiB of so many tensors of q's size in `nbytes` and `row` bytes for each query."""
    return batch * heads * 2048 * (tensors * nbytes * 64 + row) / MiB


def test_exercise_1_right() -> None:
    found = checked("flash_mib", flash_mib=solution("flash_mib"))
    assert (found.status, found.points) == ("right", 1)
    assert checked("flash_mib", flash_mib=40.31).status == "right"


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (kept(row=0), 0.5, "small"),
        (kept(row=2), 0.5, "dtype"),
        (kept(tensors=3), 0.5, "else"),
        (kept(tensors=3, row=0), 0, "Two more"),
        (kept(nbytes=4), 0, "2 bytes"),
        (kept(tensors=3, row=2 * 2048), 0, "probabilities"),
        (kept(batch=1), 0, "one sequence"),
        (kept(heads=1), 0, "one head"),
        (kept(heads=12), 0, "more heads"),
        (36 * kept(), 0, "whole model"),
        (kept() * MiB, 0, "unit"),
        (kept() * MiB / 1e6, 0, "10⁶"),
        ("40 MiB", 0, "number"),
        (None, 0, "number"),
        (-1.0, 0, "sign"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("flash_mib", flash_mib=answer), points, word, "40.3")


def test_exercise_1_is_what_autograd_keeps() -> None:
    names = defined("BACKENDS", "by_hand", "attend", "one_layer", "keeps", "kept")
    source = cells()["attend"].replace("(batch, seq, 12, 64)", "(batch, seq, 20, 64)")
    run(source, names)
    lab.measure(names["keeps"], how="flash", dtype="bfloat16", batch=2, seq=2048, repeats=0, trace=False, card="h200")
    assert sum(names["kept"].values()) / MiB == pytest.approx(kept(), rel=1e-5)


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    assert_right(checked("merge", merge=solution("merge")), 2)


def by_hand_without_logaddexp(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    largest = torch.maximum(lse_a, lse_b)
    a, b = (lse_a - largest).exp(), (lse_b - largest).exp()
    return [(a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], largest + (a + b).log()]


def test_exercise_2_takes_another_way() -> None:
    assert checked("merge", merge=by_hand_without_logaddexp).status == "right"


def only_without_leading_dimensions(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[:, None] * out_a + (lse_b - lse).exp()[:, None] * out_b, lse


def overflowing(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


def lse_is_wrong(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    return by_hand_without_logaddexp(out_a, lse_a, out_b, lse_b)[0], torch.maximum(lse_a, lse_b)


@pytest.mark.parametrize(
    ("merge", "below", "word"),
    [
        (lambda a, x, b, y: ((a + b) / 2, torch.logaddexp(x, y)), 1, "plain mean"),
        (lambda a, x, b, y: (a + b, torch.logaddexp(x, y)), 1, "plain sum"),
        (lambda a, x, b, y: (x[..., None] * a + y[..., None] * b, torch.logaddexp(x, y)), 1, "not that of attention"),
        (overflowing, 2, "large logsumexp"),
        (lse_is_wrong, 1, "the logsumexp is not"),
        (only_without_leading_dimensions, 2, "dimension"),
        (lambda a, x, b, y: by_hand_without_logaddexp(a, x, b, y)[0], 1, "two results"),
        (lambda a, x, b, y: (a, a), 1, "shapes"),
        (lambda a, x, b, y: (1, 2), 1, "tensors"),
        (lambda a, x, b, y: x * a, 1, "raises"),
    ],
    ids=["mean", "sum", "by lse", "overflow", "lse", "two dimensions", "no lse", "shapes", "numbers", "raises"],
)
def test_exercise_2_wrong(merge: Callable[..., Any], below: float, word: str) -> None:
    assert_code(checked("merge", merge=merge), word, below=below)


def test_exercise_2_is_no_function() -> None:
    assert checked("merge", merge=3).status == "wrong"


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("runs_flash", runs_flash=solution("runs_flash")), 1)
    written = checked("refusals_why", refusals_why=solution("refusals_why"))
    assert (written.status, written.points, written.manual) == ("right", 2, True), written.message


def test_exercise_3_is_what_the_rules_say() -> None:
    def q(dtype: torch.dtype) -> Any:
        return [torch.empty(2, 12, 128, 64, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]

    mask = torch.ones(128, 128, dtype=torch.bool, device="meta")
    ran = [
        attention.explain(*q(torch.float32), causal=True, card="rtx3090").ran,
        attention.explain(*q(torch.bfloat16), mask, card="rtx3090").ran,
        attention.explain(*q(torch.bfloat16), causal=True, dropout=0.1, card="rtx3090").ran,
    ]
    assert ran == ["efficient", "efficient", "flash"]


@pytest.mark.parametrize(("answer", "word"), [("A", "dtype"), ("B", "mask"), ("none", "'A', 'B', 'C'"), (3, "'A'")])
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("runs_flash", runs_flash=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because of the mask.", 0, "words"),
        (
            "B has a mask tensor that flash does not look into; is_causal would do. So the memory-efficient one runs.",
            1.5,
            "A",
        ),
        (
            "A is in float32 and flash wants 16 bits; the memory-efficient backend runs in both, so cast the tensors.",
            1.5,
            "B instead",
        ),
        (
            "A is float32, which flash does not take, B has a mask where is_causal belongs. Something else runs.",
            1.5,
            "backend runs instead",
        ),
        (
            "A is float32, B has a mask and not is_causal; both fall back to the math backend, not the efficient.",
            1.5,
            "need math",
        ),
        ("I do not know what float32 and is_causal and efficient have to do with any of these calls.", 1.5, "do know"),
        ("B runs flash, its mask is causal; A is float32 and runs efficient; I would set is_causal.", 1.5, "tables"),
        (42, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    text = f"{answer} That is what I think of it." if most else answer
    assert_written(checked("refusals_why", refusals_why=text), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "A does not, because flash needs half precision: the efficient kernel takes it; I would use autocast. B passes "
        "a tensor as mask; write is_causal=True. It does not run math.",
        "Flash refuses float32 (A) and every attn_mask (B). Memory-efficient runs in both. Cast; set is_causal.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("refusals_why", refusals_why=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


@pytest.mark.parametrize("tile", [1, 7, 64, 200])
def test_attention_in_tiles_is_attention(tile: int) -> None:
    names = defined("by_hand", "in_tiles")
    q, k, v = (torch.randn(2, 3, 130, 16, dtype=torch.float64) for _ in range(3))
    q = 30 * q  # scores that overflow an exp without a running maximum
    out, logsumexp = names["in_tiles"](q, k, v, tile)
    assert torch.allclose(out, names["by_hand"](q, k, v), atol=1e-10)
    scores = (q @ k.transpose(-2, -1) / 4).masked_fill(torch.ones(130, 130).triu(1).bool(), -math.inf)
    assert torch.allclose(logsumexp, scores.logsumexp(-1))


def test_by_hand_is_what_pytorch_computes() -> None:
    names = defined("BACKENDS", "by_hand", "attend")
    q, k, v = (torch.randn(2, 3, 40, 16, dtype=torch.float64) for _ in range(3))
    for how in ("default", "math", "flash"):
        assert torch.allclose(names["attend"]("by hand", q, k, v), names["attend"](how, q, k, v))


@pytest.mark.parametrize(
    ("how", "dtype", "nbytes"),
    [
        ("by hand", "float32", lambda s: 3 * 4 * 64 + 4 * s + s / 48),
        ("by hand", "float16", lambda s: 3 * 2 * 64 + 2 * s + s / 48),
        ("math", "bfloat16", lambda s: 4 * (3 * 64 + s)),
        ("efficient", "float32", lambda s: 4 * 4 * 64 + 4),
        ("flash", "bfloat16", lambda s: 4 * 2 * 64 + 4),
        ("cudnn", "float16", lambda s: 4 * 2 * 64 + 4),
    ],
)
def test_what_backward_keeps_follows_the_table(how: str, dtype: str, nbytes: Callable[[int], float]) -> None:
    names = defined("BACKENDS", "by_hand", "attend", "one_layer", "keeps", "kept")
    for seq in (256, 512):
        lab.measure(names["keeps"], how=how, dtype=dtype, seq=seq, repeats=0, trace=False, card="h200")
        found = sum(names["kept"].values()) / (4 * 12 * seq)
        assert found == pytest.approx(nbytes(seq), rel=1e-4)


@pytest.mark.parametrize("seq", [128, 1024, 2048])
def test_the_peak_by_hand_is_exact(seq: int) -> None:
    from labkit.memory.workspaces import workspaces

    names = defined("BACKENDS", "by_hand", "attend", "one_layer")
    report = lab.measure(names["one_layer"], how="by hand", seq=seq, repeats=0, trace=False, card="h200")
    assert report.steady is not None
    formula = 16 * 12 * seq**2 + 24 * 12 * seq * 64 + seq**2 + sum(workspaces((9, 0)))
    assert report.steady.requested_bytes == pytest.approx(formula, rel=1e-4)


def test_the_square_is_gone_with_sdpa_only() -> None:
    names = defined("BACKENDS", "by_hand", "attend", "one_layer")
    lengths = [256, 512, 1024, 2048]
    for how, exponent in (("by hand", 2), ("math", 2), ("default", 1)):
        reports = [
            lab.measure(names["one_layer"], how=how, seq=seq, repeats=0, trace=False, card="h200") for seq in lengths
        ]
        peaks = [r.steady.requested_bytes for r in reports if r.steady]
        assert lab.plots.fit_exponent(lengths, peaks, offset=True).exponent == pytest.approx(exponent, abs=0.1)


def test_the_section_on_xformers_runs_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with xFormers' call: (batch, seq, heads, head_size) in and out."""
    stand_in = types.ModuleType("xformers.ops")

    def attend(q: Any, k: Any, v: Any, attn_bias: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    stand_in.LowerTriangularMask, stand_in.memory_efficient_attention = object, attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", stand_in)
    names = defined("by_hand", "xformers_attention", "xformers_layer")
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    assert torch.allclose(names["xformers_attention"](q, k, v), names["by_hand"](q, k, v), atol=1e-5)
    assert lab.measure(names["xformers_layer"], repeats=0, trace=False, card="h200").ok


# ------------------------------------------------------------------------------------------- what a time is worth


def test_a_gain_says_how_much_of_it_may_be_noise() -> None:
    def timed(median: float, spread: float) -> Any:
        return types.SimpleNamespace(timing=types.SimpleNamespace(median_seconds=median, spread_seconds=spread))

    gain = defined("gain")["gain"]
    saved, noise = gain(timed(0.040, 0.008), timed(0.030, 0.004))
    assert (saved, noise) == (pytest.approx(0.25), pytest.approx(0.15))
    assert gain(timed(0.040, 0.008), types.SimpleNamespace(timing=None)) is None
