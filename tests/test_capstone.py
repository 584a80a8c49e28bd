"""The capstone's step: every rung computes the same loss, impossible combinations are refused, depth is linear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import capstone
from labkit.checkpointing import segments
from labkit.recipes import chunked_loss

OFF = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def network(dtype: torch.dtype = torch.float32, *, attention: str = "sdpa", **changes: Any) -> Any:
    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 32}
    model = lab.models.gpt2("gpt2", attention=attention, bos_token_id=0, eos_token_id=0, **small, **OFF, **changes)
    capstone.draw_weights(model)
    return model.to(dtype).train()


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))


def test_every_rung_starts_at_the_same_loss() -> None:
    """The first loss of each rung of the ladder, on the processor and uncompiled: within what bfloat16 resolves."""
    found = {}
    for name in capstone.LADDER:
        how = capstone.rung(name)
        how.pop("compile", None)
        dtype = torch.bfloat16 if how.get("precision") == "bf16" else torch.float32
        model = network(
            dtype, attention=how.pop("attention", "eager"), activation_function=how.pop("activation", "gelu_new")
        )
        if every := how.pop("checkpoint", 0):
            segments(model, every)
        with torch.compiler.set_stance("force_eager"):
            found[name] = float(capstone.step_of(model, [tokens()], **how)())
    assert found["fused attention"] == pytest.approx(found["fp32, AdamW"], rel=1e-6)
    for name, loss in found.items():
        assert loss == pytest.approx(found["fp32, AdamW"], rel=1e-3), name


def test_a_rung_has_the_changes_before_it() -> None:
    last = capstone.rung(list(capstone.LADDER)[-1])
    assert {key for change in capstone.LADDER.values() for key in change} | {"clip"} == set(last)
    assert capstone.rung("fp32, AdamW") == {"clip": 1.0}
    with pytest.raises(lab.UserError, match="not one of"):
        capstone.rung("magic")


def test_switches_come_in_one_order() -> None:
    """Rows are named after the switches whatever order they were taken in; every order's names are switches."""
    name, arguments = capstone.switched(["chunked loss", "autocast"])
    assert (name, arguments) == capstone.switched({"autocast", "chunked loss"})
    assert name == "orders: autocast, chunked loss"
    assert arguments == {**capstone.TASK, "precision": "amp-bf16", "loss": "chunked"}
    assert capstone.switched([]) == ("orders: nothing", capstone.TASK)
    assert {name for order in capstone.ORDERS.values() for name in order} <= set(capstone.SWITCHES)


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_the_loss_in_place_is_the_chunked_loss(chunks: int) -> None:
    """Loss and gradients in float32, scaled by an upstream gradient of a third."""
    results = []
    for loss_of in (chunked_loss, capstone.loss_in_place):
        model = network()
        loss = loss_of(model, tokens(), chunks) / 3
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for usual, ours in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, usual, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"gradients": "in backward"}, "cannot clip"),
        ({"offload": "optimizer"}, "cannot clip"),
        ({"gradients": "nowhere"}, "gradients"),
        ({"loss": "half"}, "loss"),
        ({"precision": "fp8"}, "precision"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"stochastic_rounding": True}, "does not round"),
        ({"offload": "optimizer", "clip": None, "optimizer": "adamw8bit"}, "on the host"),
    ],
)
def test_what_does_not_exist_is_refused(how: dict[str, Any], word: str) -> None:
    with pytest.raises(lab.UserError, match=word):
        capstone.step_of(network(), [tokens()], **{"clip": 1.0, **how})


def test_accumulation_needs_gradients_that_last() -> None:
    with pytest.raises(lab.UserError, match="accumulation"):
        capstone.step_of(network(), tokens().split(2), gradients="in backward")


def test_weights_are_the_same_in_every_dtype() -> None:
    exact, half = network(), network(torch.float32)
    torch.manual_seed(0)
    with torch.device("cpu"):
        half = half.to(torch.bfloat16)
    torch.manual_seed(3)
    capstone.draw_weights(exact)
    torch.manual_seed(3)
    capstone.draw_weights(half)
    for p, q in zip(exact.parameters(), half.parameters(), strict=True):
        assert torch.equal(p.to(torch.bfloat16), q)


@pytest.mark.slow
def test_depth_is_a_straight_line() -> None:
    """Twelve blocks, predicted whole, against the line through two and four."""
    how: dict[str, Any] = {**capstone.rung("loss in 16 chunks"), "gradients": "host", "batch": 1, "seq": 256}
    whole = lab.measure(
        capstone.training, model="gpt2", repeats=0, trace=False, nearest=False, record=False, stateless=True,
        card="h200", **how,
    )  # fmt: skip
    assert whole.steady is not None
    line = capstone.peak_bytes("gpt2", card="h200", **how)
    assert line == pytest.approx(whole.steady.allocated_bytes, rel=0.02)


@pytest.mark.slow
def test_the_line_meets_what_a_card_measured() -> None:
    """Rungs of the ladder on an H200, 48 blocks of GPT-2 XL, within one per cent."""
    reference = Path(__file__).resolve().parents[1] / "data" / "reference"
    rows = [row for file in reference.glob("lessons-h200*.jsonl") for row in lab.Ledger(file)]
    measured = {row["name"]: row for row in rows if row["kind"] == "report" and row["lesson"] == "12_capstone"}
    seen = 0
    for name in ("fp32, AdamW", "fused attention", "autocast to bf16", "8-bit states"):
        truth = measured[f"ladder: {name}, without a limit"]["steady"]["allocated_bytes"]
        predicted = capstone.peak_bytes("gpt2-xl", card="h200", batch=4, seq=1024, **capstone.rung(name))
        assert predicted == pytest.approx(truth, rel=0.01), name
        seen += 1
    assert seen == 4
