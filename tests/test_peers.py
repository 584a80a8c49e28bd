"""The bench of peers: the search for the batch, rows that replace each other, the table, and one trial that runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(str(ROOT / "bench"))
    import memory_truth
    import peers
    import peers_cases
    import peers_loops
    import peers_table
    import peers_trial
    from peers_trial import Case, Trial

TINY = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 256}


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "tiny")


def searched(case: Case, fits: int, speed=lambda batch: float(batch)) -> list[int]:
    """The batches that are tried when `fits` is the largest that fits."""
    known: dict[int, dict] = {}
    while (batch := peers_cases.next_batch(case, known)) is not None:
        assert batch not in known
        known[batch] = {"status": "ok", "tokens_per_second": speed(batch)} if batch <= fits else {"status": "oom"}
    return list(known)


def test_the_search_doubles_then_looks_between():
    case = Case("a", "b", batch=8)
    assert searched(case, 20) == [8, 16, 32, 24]
    assert searched(case, 24) == [8, 16, 32, 24]
    assert searched(case, 8) == [8, 16, 12]
    assert searched(case, 4) == [8, 4, 6]
    assert searched(case, 1) == [8, 4, 1, 2]
    assert searched(case, 0) == [8, 4, 1]


def test_the_search_ends_where_more_brings_nothing_and_where_it_may_not_begin():
    assert searched(Case("a", "b", batch=8), 1000, lambda batch: 100.0) == [8, 16]
    assert searched(Case("a", "b", batch=8, search=False), 1000) == [8]
    known = {8: {"status": "error"}}
    assert peers_cases.next_batch(Case("a", "b", batch=8), known) is None


def test_cases_have_adapters_and_names_of_their_own():
    cases = peers_cases.cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.peer for case in cases} == set(peers_cases.ADAPTERS)
    for case in cases:
        assert case.how.get("optimizer", "adamw") in peers_loops.OPTIMIZERS or case.peer == peers_cases.OURS
    for model in ("gpt2", "gpt2-medium", "gpt2-xl"):
        assert any(case.model == model and case.peer == peers_cases.OURS for case in cases)


def test_the_recipes_of_the_course_are_recipes():
    for case in peers_cases.cases():
        if case.peer == peers_cases.OURS:
            recipe = peers_loops.recipe_of(Trial(case, case.batch))
            assert recipe.clip == 1.0 and recipe.accumulation == case.accumulation
            assert recipe.expandable_segments == ("PYTORCH_ALLOC_CONF" in case.environment)


def test_a_row_takes_the_place_of_the_one_before(tmp_path):
    file = tmp_path / "rows.jsonl"
    case = Case("a", "b", {"x": 1}, batch=8)
    for batch, status in ((8, "error"), (16, "ok"), (8, "ok")):
        peers_trial.keep(file, {"key": Trial(case, batch).key, "status": status, "batch": batch})
    assert [(row["batch"], row["status"]) for row in peers_trial.rows(file)] == [(16, "ok"), (8, "ok")]
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".new"] == []


def test_a_trial_is_another_one_when_anything_that_counts_differs():
    case = Case("a", "b", {"x": 1}, batch=8)
    same = Trial(dataclasses.replace(case, batch=32, search=False), 8)
    assert Trial(case, 8).key == same.key
    others = [
        Trial(case, 16), Trial(case, 8, kind="loss"), Trial(case, 8, seq=512),
        Trial(dataclasses.replace(case, how={"x": 2}), 8), Trial(dataclasses.replace(case, cap_gib=24), 8),
    ]  # fmt: skip
    assert len({Trial(case, 8).key, *(other.key for other in others)}) == 6


def row(peer: str, variant: str, batch: int, speed: float | None, **more) -> dict:
    case = Case(peer, variant, batch=batch)
    found: dict = {"status": "oom", "reason": "CUDA out of memory."}
    if speed is not None:
        sizes = {f"{name}_bytes": 7 * 2**30 for name in ("allocated", "reserved", "device")}
        found = {
            "status": "ok", "tokens_per_second": speed, "seconds": 1.0, "spread_seconds": 0.02, "losses": [10.0, 5.0],
            "steady": sizes, "host_resident_bytes": 2**30, "host_pinned_bytes": 2**31,
        }  # fmt: skip
    provenance = {"card": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    return {**peers._row(Trial(case, batch), {**found, **provenance}), **more}


ROWS = [
    row("TRL", "c", 8, 20e3), row("TRL", "c", 16, None), row(peers_cases.OURS, "a", 8, 30e3),
    row(peers_cases.OURS, "a", 16, 45e3), row("Trainer", "b", 1, None),
    row("PyTorch", "d", 8, 90e3, cap_gib=None), row("TRL", "c", 4, 1.0, trial="loss"),
]  # fmt: skip


def test_the_table_says_who_is_fastest_and_what_did_not_fit():
    page = "\n".join(peers_table.lines(ROWS))
    assert "## gpt2-xl, 8 GiB" in page and "no cap" not in page.split("\n")[0]
    assert "| TRL: c | 8 | 8 | 20,000 | 2% |" in page and "| 5.000 |" in page
    assert "| this course: a | >= 16 | 16 | 45,000 |" in page
    assert "Trainer: b: out of memory with batch 1" in page
    assert "Fastest: PyTorch: d, no cap." in page and "reaches 0.50 times PyTorch, 2.25 times TRL, with" in page
    without = "\n".join(peers_table.lines(ROWS[:5]))
    assert "Fastest: this course: a." in without
    assert "with no more reserved memory than TRL (this course: a) 2.25 times its tokens" in without
    assert "- gpt2-xl, 8 GiB: TRL, c" not in peers_table.missing(ROWS)
    assert len(list(peers_table.missing(ROWS))) == len(peers_cases.cases())


def test_flops_are_those_of_the_model():
    import torch

    from labkit import models

    model = models.causal_lm(models.config("gpt2"), device=torch.device("meta"))
    parameters = sum(p.numel() for p in model.parameters())
    assert peers_table.flops_per_token("gpt2", 1024) == 6 * parameters + 12 * 12 * 768 * 1024


def test_page_and_figure_are_written(tmp_path):
    peers_table.write(ROWS, tmp_path)
    assert (tmp_path / "peers.md").read_text().startswith("# This course's recipes against their peers\n\nNVIDIA H200")
    assert (tmp_path / "peers.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        peers_table.write([], tmp_path)


@pytest.mark.parametrize("name", ["loop", "ours"])
def test_a_trial_trains(tiny, name):
    how = {"precision": "fp32", "optimizer": "adamw", "checkpoint": 0}
    case = Case("PyTorch", "tiny", how, model=tiny, cap_gib=None, batch=2, accumulation=2)
    trial = Trial(case, 2, seq=32, seconds=0.01, device="cpu", kind="loss", steps=3)
    found = peers_trial.run(trial, getattr(peers_loops, name))
    assert found["status"] == "ok", found
    assert len(found["losses"]) == 3 and found["losses"][0] == pytest.approx(5.545, abs=0.02)  # ln 256
    timed = peers_trial.run(dataclasses.replace(trial, kind="speed"), getattr(peers_loops, name))
    assert timed["timed_steps"] >= peers_trial.LEAST and timed["tokens"] == 2 * 2 * 32
    assert timed["losses"][0] == found["losses"][0] and timed["losses"][2] != found["losses"][2]  # another rate


def test_both_loops_train_alike(tiny):
    how = {"precision": "fp32", "optimizer": "adamw", "checkpoint": True}
    case = Case("PyTorch", "tiny", how, model=tiny, cap_gib=None, batch=4)
    trial = Trial(case, 4, seq=32, device="cpu", kind="loss", steps=6)
    theirs = peers_trial.run(trial, peers_loops.loop)["losses"]
    fields = {"precision": "fp32", "optimizer": "adamw-fused", "checkpoint": 1, "loss": "in-place", "loss_chunks": 4}
    own = dataclasses.replace(trial, case=dataclasses.replace(case, how=fields))
    assert peers_trial.run(own, peers_loops.ours)["losses"] == pytest.approx(theirs, abs=2e-4)


def test_what_goes_wrong_is_a_row(tiny):
    trial = Trial(Case("a", "b", model=tiny, cap_gib=None), 1, device="cpu")

    def missing(trial, probe):
        import no_such_module_at_all  # noqa: F401

    def full(trial, probe):
        raise RuntimeError("NCCL says: out of memory")

    assert peers_trial.run(trial, missing)["status"] == "missing"
    assert peers_trial.run(trial, full)["status"] == "oom"
    wrong = peers_trial.run(trial, lambda trial, probe: 1 / 0)
    assert wrong["status"] == "error" and wrong["reason"].startswith("ZeroDivisionError")


@pytest.mark.slow
def test_a_process_of_its_own_writes_a_row_once(tiny, tmp_path):
    command = [
        sys.executable, str(ROOT / "bench" / "peers.py"), "run", "--device", "cpu", "--seq", "32", "--model", tiny,
        "--seconds", "0.01", "--only", "gpt2, no cap", "--out", str(tmp_path / "rows.jsonl"),
    ]  # fmt: skip
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "tokens/s" in first and "1 rows" in first
    (kept,) = peers_trial.rows(tmp_path / "rows.jsonl")
    assert kept["status"] == "ok" and kept["source"] == "cpu" and kept["versions"]["torch"]
    arguments = argparse.Namespace(device="cpu", layers=None, seq=32, seconds=0.01, again=set())
    case = dataclasses.replace(peers_cases.cases()[-1], **{f: kept[f] for f in ("peer", "variant", "how", "model")})
    trial = Trial(dataclasses.replace(case, cap_gib=None), kept["batch"], **peers._sizes(arguments))
    assert peers._one(trial, tmp_path / "rows.jsonl", tmp_path, 0, arguments) == kept  # found, so not run again
    arguments.again = {kept["key"]}
    assert peers._one(trial, tmp_path / "rows.jsonl", tmp_path, 0, arguments) is None  # wanted anew, but time is up
    assert peers._noisy({**kept, "spread_seconds": 0.26 * kept["seconds"]})
    assert not peers._noisy({**kept, "spread_seconds": 0.24 * kept["seconds"]})


def test_children_of_the_memory_bench_may_ask_for_triton_anew():
    from torch.utils import _triton

    _triton.has_triton()
    memory_truth.import_without_cuda()
    assert _triton.has_triton.cache_info().currsize == 0
