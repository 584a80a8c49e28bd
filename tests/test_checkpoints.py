"""Checkpoints: whole or not there, checked when read, and complete enough to go on bit by bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from labkit import checkpoints
from labkit.checkpoints import CheckpointManager, Kept, random_states, set_random_states
from labkit.units import UserError

ROOT = Path(__file__).resolve().parents[1]
KILLED = 1 if sys.platform == "win32" else -9  # what a process returns that `Popen.kill` has ended


def parts(seed: int = 0, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}


def train(run: dict[str, Any], steps: int) -> list[float]:
    """Losses of so many steps on random numbers of all three kinds, with dropout."""
    found = []
    for _ in range(steps):
        noise = random.random() + float(numpy.random.rand())
        loss = (run["model"](torch.randn(4, 6)) + noise).square().mean()
        run["scaler"].scale(loss).backward()
        run["scaler"].step(run["optimizer"])
        run["scaler"].update()
        run["schedule"].step()
        run["optimizer"].zero_grad()
        found.append(loss.item())
    return found


def test_a_resumed_run_is_equal_to_the_last_bit(tmp_path: Path) -> None:
    run = parts()
    train(run, 4)
    manager = CheckpointManager(tmp_path)
    manager.save(4, position={"epoch": 1, "batches": 2}, metrics={"loss": 0.5}, **run)
    expected = train(run, 5)
    random.seed(9), numpy.random.seed(9)
    other = parts(seed=7)
    found = manager.restore(**other)
    assert found is not None
    assert (found.step, found.position, found.metrics) == (4, {"epoch": 1, "batches": 2}, {"loss": 0.5})
    assert train(other, 5) == expected


@pytest.mark.parametrize("left_out", ["optimizer", "schedule", "scaler", "random"])
def test_each_part_matters(tmp_path: Path, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above would notice if one of them were not restored."""
    run = parts()
    train(run, 4)
    manager = CheckpointManager(tmp_path)
    manager.save(4, **run)
    expected = train(run, 5)
    other = parts(seed=7)
    if left_out == "random":
        monkeypatch.setattr(checkpoints, "set_random_states", lambda states: None)
    manager.restore(**{name: part for name, part in other.items() if name != left_out})
    losses = train(other, 5)
    if left_out == "scaler":  # it changes no loss here (powers of two), but has a state of its own
        assert other["scaler"].state_dict() != run["scaler"].state_dict()
    else:
        assert losses != expected


def test_random_states_of_all_three() -> None:
    states = random_states()
    drawn = random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.randn()
    set_random_states(states)
    assert drawn == (
        random.random(), numpy.random.rand(), torch.rand(3).tolist(), random.gauss(0, 1), numpy.random.randn(),
    )  # fmt: skip


def test_an_empty_folder_restores_nothing(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "new").restore(**parts()) is None
    assert CheckpointManager(tmp_path / "new").restore_best(**parts()) is None


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=1)
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (5, 1.5), (6, 1.6)]:
        manager.save(step, metrics={"loss": loss}, model=parts(step)["model"])
    assert [k.step for k in manager.kept()] == [2, 5, 6]
    best = parts()
    found = manager.restore_best(model=best["model"])
    assert found is not None and found.step == 2
    torch.testing.assert_close(best["model"].state_dict(), parts(2)["model"].state_dict())


def test_larger_can_be_better_and_a_metric_may_be_missing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=2, best="accuracy", larger_is_better=True)
    for step, metrics in [(1, {"accuracy": 0.5}), (2, {"accuracy": 0.9}), (3, {}), (4, {"accuracy": 0.7}), (5, {})]:
        manager.save(step, metrics=metrics, model=parts()["model"])
    assert [(k.step, k.metric) for k in manager.kept()] == [(2, 0.9), (4, 0.7), (5, None)]


def test_a_run_that_went_back_replaces_what_it_left(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        manager.save(step, model=parts(step)["model"])
    manager.save(2, model=parts(9)["model"])
    assert [k.step for k in manager.kept()] == [1, 2]
    again = parts()
    manager.restore(model=again["model"])
    torch.testing.assert_close(again["model"].state_dict(), parts(9)["model"].state_dict())


def test_a_file_cut_at_any_byte_is_known_and_the_one_before_is_taken(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=5)
    run = parts()
    manager.save(1, model=run["model"])
    train(run, 1)
    path = manager.save(2, model=run["model"])
    content = path.read_bytes()
    boundaries = [i for i in range(len(content)) if content[i : i + 2] == b"PK"]  # parts of the zip file
    cuts = {0, 1, len(content) - 1, *boundaries, *(b + 1 for b in boundaries), *range(0, len(content), 97)}
    assert len(cuts) > 50
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        found = manager.restore(model=parts(3)["model"])
        assert found is not None and found.step == 1, cut
        assert found.damaged == (path.with_suffix(".damaged"),)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes(flipped)
    found = manager.restore(model=parts()["model"])
    assert found is not None and found.step == 1
    path.write_bytes(content)
    found = manager.restore(model=parts()["model"])
    assert found is not None and (found.step, found.damaged) == (2, ())


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=parts()["model"]).write_bytes(b"PK")
    with pytest.raises(UserError, match="every checkpoint .* is damaged"):
        manager.restore(model=parts()["model"])
    assert [p.suffix for p in tmp_path.iterdir()] == [".damaged"]


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=parts()["model"])
    with pytest.raises(UserError, match="holds no state of optimizer"):
        manager.restore(**parts())
    with pytest.raises(UserError, match="does not fit this model"):
        manager.restore(model=torch.nn.Linear(2, 2))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, model=parts()["model"])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(self: Any, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._Digested, "write", full)
    with pytest.raises(UserError, match="step 2 was not written"):
        manager.save(2, model=parts()["model"])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_other_files_are_left_alone_and_unfinished_ones_go(tmp_path: Path) -> None:
    for name in ("notes.txt", "step-1.pt", "unfinished-77.part"):
        (tmp_path / name).write_text("x")
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=0)
    for step in (1, 2):
        manager.save(step, model=parts()["model"])
    assert sorted(p.name.split(".")[0] for p in tmp_path.iterdir()) == ["notes", "step-00000002", "step-1"]
    assert Kept.of(tmp_path / "step-1.pt") is None


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def state_dict(self) -> Any:
            return {"a": Path("x")}  # any object that is no plain data

    manager = CheckpointManager(tmp_path)
    manager.save(1, model=Evil())
    with pytest.raises(Exception, match="[Ww]eights.only"):
        manager.restore(model=parts()["model"])


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_best": -1}, {"best": "a/b"}])
def test_what_a_manager_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        CheckpointManager("x", **options)


SCRIPT = """
import sys, torch
from labkit.checkpoints import CheckpointManager
torch.set_num_threads(1)
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(300, 300))
model = torch.nn.ParameterList([weight])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
manager = CheckpointManager(sys.argv[1], keep_last=2)
found = manager.restore(model=model, optimizer=optimizer)
step = found.step if found else 0
print("from", step, flush=True)
while step < int(sys.argv[2]):
    loss = (weight @ torch.randn(300)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    step += 1
    manager.save(step, metrics={"loss": loss.item()}, model=model, optimizer=optimizer)
print("end", weight.double().sum().item().hex(), flush=True)
"""


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder), str(steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have(tmp_path: Path) -> None:
    """It saves after each step, so that nearly every moment is inside a write, a rename or a clean-up."""
    steps, chance = 400, random.Random(4)
    whole, _ = start(tmp_path / "whole", steps).communicate()
    kills, reached = 0, [0]
    while True:
        process = start(tmp_path / "killed", steps)
        assert process.stdout is not None
        reached.append(int(process.stdout.readline().split()[1]))
        if kills < 4:
            time.sleep(chance.uniform(0.02, 0.3))
            process.kill()
        rest = process.stdout.read()
        process.wait()
        if process.returncode == 0:
            break
        assert process.returncode == KILLED
        kills += 1
        assert not list((tmp_path / "killed").glob("*.damaged"))
    assert kills >= 2 and reached == sorted(reached) and reached[-1] > 0
    assert rest.splitlines()[-1] == whole.splitlines()[-1]
    assert not list((tmp_path / "killed").glob("*.damaged")) and not list((tmp_path / "killed").glob("*.part"))


@pytest.mark.gpu
def test_a_resumed_run_on_a_card_stays_within_what_two_runs_differ_by(tmp_path: Path) -> None:
    def run(stop: int | None, folder: Path) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        manager, losses = CheckpointManager(folder), []
        found = manager.restore(model=model, optimizer=optimizer)
        for step in range(found.step if found else 0, 20):
            loss = (model(torch.randn(32, 64, device="cuda")) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step + 1 == stop:
                manager.save(step + 1, model=model, optimizer=optimizer)
                break
        return losses

    whole, again = run(None, tmp_path / "a"), run(None, tmp_path / "b")
    resumed = run(9, tmp_path / "c") + run(None, tmp_path / "c")
    spread = max(abs(x - y) for x, y in zip(whole, again, strict=True))
    assert max(abs(x - y) for x, y in zip(whole, resumed, strict=True)) <= max(1e-6, 10 * spread)
