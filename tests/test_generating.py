"""The meter of a writing loop, the bytes of a cache, and a decoding step as an ONNX graph."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

import labkit as lab
from labkit import exporting, generating
from labkit.units import UserError


def small(**changes):
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return lab.models.gpt2("gpt2", attention="sdpa", **{**sizes, **changes}).eval()


def test_the_first_token_is_timed_apart():
    def loop():
        time.sleep(0.2)
        for _ in range(5):
            yield torch.ones(3, 1, dtype=torch.int64)
            time.sleep(0.02)

    written = generating.timed(loop(), "cpu")
    assert written.tokens.shape == (3, 5) and written.new == 5
    assert written.first_seconds > 0.19 > written.later_seconds > 0.08
    assert written.token_seconds == written.later_seconds / 4
    assert written.tokens_per_second == 3 / written.token_seconds


def test_one_token_has_no_later_time_and_none_is_a_mistake():
    written = generating.timed([torch.ones(1, 1)], "cpu")
    assert written.token_seconds is None and written.tokens_per_second is None
    with pytest.raises(UserError, match="yields no token"):
        generating.timed([], "cpu")


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({"num_key_value_heads": 12}, 2 * 12 * 768 * 2),
        ({}, 2 * 12 * 768 * 2),
        ({"num_key_value_heads": 4}, 2 * 12 * 256 * 2),
        ({"head_dim": 128}, 2 * 12 * 12 * 128 * 2),
    ],
)
def test_a_token_takes_a_key_and_a_value_in_each_layer(changes, each):
    configuration = SimpleNamespace(num_hidden_layers=12, num_attention_heads=12, hidden_size=768, **changes)
    assert generating.token_bytes(configuration, torch.float16) == each


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_formula_is_what_a_cache_holds(kind):
    from transformers import DynamicCache, StaticCache

    model = small()
    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(torch.zeros(3, 7, dtype=torch.int64), **generating.with_cache(model, cache))
    held = 7 if kind == "dynamic" else 16
    assert generating.cache_bytes(cache) == 3 * held * generating.token_bytes(model.config, torch.float32)


def test_a_cache_does_not_change_the_scores(recwarn):
    from transformers import DynamicCache

    model, tokens = small(), torch.arange(10).view(1, 10)
    with torch.no_grad():
        whole = model(tokens, **generating.with_cache(model, None)).logits
        cache = DynamicCache()
        parts = [model(t, **generating.with_cache(model, cache)).logits for t in tokens.split(1, 1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    assert not recwarn


@pytest.mark.slow
def test_the_exported_step_reads_and_writes(tmp_path, capfd):
    import onnxruntime

    model = small()
    names = exporting.Exporting(model, tmp_path / "step.onnx").result()
    said = capfd.readouterr()
    assert said.err == said.out == ""
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    tokens = torch.randint(0, 64, (3, 9))
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
    past = [torch.zeros(3, 4, 0, 8).numpy() for _ in names]
    found = []
    for part in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
        feed = {"input_ids": part.numpy(), **{f"{n}.past": p for n, p in zip(names, past, strict=True)}}
        logits, *past = session.run(None, feed)
        found.append(torch.from_numpy(logits))
    assert torch.allclose(torch.cat(found, 1), whole, atol=1e-4)
    assert past[0].shape == (3, 4, 9, 8)


@pytest.mark.slow
def test_an_export_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)no graph.*has no attribute 'config'"):
        exporting.Exporting(torch.nn.Linear(2, 2), tmp_path / "step.onnx").result()


def test_an_export_that_takes_too_long_is_ended(tmp_path):
    export = exporting.Exporting(torch.nn.Linear(2, 2), tmp_path / "step.onnx")
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        export.result(timeout=0)
