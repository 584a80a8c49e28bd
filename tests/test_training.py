"""Text, training loop, held-out loss and facts: what several lessons share."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import facts, lesson, quiet, training
from labkit.training import Spread


class Bigram(torch.nn.Module):
    """The smallest causal language model: logits of the next byte from a table. Loss and gradient are known exactly."""

    def __init__(self, vocab: int = 256):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(vocab, vocab))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        logits = self.table[input_ids]
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return type("Output", (), {"logits": logits, "loss": loss})()


def test_splits_share_no_file_and_are_the_same_every_time() -> None:
    train, held_out = lab.data.stdlib("train"), lab.data.stdlib("held-out")
    names = [{name for name, _ in corpus.files} for corpus in (train, held_out)]
    assert not names[0] & names[1]
    assert 0.03 < held_out.characters / (train.characters + held_out.characters) < 0.3
    assert train.sha256 != held_out.sha256
    assert not any("test" in Path(name).parts for name in names[0] | names[1])
    lab.data.stdlib.cache_clear()
    assert lab.data.stdlib("held-out").sha256 == held_out.sha256
    with pytest.raises(lab.UserError, match="held-out"):
        lab.data.stdlib("test")


def test_blocks_are_consecutive_text_of_their_split() -> None:
    blocks = lab.data.byte_blocks(seq=64, count=20, split="held-out", seed=1)
    assert blocks.shape == (20, 64) and blocks.dtype == torch.int64
    text = "\0".join(body for _, body in lab.data.stdlib("held-out").files).encode()
    assert all(bytes(block.tolist()) in text for block in blocks)
    assert torch.equal(blocks, lab.data.byte_blocks(seq=64, count=20, split="held-out", seed=1))
    assert not torch.equal(blocks, lab.data.byte_blocks(seq=64, count=20, split="held-out", seed=2))
    with pytest.raises(lab.UserError, match="fewer or shorter"):
        lab.data.byte_blocks(seq=10**6, count=10**4, split="held-out")
    with pytest.raises(lab.UserError, match="count"):
        lab.data.byte_blocks(seq=8, count=0)


def test_token_blocks_use_the_tokenizer() -> None:
    def words(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert add_special_tokens is False
        return {"input_ids": [len(word) for word in text.split()]}

    blocks = lab.data.token_blocks(words, seq=16, count=5)
    assert blocks.shape == (5, 16) and int(blocks.min()) >= 1


def test_training_learns_and_evaluation_agrees_with_the_definition() -> None:
    torch.manual_seed(0)
    model = Bigram()
    blocks = lab.data.byte_blocks(seq=65, count=24, seed=3)
    assert training.evaluate(model, blocks, batch=5) == pytest.approx(math.log(256), rel=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    seen: list[int] = []
    history = training.train(model, optimizer, blocks.split(4), watch=lambda step, _: seen.append(step))
    assert seen == [0, 1, 2, 3, 4, 5] and history.steps == 6
    assert history.losses[0] == pytest.approx(math.log(256), rel=1e-6)
    assert history.final(1) < history.losses[0] - 0.3
    logits = model(blocks).logits.detach()[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, blocks[:, 1:].flatten())
    assert training.evaluate(model, blocks, batch=7) == pytest.approx(float(wanted), rel=1e-5)
    assert model.training  # evaluate gave the mode back


def test_clipping_bounds_what_the_optimizer_sees() -> None:
    model, blocks = Bigram(), lab.data.byte_blocks(seq=32, count=2)
    before = model.table.detach().clone()
    history = training.train(model, torch.optim.SGD(model.parameters(), lr=1.0), [blocks], clip=1e-3)
    assert history.gradient_norms[0] is not None and history.gradient_norms[0] > 1e-2
    assert float((model.table - before).norm()) == pytest.approx(1e-3, rel=1e-3)


class Scaler:
    """Skips every other step, as a GradScaler does on overflow: by lowering its scale."""

    def __init__(self) -> None:
        self.value, self.calls = 8.0, 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 1.0

    def get_scale(self) -> float:
        return self.value

    def step(self, optimizer: Any) -> None:
        self.calls += 1

    def update(self) -> None:
        self.value *= 0.5 if self.calls % 2 else 1.0


def test_skipped_steps_are_counted() -> None:
    model, blocks = Bigram(), lab.data.byte_blocks(seq=16, count=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert training.train(model, optimizer, blocks.split(1), scaler=Scaler()).skipped == 2


def test_a_loss_that_is_not_finite_is_no_final_loss() -> None:
    assert math.isnan(training.History((1.0, math.nan), (None, None)).final())
    assert training.History((4.0, 1.0, 3.0), (None,) * 3).final(2) == 2.0


def test_spread() -> None:
    spread = Spread.of([3.2, 3.19, 3.24])
    assert (spread.low, spread.high) == (3.19, 3.24)
    assert str(spread) == "3.210 (3.190 to 3.240, 3 seeds)"
    assert spread.overlaps(Spread.of([3.24, 3.5])) and not spread.overlaps(Spread.of([3.25, 3.5]))
    with pytest.raises(lab.UserError):
        Spread.of([])
    assert training.perplexity(0.0) == 1.0 and training.perplexity(1e4) == math.inf


# ------------------------------------------------------------------------------------------------ facts


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit" / "__init__.py").touch()
    (tmp_path / "notebooks").mkdir()
    reference = tmp_path / "data" / "reference"
    reference.mkdir(parents=True)
    common = {"schema": 1, "lesson": "99_x", "card": "NVIDIA H200", "source": "measured"}
    timing = {"median_seconds": 0.5, "spread_seconds": 0.01, "repeats": 20}
    report = {"name": "small", "status": "ok", "settings": {"batch": 2}, "timing": timing, "tokens": 2048}
    rows: list[dict[str, Any]] = [
        {**common, "kind": "fact", "name": "bus", "what": "pinned", "value": 1.0, "unit": "GB/s"},
        {**common, "kind": "fact", "name": "bus", "what": "pinned", "value": 2.0, "unit": "GB/s"},
        {**common, "kind": "fact", "name": "bus", "what": "pageable", "value": 3.0, "unit": "GB/s"},
        {**common, "kind": "fact", "name": "bus", "what": "pageable", "value": 1.5, "unit": "GB/s", "remark": "beside"},
        {**common, "kind": "fact", "name": "beside", "value": 4.0, "unit": "s", "remark": "beside other processes"},
        {**common, "kind": "fact", "name": "bus", "what": "guessed", "value": 9.0, "source": "predicted"},
        {**common, "kind": "report", **report},
        {**common, "kind": "report", **report, "settings": {"batch": 8}, "tokens": 8192},  # a sweep has one name
    ]
    (reference / "lessons-h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    monkeypatch.setenv("LABKIT_RUN", str(tmp_path / "run"))
    facts._rows.cache_clear()
    lesson.begin("99_x")
    yield tmp_path
    lesson.close()
    facts._rows.cache_clear()


def test_reference_rows_are_the_latest_of_each_kind(course: Path) -> None:
    assert [(r["what"], r["value"]) for r in lab.reference("bus")] == [("pinned", 2.0), ("pageable", 3.0)]
    assert lab.reference("bus", what="pageable")[0]["label"] == "reference · NVIDIA H200"
    assert lab.reference("bus", lesson="00_environment") == []
    assert lab.reference("nothing") == []
    assert lab.reference("beside")[0]["label"] == "reference · NVIDIA H200 (rough)"


def test_a_fact_goes_to_the_ledger(course: Path) -> None:
    row = lab.fact("ppl", 11.5, "", what="fp32", source="cpu", seeds=3)
    written = lab.Ledger(course / "run" / "ledger.jsonl").rows()[-1]
    assert (written["kind"], written["value"], written["what"], written["seeds"]) == ("fact", 11.5, "fp32", 3)
    assert row["label"] == "cpu"
    assert lab.fact("ppl", math.inf)["value"] is None  # JSON has no infinity


def test_known_without_a_card(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    bare = dataclasses.replace(lab.machine.here(), card=None)
    monkeypatch.setattr(facts.machine, "here", lambda: bare)
    assert lab.known("bus", None, what="pinned")["value"] == 2.0
    missing = lab.known("speed", None, "GB/s")
    assert missing["value"] is None and missing["label"] == "no reference row"
    carded = dataclasses.replace(bare, card="NVIDIA Test")
    monkeypatch.setattr(facts.machine, "here", lambda: carded)
    assert lab.known("speed", 7.0, "GB/s")["label"] == "measured · NVIDIA Test"


def test_times_are_borrowed_only_for_the_same_settings(course: Path) -> None:
    same = lab.Report(name="small", status="ok", source="predicted", card="h200", settings={"batch": 2, "later": 0})
    other = lab.Report(name="small", status="ok", source="predicted", card="h200", settings={"batch": 4})
    timed, untimed = lab.with_times([same, other])
    assert timed.timing is not None and timed.timing.clock == "reference · NVIDIA H200"
    assert timed.tokens_per_second == pytest.approx(4096)
    assert untimed.timing is None


def test_chatter_is_silenced_errors_are_not(caplog: pytest.LogCaptureFixture) -> None:
    quiet.libraries()
    for name in quiet._CHATTER:
        logging.getLogger(name).warning("chatter")
        logging.getLogger(name).error("trouble")
    assert [r.message for r in caplog.records] == ["trouble"] * len(quiet._CHATTER)
