"""Lesson 08: its exercises score right, empty and typical wrong answers as they should, and its functions are exact."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
import torch
from lesson_cells import Lesson, assert_code, assert_number, assert_right, assert_written, assert_wrong

import labkit as lab
from labkit import longcontext

LESSON = Lesson("08_long_context", longcontext=longcontext, math=math)
cells, checked, solution = LESSON.cells, LESSON.checked, LESSON.solved
MiB = 2**20


@pytest.mark.parametrize("exercise", ["tokens_read", "packed", "change", "why_12"])
def test_untouched_answers_are_blank(exercise: str) -> None:
    found = checked(exercise)
    assert (found.status, found.points) == ("blank", 0)


def test_answers_are_not_in_the_learners_copy() -> None:
    text = "\n".join(cells().values())
    for secret in (
        "13312",
        "13 * 1024",
        'change = "flex"',
        "repeat_interleave(torch",
        "24 x 0.5",
        "There is no part of a",
    ):
        assert secret not in text, secret


# ------------------------------------------------------------------------------------------- exercise 1


def test_exercise_1_right() -> None:
    assert_right(checked("tokens_read", tokens_read=solution("tokens_read")), 1)
    plan = longcontext.chunks(10_000, 1024, 256)
    assert sum(c.stop - c.start for c in plan) == solution("tokens_read")


@pytest.mark.parametrize(
    ("answer", "points", "word"),
    [
        (10 * 1024, 0, "without overlap"),
        (12 * 1024, 0, "One chunk is missing"),
        (14 * 1024, 0, "too many"),
        ((1 + (10_000 - 1024) / 768) * 1024, 0.5, "round up"),
        (10_000 * 1024 / 768, 0.5, "approximation"),
        (13, 0.5, "number of chunks"),
        (37 * 1024, 0, "768"),
        (1.3312, 0.5, "how often"),
        (10_000 + 12 * 256, 0.5, "last chunk"),
        (11 * 1024, 0, "after the first"),
        (10_000, 0, "too small"),
        ("13 chunks", 0, "number"),
        (None, 0, "number"),
        (-1.0, 0, "sign"),
    ],
)
def test_exercise_1_wrong(answer: Any, points: float, word: str) -> None:
    assert_number(checked("tokens_read", tokens_read=answer), points, word, "13312")


# ------------------------------------------------------------------------------------------- exercise 2


def test_exercise_2_right() -> None:
    assert_right(checked("packed", packed=solution("packed")), 2)


def owner_of(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def only_window(lengths: list[int], window: int) -> Any:
    return lambda b, h, q, k: (k <= q) & (q - k < window)


def only_texts(lengths: list[int], window: int) -> Any:
    owner = owner_of(lengths)
    return lambda b, h, q, k: (owner[q] == owner[k]) & (k <= q)


def not_causal(lengths: list[int], window: int) -> Any:
    owner = owner_of(lengths)
    return lambda b, h, q, k: (owner[q] == owner[k]) & ((q - k).abs() < window)


def one_more(lengths: list[int], window: int) -> Any:
    owner = owner_of(lengths)
    return lambda b, h, q, k: (owner[q] == owner[k]) & (k <= q) & (q - k <= window)


def one_less(lengths: list[int], window: int) -> Any:
    owner = owner_of(lengths)
    return lambda b, h, q, k: (owner[q] == owner[k]) & (k <= q) & (q - k < window - 1)


def a_table(lengths: list[int], window: int) -> Any:
    return longcontext.dense(only_texts(lengths, window), sum(lengths))


def one_sided(lengths: list[int], window: int) -> Any:
    return lambda b, h, q, k: q >= 0


def with_and(lengths: list[int], window: int) -> Any:
    return lambda b, h, q, k: k <= q and q - k < window


def no_return(lengths: list[int], window: int) -> Any:
    solution("packed")(lengths, window)


@pytest.mark.parametrize(
    ("answer", "below", "word"),
    [
        (only_window, 2, "another text"),
        (only_texts, 2, "itself included"),
        (not_causal, 2, "comes later"),
        (one_more, 2, "itself included"),
        (one_less, 2, "does not see"),
        (a_table, 1, "return a function"),
        (one_sided, 1, "both"),
        (with_and, 1, "`&`"),
        (no_return, 1, "return"),
        (lambda lengths, window: owner_of(lengths[0]), 1, "raises"),
    ],
)
def test_exercise_2_wrong(answer: Any, below: float, word: str) -> None:
    assert_code(checked("packed", packed=answer), word, below=below)


def test_exercise_2_is_no_function() -> None:
    assert_wrong(checked("packed", packed=owner_of([3, 4])))


# ------------------------------------------------------------------------------------------- exercise 3


def test_exercise_3_right() -> None:
    assert_right(checked("change", change=solution("change")), 1)
    written = checked("why_12", why_12=solution("why_12"))
    assert (written.status, written.points, written.manual) == ("right", 2, True)


@pytest.mark.parametrize(
    ("answer", "word"),
    [("window", "256"), ("chunks", "before"), ("sdpa", "'flex'"), (["flex"], "'flex'"), (1, "'flex'")],
)
def test_exercise_3_wrong(answer: Any, word: str) -> None:
    assert_wrong(checked("change", change=answer), word)


@pytest.mark.parametrize(
    ("answer", "most", "word"),
    [
        ("Because of the mask.", 0, "words"),
        (
            "A sequence of 16384 tokens is simply too long for this card, with any attention that there is.",
            1.5,
            "SDPA",
        ),
        (
            "The mask that SDPA gets is kept in every block and nobody frees it until backward has come by.",
            1.5,
            "How large",
        ),
        (
            "A dense mask of 16384 x 16384 entries is made for SDPA, and that is a lot of memory for one sequence.",
            1.5,
            "many",
        ),
        (
            "A dense mask of 16384 x 16384 is kept by each of the 24 blocks, and a smaller window helps with it.",
            1.5,
            "depend on the window",
        ),
        (
            "The table of attention scores of 16384 x 16384 is formed and kept by each of the 24 blocks.",
            0.7,
            "form the scores",
        ),
        (
            "Each of the 24 layers saves its keys and values of 16384 tokens in a table until backward has used them.",
            1.4,
            "not there before",
        ),
        (
            "SDPA builds the full n^2 mask once, and it is shared by all layers, in fp32, so it takes 12 GiB.",
            1.4,
            "shared one",
        ),
        (12, 0, "text"),
    ],
)
def test_exercise_3_written_answers(answer: Any, most: float, word: str) -> None:
    assert_written(checked("why_12", why_12=answer), most, word)


@pytest.mark.parametrize(
    "answer",
    [
        "SDPA needs the window as a bias table of n² numbers, 512 MiB in 16 bits, and all 24 layers save theirs.",
        "The attention mask is dense: its size is quadratic in the sequence, and every block keeps a copy of it.",
    ],
)
def test_exercise_3_takes_other_words_for_it(answer: str) -> None:
    assert_right(checked("why_12", why_12=answer), 2)


# ------------------------------------------------------------------------------------------- the lesson's own code


def functions(cell: str, **names: Any) -> dict[str, Any]:
    """The functions of a cell, and what it imports by name."""
    import torch.nn.functional as F

    kinds = (ast.FunctionDef, ast.ImportFrom)
    return LESSON.defined(cell, keep=lambda node: isinstance(node, kinds), **{"F": F, **names})


def test_top_k_of_all_keys_is_full_attention_and_of_few_it_is_not() -> None:
    names = functions("topk", **{"full": functions("read")["full"]})
    query, key, value = torch.randn(3, 1, 2, 24, 8, generator=torch.Generator().manual_seed(0)).double()
    wanted = names["full"](query, key, value)
    torch.testing.assert_close(names["topk_attention"](query, key, value, 24), wanted)
    errors = [names["error_of"]([(query, key, value)], k) for k in (1, 4, 12, 24)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.1 and errors[-1] < 1e-12
    weights = names["topk_attention"](query, key, torch.eye(24).double().expand(1, 2, 24, 24), 4)
    assert ((weights > 0).sum(-1) <= 4).all()  # never more than four keys


@pytest.mark.parametrize("chunks", [1, 3, 7, 8, 1000])
def test_the_loss_in_chunks_is_the_models_own_and_labkits(chunks: int) -> None:
    loss_in_chunks = functions("chunked")["loss_in_chunks"]
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    model = lab.models.gpt2("gpt2", **sizes).double().eval()
    tokens = torch.randint(0, 50, (3, 9))
    own = model(input_ids=tokens, labels=tokens).loss
    own.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for found in (loss_in_chunks(model, tokens, chunks), lab.recipes.chunked_loss(model, tokens, chunks)):
        model.zero_grad()
        found.backward()
        torch.testing.assert_close(found.double(), own.double(), rtol=1e-6, atol=0)
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-7)


def test_a_long_text_is_read_as_the_plan_of_chunks_says() -> None:
    read_long = functions("plan")["read_long"]
    generator = torch.Generator().manual_seed(0)
    for length, window, overlap in ((26, 10, 4), (26, 10, 0), (7, 10, 3), (10, 10, 9), (101, 16, 15), (12, 10, 5)):
        text = torch.randn(length, generator=generator)
        read: list[int] = []

        def in_place(chunk: torch.Tensor, read: list[int] = read) -> torch.Tensor:
            read.append(len(chunk))
            return chunk.cumsum(0)  # depends on the context, as a loss does

        found = read_long(in_place, text, window, overlap)
        plan = longcontext.chunks(length, window, overlap)
        pieces = torch.stack([text[c.start : c.stop].cumsum(0) for c in plan])
        torch.testing.assert_close(found, longcontext.merge(pieces, plan))
        assert read == [c.stop - c.start for c in plan]


def test_the_controls_of_equivalence_fail() -> None:
    """The mean of the chunks' means is another loss, and a window one token shorter another mask."""
    names = functions("equivalence-loss", loss_in_chunks=functions("chunked")["loss_in_chunks"])
    wanted, _ = names["loss_and_gradients"](0)
    right, _ = names["loss_and_gradients"](7)
    wrong, _ = names["loss_and_gradients"](7, names["mean_of_means"])
    assert abs(float(right - wanted)) < 1e-5 * float(wanted) < abs(float(wrong - wanted))
    near = {"length": 512, "links": 1}
    tables = [longcontext.dense(longcontext.big_bird(w, 8, **near), 512) for w in (99, 100)]
    assert not torch.equal(*tables)


@pytest.mark.parametrize(("way", "terms"), [("dense mask", 3), ("eager", 4 * 2 * 2 * 12)])
def test_the_account_of_attention_is_what_is_predicted(way: str, terms: int) -> None:
    names = functions("attention", **functions("topk"), full=functions("read")["full"], HALF=torch.bfloat16)
    tops = {}
    for each in ("full", way):
        report = lab.measure(names["attention_alone"], way=each, seq=4096, repeats=0, trace=False, card="h200")
        assert report.steady is not None
        tops[each] = report.steady.requested_bytes
    assert (tops[way] - tops["full"]) / 4096**2 == pytest.approx(terms, rel=0.05)


@pytest.mark.slow
def test_the_window_costs_memory_with_sdpa_and_nothing_up_to_its_length() -> None:
    build = functions("mistral", HALF=torch.bfloat16)["made_for_length"]
    tops = {}
    for seq in (1024, 8192):
        for window in (None, 1024):
            report = lab.measure(build, seq=seq, window=window, repeats=0, trace=False, card="h200")
            assert report.steady is not None
            tops[seq, window] = report.steady.requested_bytes
    assert tops[1024, 1024] == tops[1024, None]
    extra = tops[8192, 1024] - tops[8192, None]
    assert extra == pytest.approx(4 * 2 * 8192**2, rel=0.2)  # a 16-bit mask in each of 4 blocks


def test_the_numbers_of_exercise_3() -> None:
    text = cells()["exercise-3-1"] if "exercise-3-1" in cells() else "\n".join(cells().values())
    assert "24 blocks" in text and "12 GiB" in text
    assert 24 * 2 * 16384**2 == 12 * 2**30


def test_the_longest_texts_of_each_way_give_an_exponent() -> None:
    """Three that fit, each twice as long as the one before; eager and top-k run out at their last length."""
    source = cells()["attention"]
    table = next(
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "LENGTHS"
    )
    for way, lengths in ast.literal_eval(table).items():
        first, second, third = lengths[-4:-1] if way in ("eager", "top-k") else lengths[-3:]
        assert second == 2 * first and third == 2 * second, way
    assert all(4096 in ast.literal_eval(table)[way] for way in ("full", "eager", "top-k"))  # what is compared


def test_an_exponent_comes_without_its_constant() -> None:
    names = functions("exponents")

    def reports(law: Any, count: int = 4) -> list[Any]:
        from labkit.results import Report

        return [
            Report(name="x", status="ok", source="cpu", card="processor", settings={"seq": n}, loss=law(n))
            for n in (1024 * 2**i for i in range(count))
        ]

    for p in (1.0, 1.5, 2.0):
        found = names["power"](reports(lambda n, p=p: 500.0 + n**p), lambda r: r.loss)
        assert found == pytest.approx(p)
    assert names["power"](reports(lambda n: n**2.0)[1:4:1], lambda r: r.loss) == pytest.approx(2)
    assert names["power"](reports(lambda n: 9 + n**1.5, 5)[::2], lambda r: r.loss) == pytest.approx(1.5)  # x 4
    assert math.isnan(names["power"](reports(lambda n: n**2.0)[:2] + reports(lambda n: n**2.0)[3:], lambda r: r.loss))
    assert math.isnan(names["power"](reports(lambda n: n, 2), lambda r: r.loss))
    assert math.isnan(names["power"](reports(lambda n: 7.0), lambda r: r.loss))
