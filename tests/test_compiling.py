"""labkit.compiling: what torch.compile did is counted right, blocks share a compilation, the price is arithmetic."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import compiling, models
from labkit.units import UserError


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._logging.set_logs(dynamo=logging.ERROR)  # type: ignore[attr-defined]
    compiling.forget()
    yield
    compiling.forget()
    torch._logging.set_logs()  # type: ignore[attr-defined]


def wave(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).cos()


def small(layers: int) -> Any:
    sizes = {"n_layer": layers, "n_embd": 32, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    return models.gpt2("gpt2", attention="sdpa", **sizes).train()


# ------------------------------------------------------------------------------------------- watched


def test_a_function_without_a_branch_is_one_graph() -> None:
    run = torch.compile(wave, backend="eager")
    seen = compiling.watched(run, torch.ones(3))
    assert (seen.graphs, seen.operations, seen.breaks, seen.recompilations) == (1, 3, (), ())
    (made,) = seen.compilations
    assert made.function.startswith("wave (test_compiling.py:") and made.operations == 3 and made.seconds > 0


def test_what_was_compiled_before_does_not_count() -> None:
    run = torch.compile(wave, backend="eager")
    run(torch.ones(3))
    seen = compiling.watched(run, torch.ones(3))
    assert (seen.graphs, seen.operations, seen.compilations) == (0, 0, ())


def test_breaks_are_told_with_their_line() -> None:
    def chatty(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print("so far", end="")
        if y.sum() > 0:
            y = y + 1
        return y * y.sum().item()

    seen = compiling.watched(torch.compile(chatty, backend="eager"), torch.ones(3))
    assert [b.line.split("(")[0] for b in seen.breaks] == ["print", "if y.sum", "return y * y.sum"]
    assert all(b.where.startswith("test_compiling.py:") and b.why for b in seen.breaks)
    assert seen.graphs == 4
    assert "3 graph breaks" in str(seen) and "if y.sum() > 0:" in str(seen)


@pytest.mark.parametrize(("options", "times"), [({}, 2), ({"dynamic": False}, 5), ({"dynamic": True}, 1)])
def test_recompilations_are_counted_with_the_guard_that_failed(options: dict[str, Any], times: int) -> None:
    run = torch.compile(wave, backend="eager", **options)

    def lengths() -> None:
        for length in (3, 4, 5, 6, 7):
            run(torch.ones(2, length))

    seen = compiling.watched(lengths)
    assert (seen.graphs, len(seen.recompilations)) == (times, times - 1)
    if times > 1:
        assert "expected 3, actual 4" in str(seen.recompilations[0].why)


def test_what_the_call_raises_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        compiling.watched(lambda: 1 / 0)


# ------------------------------------------------------------------------------------------- blocks


def test_all_blocks_use_what_the_first_one_made() -> None:
    tokens = torch.randint(0, 64, (2, 8))
    whole = small(3)
    whole.compile(backend="eager")
    at_once = compiling.watched(whole, input_ids=tokens)
    compiling.forget()
    model = compiling.compile_blocks(small(3), backend="eager")
    by_block = compiling.watched(model, input_ids=tokens)
    assert at_once.graphs == by_block.graphs == 1
    assert 3 * by_block.operations <= at_once.operations


def test_compiled_blocks_compute_the_same() -> None:
    tokens, model = torch.randint(0, 64, (2, 8)), small(2).eval()
    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        compiling.compile_blocks(model, backend="aot_eager")
        assert torch.allclose(model(input_ids=tokens).logits, plain, atol=1e-5)
    assert "transformer.h.0.ln_1.weight" in model.state_dict()  # in place: the names are as before


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="blocks"):
        compiling.compile_blocks(torch.nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------- the price


def test_break_even() -> None:
    pays = compiling.Payback(first_seconds=64.4, steady_seconds=0.4, eager_seconds=0.48)
    assert pays.cold_seconds == pytest.approx(64.0)
    assert pays.steps == 800
    assert pays.speedup == pytest.approx(1.2)
    before, after = pays.after(799), pays.after(801)
    assert before[1] > before[0] and after[1] < after[0]


@pytest.mark.parametrize("steady", [0.48, 0.5])
def test_no_gain_never_pays(steady: float) -> None:
    assert compiling.Payback(10.0, steady, 0.48).steps == math.inf


def test_a_free_first_step_pays_at_once() -> None:
    assert compiling.Payback(0.4, 0.4, 0.48).steps == 1


def test_first_call_is_noted_once_and_keeps_nothing_alive() -> None:
    note, calls = compiling.FirstCall(), []
    run = torch.compile(wave, backend="eager")

    def step() -> int:
        run(torch.ones(3))
        calls.append(1)
        return len(calls)

    step.tokens = 7  # type: ignore[attr-defined]
    noted = note.around(step)
    assert note.seconds is None and note.activity is None
    assert (noted(), noted()) == (1, 2)
    assert noted.tokens == 7  # type: ignore[attr-defined]
    assert note.seconds is not None and note.activity is not None and note.activity.graphs == 1
    assert step not in vars(note).values()


# ------------------------------------------------------------------------------------------- caches, compilers


def test_fresh_compiles_anew_and_leaves_the_caches_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    run = torch.compile(wave, backend="eager")
    run(torch.ones(3))
    with compiling.fresh() as place:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(place) and place.is_dir()
        assert compiling.watched(run, torch.ones(3)).graphs == 1
    assert not place.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path) and "TRITON_CACHE_DIR" not in os.environ
    assert compiling.watched(run, torch.ones(3)).graphs == 1  # nothing from inside is used again


def test_fresh_restores_the_caches_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with pytest.raises(ZeroDivisionError), compiling.fresh():
        raise ZeroDivisionError
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.slow
def test_a_kept_folder_makes_a_warm_start(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 64)
    with compiling.fresh(tmp_path):
        cold = compiling.watched(torch.compile(wave), x)
    with compiling.fresh(tmp_path):
        warm = compiling.watched(torch.compile(wave), x)
    assert (cold.kernels, cold.cache_hits, warm.cache_hits) == (1, 0, 1)
    assert (cold.graphs, warm.graphs) == (1, 1)
    assert tmp_path.is_dir()


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    assert compiling.why_not("cpu") is None

    def nowhere() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nowhere)
    assert "C++ compiler" in str(compiling.why_not("cpu"))


def test_missing_headers_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h" in str(compiling.why_not("cpu"))
