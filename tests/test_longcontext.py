"""Chunks keep every position once, merging puts back what was split, and masks are what FlexAttention runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import compiling, longcontext
from labkit.units import UserError


@pytest.mark.parametrize(
    ("length", "window", "overlap"),
    [(10, 4, 0), (10, 4, 1), (10, 4, 3), (9, 3, 0), (1024, 256, 64), (5, 8, 2), (8, 8, 7)],
)
def test_every_position_is_kept_once_and_no_chunk_is_longer_than_the_window(
    length: int, window: int, overlap: int
) -> None:
    plan = longcontext.chunks(length, window, overlap)
    kept = [p for c in plan for p in range(c.keep, c.stop)]
    assert kept == list(range(length))
    assert {c.stop - c.start for c in plan} == {min(window, length)}
    for before, after in pairwise(plan):
        assert before.stop - after.start >= overlap, "a chunk repeats less than was asked for"
        assert after.keep == before.stop
    assert all(before.stop - after.start == overlap for before, after in pairwise(plan[:-1]))


@pytest.mark.parametrize(
    ("settings", "word"),
    [((10, 4, 4), "smaller"), ((10, 4, -1), "at least 0"), ((0, 4, 0), "at least 1"), ((10, 4.0, 0), "whole")],
)
def test_impossible_chunks_are_one_sentence(settings: Any, word: str) -> None:
    with pytest.raises(UserError, match=word):
        longcontext.chunks(*settings)


def test_merging_puts_back_what_was_split() -> None:
    tokens = torch.arange(23)
    for overlap in (0, 1, 4, 6):
        plan = longcontext.chunks(23, 7, overlap)
        pieces = longcontext.split(tokens, plan)
        assert pieces.shape == (len(plan), 7)
        assert torch.equal(longcontext.merge(pieces, plan), tokens)
        assert torch.equal(longcontext.merge(pieces.float(), plan, "mean"), tokens.float())


def test_context_takes_the_chunk_with_most_before_it_and_mean_takes_all() -> None:
    plan = longcontext.chunks(6, 4, 2)
    pieces = torch.stack([torch.zeros(4), torch.ones(4)])
    assert longcontext.merge(pieces, plan).tolist() == [0, 0, 0, 0, 1, 1]
    assert longcontext.merge(pieces, plan, "mean").tolist() == [0, 0, 0.5, 0.5, 1, 1]
    pieces[1, 0] = float("nan")
    assert longcontext.merge(pieces, plan, "mean").tolist() == [0, 0, 0, 0.5, 1, 1]
    with pytest.raises(UserError, match="context or mean"):
        longcontext.merge(pieces, plan, "best")
    with pytest.raises(UserError, match="2 pieces for 1"):
        longcontext.merge(pieces, plan[:1])


def tiny() -> Any:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = lab.models.gpt2("gpt2", n_layer=2, n_embd=32, n_head=2, vocab_size=61, n_positions=64, bos_token_id=0,
                                eos_token_id=0, attention="sdpa")  # fmt: skip
    return model.eval()


@pytest.mark.parametrize("rows", [1, 7, 2048])
def test_token_losses_are_those_of_the_whole_logits(rows: int) -> None:
    model, tokens = tiny(), torch.randint(0, 61, (3, 20))
    losses = longcontext.token_losses(model, tokens, rows=rows)
    assert losses.shape == (3, 20) and losses[:, 0].isnan().all() and not losses.requires_grad
    wanted = model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(losses[:, 1:].mean(), wanted.detach())


def test_with_enough_overlap_a_causal_text_reads_the_same_only_in_its_first_chunk() -> None:
    model, tokens = tiny(), torch.randint(0, 61, (40,))
    whole = longcontext.token_losses(model, tokens[None])[0]
    plan = longcontext.chunks(40, 16, 8)
    merged = longcontext.merge(longcontext.token_losses(model, longcontext.split(tokens, plan)), plan)
    torch.testing.assert_close(merged[1:16], whole[1:16])
    assert not torch.allclose(merged[16:], whole[16:])  # less is read before it, and at other positions


def by_hand(rule: Any, length: int) -> torch.Tensor:
    return torch.tensor([[bool(rule(q, k)) for k in range(length)] for q in range(length)])


def test_masks_by_hand() -> None:
    pairs = {
        longcontext.causal(): lambda q, k: k <= q,
        longcontext.sliding_window(3): lambda q, k: q - 3 < k <= q,
        longcontext.sliding_window(1): lambda q, k: k == q,
        longcontext.global_and_window(3, 2): lambda q, k: k <= q and (q - k < 3 or k < 2),
        longcontext.global_and_window(3, 2, causal=False): lambda q, k: abs(q - k) < 3 or k < 2 or q < 2,
    }
    for mask, rule in pairs.items():
        assert torch.equal(longcontext.dense(mask, 12), by_hand(rule, 12))


def test_big_bird_adds_earlier_blocks_and_the_same_ones_every_time() -> None:
    settings: dict[str, Any] = {"length": 64, "links": 2, "block": 8}
    base = longcontext.dense(longcontext.global_and_window(8, 1), 64)
    found = longcontext.dense(longcontext.big_bird(8, 1, **settings), 64)
    assert torch.equal(found, longcontext.dense(longcontext.big_bird(8, 1, **settings), 64))
    assert not torch.equal(found, longcontext.dense(longcontext.big_bird(8, 1, seed=1, **settings), 64))
    assert (found | base).equal(found) and not found.triu(1).any()
    extra = (found & ~base).view(8, 8, 8, 8).any(dim=3).any(dim=1)
    assert (extra.sum(dim=1) <= 2).all() and extra.any()


@pytest.mark.parametrize("make", ["window", "global", "bigbird", "causal"])
def test_flex_attention_with_a_mask_is_dense_masked_sdpa(make: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = {
        "window": longcontext.sliding_window(100),
        "global": longcontext.global_and_window(40, 3),
        "bigbird": longcontext.big_bird(40, 3, length=512, links=1),
        "causal": longcontext.causal(),
    }[make]
    query, key, value = torch.randn(3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0))
    blocks = create_block_mask(mask, None, None, 512, 512, device="cpu")
    found = longcontext.flex("cpu")(query, key, value, block_mask=blocks)
    table = longcontext.dense(mask, 512)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=table)
    torch.testing.assert_close(found, wanted)
    counts = longcontext.block_counts(mask, 512)
    assert counts.total == 16
    assert counts.touched == int(blocks.to_dense().sum())
    assert 1 - counts.density == pytest.approx(blocks.sparsity() / 100)
    assert counts.full == int(blocks.full_kv_num_blocks.sum())
    ours = longcontext.block_mask(mask, 512)
    assert torch.equal(ours.to_dense(), blocks.to_dense()) and ours.shape == blocks.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(blocks, name)), name
    assert torch.equal(longcontext.flex("cpu")(query, key, value, block_mask=ours), found)


def test_flex_on_a_processor_is_silent_and_leaves_its_switch_alone(recwarn: pytest.WarningsRecorder) -> None:
    from torch.nn.attention import flex_attention as module

    flag = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    before = getattr(module, flag, None)
    x = torch.randn(1, 1, 128, 16)
    longcontext.flex("cpu")(x, x, x)
    assert not recwarn.list and getattr(module, flag, None) == before


def test_the_blocks_of_a_window_grow_with_the_length_and_those_of_causal_with_its_square() -> None:
    window = [longcontext.block_counts(longcontext.sliding_window(256), n).touched for n in (1024, 2048, 4096)]
    full = [longcontext.block_counts(longcontext.causal(), n).touched for n in (1024, 2048, 4096)]
    assert [b - a for a, b in pairwise(window)] == [3 * 8, 3 * 16]
    assert full == [s * (s + 1) // 2 for s in (8, 16, 32)]
    with pytest.raises(UserError, match="multiple"):
        longcontext.block_counts(longcontext.causal(), 100)


@pytest.mark.parametrize("call", [lambda: longcontext.sliding_window(0), lambda: longcontext.global_and_window(4, 0.5)])
def test_a_window_of_nothing_is_one_sentence(call: Any) -> None:
    with pytest.raises(UserError, match="at least 1"):
        call()


def test_the_picture_says_what_it_shows() -> None:
    axes = longcontext.picture({"causal": longcontext.causal(), "window": longcontext.sliding_window(8)}, 32)
    said = lab.plots.alt(axes)
    assert "causal" in said and "52%" in said and "window" in said
    assert lab.plots.png(axes).startswith(b"\x89PNG")


def test_a_model_attends_by_a_rule_while_it_is_asked_to() -> None:
    from transformers import LlamaConfig

    sizes: dict[str, int] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = lab.models.causal_lm(config).eval()
    tokens, seen = torch.randint(0, 61, (1, 20)), []
    wanted = longcontext.token_losses(model, tokens)

    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int = 20) -> torch.Tensor:
        seen.append(key.shape)
        table = longcontext.dense(longcontext.sliding_window(window), 20)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=table)

    with longcontext.attending(model, rule):
        found = longcontext.token_losses(model, tokens)
    torch.testing.assert_close(found[:, 1:], wanted[:, 1:])
    assert seen == [(1, 4, 20, 8)] * 2  # keys have as many heads as queries
    with longcontext.attending(model, lambda q, k, v: rule(q, k, v, window=4)):
        narrow = longcontext.token_losses(model, tokens)
    torch.testing.assert_close(narrow[:, 1:4], wanted[:, 1:4])
    assert not torch.allclose(narrow[:, 8:], wanted[:, 8:], atol=1e-6)
    assert model.config._attn_implementation == "sdpa" and len(seen) == 4
    torch.testing.assert_close(longcontext.token_losses(model, tokens), wanted, equal_nan=True)


def test_on_a_card_one_graph_serves_all_lengths_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for a card, with a backend that needs none: Dynamo's part does not know the difference."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="eager", **options))
    attend, mask = longcontext.flex("cuda"), longcontext.sliding_window(100)

    def run(attend: Any, length: int) -> Any:
        x = torch.randn(1, 3, length, 16)
        return attend(x, x, x, block_mask=longcontext.block_mask(mask, length, "cpu"))

    with compiling.fresh():
        graphs = [compiling.watched(run, attend, length).graphs for length in (256, 512, 768)]
        assert graphs == [1, 0, 0]
        # a model that compiles FlexAttention itself starts afresh: no recompilation, as if nothing had been there
        others = compiling.watched(run, torch.compile(flex_attention), 512)
        assert (others.graphs, others.recompilations) == (1, ())
