"""Lesson 02: its exercises score right, empty and typical wrong answers as they should, and its arithmetic is exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong, run

import labkit as lab
from labkit import recipes
from labkit.checks import Check

LESSON = Lesson("02_mixed_precision", math=math)
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solution


def functions(cell: str, *wanted: str, **names: Any) -> dict[str, Any]:
    """The named functions and classes of a cell."""
    return LESSON.defined(cell, keep=lambda node: getattr(node, "name", "") in wanted, **names)


@pytest.mark.parametrize("exercise", ["break_even", "careful_step", "scaled", "diagnosis"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in ("1024.2", "28 * 1024", 'scaled_run = "A"', "norm = torch.nn.utils", "One product is missing"):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def tokens(
    copy: float = 2, block: float = 12, head: float = 1, saved: float = 28, d: int = 1024, blocks: int = 24
) -> float:
    """Break-even tokens with the given bytes and factors."""
    return copy * (block * d**2 * blocks + head * d * 50257) / (saved * d * blocks)


@pytest.mark.parametrize("answer", [tokens(), 1024.25, 1027, 1025])
def test_exercise_1_right(answer: float) -> None:
    assert_right(checked("break_even", break_even=answer), 1)


def test_exercise_1_the_solution_is_right() -> None:
    assert checked("break_even", break_even=solution("break_even")["break_even"]).points == 1


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (tokens(copy=1), 0, "How many bytes"),
        (tokens(copy=4), 0, "16 bits"),
        (tokens(head=0), 0.5, "outside the blocks"),
        (2 * (12 * 1024**2 + 1024 * 50257) / (28 * 1024 * 24), 0, "How many blocks"),
        (24 * tokens(), 0, "one block"),
        (tokens(d=768, blocks=12), 0, "small gpt2"),
        (tokens(saved=86), 0, "86"),
        (tokens(saved=114), 0, "114"),
        (tokens(head=2), 0, "shares"),
        (2 * 354_823_168 / (28 * 1024 * 24), 0.5, "multiplied"),
        (1e9, 0, "large"),
        (None, 0, "number"),
        ("1024 tokens", 0, "number"),
        (-1024.0, 0, "sign"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("break_even", break_even=answer), points, word, "1024.2")


# ------------------------------------------------------------------------------------------- exercise 2


def stepping(careful_step: Callable[..., Any]) -> Check:
    """The check's verdict on a learner's function; ``micro_loss`` is the lesson's."""
    return checked("careful_step", careful_step=careful_step)


def micro_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def variant(
    *,
    mean: bool = True,
    unscale: bool = True,
    clip: str = "before",
    step: str = "scaler",
    update: bool = True,
    clear: bool = True,
    give: str = "norm",
    micro: str = "all",
    scale: bool = True,
) -> Callable[..., Any]:
    """`careful_step` with one thing done differently."""

    def careful_step(model: Any, optimizer: Any, scaler: Any, batches: Any, limit: float) -> Any:
        norm = torch.tensor(0.0)
        for batch in batches if micro == "all" else batches[:1]:
            loss = micro_loss(model, batch) / (len(batches) if mean else 1)
            (scaler.scale(loss) if scale else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clip == "before":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if step == "scaler":
            scaler.step(optimizer)
        else:
            optimizer.step()
        if clip == "after":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if update:
            scaler.update()
        if clear:
            optimizer.zero_grad(set_to_none=True)
        return float(norm) if give == "norm" else None

    return careful_step


def test_exercise_2_right() -> None:
    found = stepping(solution("careful_step")["careful_step"])
    assert (found.status, found.points) == ("right", 2), found.message
    assert stepping(variant()).points == 2  # the variants below differ from this in one thing


@pytest.mark.parametrize(
    ("answer", "below", "word"),
    [
        (variant(unscale=False), 2, "hardly moved"),
        (variant(clip="after"), 2, "longer than it should be"),
        (variant(clip="never"), 2, "longer than it should be"),
        (variant(mean=False), 2, "the mean loss"),
        (variant(micro="first"), 2, "the mean loss"),
        (variant(update=False), 1, "the scale would never change"),
        (variant(clear=False), 2, "left over"),
        (variant(give="nothing"), 2, "a number is asked for"),
        (variant(step="optimizer"), 2, "infinite gradient"),
        (variant(step="optimizer", unscale=False, clip="never", update=False), 1, "far too long"),
        (lambda model, optimizer, scaler, batches, clip: 1.0, 1, "hardly moved"),
        (lambda model, optimizer, scaler, batches, clip: 1 / 0, 1, "ZeroDivisionError"),
    ],
    ids=[
        "clipped with the scale on",
        "clipped after the step",
        "not clipped",
        "sum",
        "one micro-batch",
        "no update",
        "gradients left",
        "no return",
        "optimizer steps",
        "scaled step",
        "nothing",
        "raises",
    ],
)
def test_exercise_2_wrong(answer: Callable[..., Any], below: float, word: str) -> None:
    assert_code(stepping(answer), word, below=below)


def test_exercise_2_is_no_function() -> None:
    assert_wrong(checked("careful_step", careful_step=1.0))


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("scaled", scaled_run=solution("scaled")["scaled_run"]), 1)
    written = checked("diagnosis", diagnosis=solution("diagnosis")["diagnosis"])
    assert (written.status, written.points, written.manual) == ("right", 2, True)


@pytest.mark.parametrize(
    ("answer", "word"),
    [("B", "forward"), ("C", "fp32"), ("all", "'A', 'B', 'C'"), (["A"], "'A', 'B', 'C'"), (1, "'A', 'B', 'C'")],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("scaled", scaled_run=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("It is A because of underflow.", 0, "words"),
        ("In B a number overflows in forward, and that makes the loss NaN, every forty steps or so, I say.", 1.5, "B"),
        (
            "C is the same in fp32, so the variance of the input is too small for the epsilon that is used there.",
            1.5,
            "B",
        ),
        (
            "In C there is underflow and the scale must go up. B overflows, so one uses bf16 there, with more range.",
            1.5,
            "C",
        ),
        (
            "B overflows in forward because the loss scale is too high, so lower the scale to 2**8. C has activations "
            "of small variance, so use bf16 there.",
            1.5,
            "scale",
        ),
        (
            "B overflows since the gradients are too large, switch to bf16 there. In C the input of the LayerNorm is "
            "damaged by fp16, so a larger scale is needed there.",
            1.5,
            "activation",
        ),
        ("I do not know what the monitors mean here but the scale should be larger in all of them, I think.", 0.5, ""),
        (42, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    assert_written(checked("diagnosis", diagnosis=answer), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "B: the output of the MLP is larger than what fp16 can hold, so switch to bfloat16. C is the same in fp32, "
        "hence AMP is not guilty; the embeddings are initialised too small.",
        "In run B something becomes infinite in forward, before the loss; disabling autocast for this module helps. In "
        "run C the standard deviation is far below eps, whatever the precision.",
        "In B inf is made in the forward pass by the MLP: take fp32 there; a lower scale does not help. C isn't an "
        "AMP issue at all, since single precision gives the same: the embeddings are too small.",
        "B explodes in the forward pass, beyond what fp16 can hold, so use bf16. In C fp32 shows the same, so it is "
        "not a matter of precision: the variance lies under eps.",
        "The activation of B exceeds 65504: keep that MLP in full precision. For C, fp32 gives the same number, no "
        "precision cures it, the input to LayerNorm is tiny.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("diagnosis", diagnosis=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's arithmetic


def account() -> dict[str, Any]:
    d, layers, vocabulary = 768, 12, 50257
    sizes = {"N": 124_439_808, "L": layers, "d": d, "V": vocabulary}
    return functions("account", "terms", "term_of", products=12 * d * d * layers + d * vocabulary, **sizes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_terms_are_what_is_alive_at_the_peak(precision: str) -> None:
    names = account()
    training = functions("training", "training", recipes=recipes)["training"]
    report = lab.measure(training, batch=2, seq=1024, precision=precision, card="h200", repeats=0)
    formula = names["terms"](2, 1024, precision == "bf16")
    copies = formula.pop("16-bit copies")
    found = dict.fromkeys(formula, 0)
    for holding in report.alive:
        term = names["term_of"](holding)
        found[term] = found.get(term, 0) + holding.nbytes
    inside = {"attention": 8 * 768**2 * 12, "MLP": 16 * 768**2 * 12, "logits and loss": 2 * 768 * 50257}
    assert copies == (sum(inside.values()) if precision == "bf16" else 0)
    for term, nbytes in formula.items():
        held = found[term] - (inside.get(term, 0) if copies else 0)
        assert held == pytest.approx(nbytes, rel=0.01), term  # small ones are left out: statistics of rows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gelu_in_one_kernel_keeps_48_bytes_less(precision: str) -> None:
    training = functions("training", "training", recipes=recipes)["training"]
    peaks = [
        lab.measure(
            training, batch=2, seq=1024, precision=precision, card="h200", repeats=0, trace=False, stateless=True,
            nearest=False, record=False, activation_function=activation,
        ).steady.requested_bytes
        for activation in ("gelu_new", "gelu_pytorch_tanh")
    ]  # fmt: skip
    assert "less = 48 * d * L" in cells()["limits"]
    assert peaks[0] - peaks[1] == pytest.approx(48 * 2 * 1024 * 768 * 12, rel=0.01)


def test_a_scaler_by_hand_goes_as_pytorchs_does() -> None:
    hand = functions("scaler", "HandScaler")["HandScaler"](2.0**20, interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    for size in (1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0):
        weight.grad = torch.tensor([size]) * hand.scale
        theirs.scale(torch.zeros(1))
        theirs.step(optimizer)
        theirs.update()
        weight.grad = torch.tensor([size]) * hand.scale
        hand.step(optimizer)
        assert hand.scale == theirs.get_scale()


def test_rounding_at_random_is_right_on_average() -> None:
    round_at_random = functions("lost-updates", "round_at_random")["round_at_random"]
    torch.manual_seed(0)
    x = torch.full((100_000,), 1 + 2.0**-9)  # a quarter of the way to the next bf16 number
    got = round_at_random(x)
    assert got.dtype is torch.bfloat16
    assert set(got.float().tolist()) == {1.0, 1 + 2.0**-7}
    assert float((got.float() > 1).float().mean()) == pytest.approx(0.25, abs=0.01)
    exact = torch.tensor([-2.5, 0.0, 1.0])
    assert torch.equal(round_at_random(exact).float(), exact)


def test_in_float32_leaves_autocast_for_one_module() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    kept = functions("cures", "InFloat32")["InFloat32"](layer)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        got = kept(x)
    assert torch.equal(got, layer(x))


def verdict_of_free(**minus: list[float]) -> str:
    """The verdict on "AMP is free" when the ways differ from fp32 by so much, seed by seed; "amp-fp16" skips a step."""
    given = {"fp32": [0.0] * 3, "amp-bf16": [1e-4] * 3, "amp-fp16": [-1e-4] * 3, "bf16": [0.01] * 3, **minus}
    rows = [
        {"what": way, "minus": values, "skipped": [int(way == "amp-fp16")] * 3, "steps": 6}
        for way, values in given.items()
    ]
    settled: dict[str, Any] = {}
    stub = SimpleNamespace(
        training=lab.training,
        models=SimpleNamespace(has=lambda name: False),
        reference=lambda name: [],
        settle=lambda key, **what: settled.update(what),
    )
    names = {"lab": stub, "on_card": False, "WAYS": ("fp32", "amp-bf16", "amp-fp16", "bf16"), "here": "cpu"}
    run(cells()["pretrained"], {**names, "facts_of": lambda name: rows})
    assert "pure bf16 +0.0100" in settled["measured"] or "bf16" in minus
    return str(settled["verdict"])


def test_the_verdict_on_free_can_fail() -> None:
    assert verdict_of_free() == "holds"
    assert verdict_of_free(**{"amp-bf16": [0.002] * 3}) == "does not hold"
    assert verdict_of_free(**{"amp-fp16": [0.002] * 3}).startswith("holds when no step is skipped")
    assert verdict_of_free(bf16=[5e-4] * 3) == "does not hold"  # the control shows nothing: nothing can be told


@pytest.mark.parametrize(
    ("room", "said"), [(18, "after 4000 steps"), (20, "not within 6000 steps"), (40, "not within 6000 steps")]
)
def test_the_log_is_judged_wherever_the_scale_can_go(room: int, said: str) -> None:
    settled: dict[str, Any] = {}
    stub = SimpleNamespace(
        plots=SimpleNamespace(lines=lambda *_, **__: None),
        answer=lambda *_, **__: None,
        settle=lambda key, **what: settled.update(what),
    )
    names = {"lab": stub, "math": math, "pandas": pandas, "display": lambda _: None, "here": "cpu", "room": room}
    scaler = functions("scaler", "HandScaler")["HandScaler"]
    run(cells()["log"], {**names, "HandScaler": scaler, "lost_at": {12: 0.9, 16: 0.5}})
    assert said in settled["measured"]
    assert settled["verdict"].startswith("does not hold")
    assert ("only the shorter interval" in settled["verdict"]) is (room < 40)
