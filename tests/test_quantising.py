"""Quantised weights and states: counted bytes are those that bitsandbytes takes, and blocks compute nearly the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import labkit as lab
from labkit import quantising

SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return lab.models.gpt2("gpt2", attention="sdpa", **SMALL).eval()


def stepped_state_bytes(sizes: list[int]) -> int:
    """Bytes that AdamW8bit really keeps after one step over tensors of these sizes."""
    import bitsandbytes as bnb

    tensors = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    optimizer = bnb.optim.AdamW8bit(tensors)
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    optimizer.step()
    held = {
        t.data_ptr(): t.numel() * t.element_size()
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    }
    return sum(held.values())


@pytest.mark.parametrize("sizes", [[4096], [4095], [4097, 100], [256 * 40, 256 * 40 + 1, 4095, 1]])
def test_8_bit_states_take_what_the_formula_says(sizes: list[int]) -> None:
    assert sum(quantising.adam_state_bytes(sizes).values()) == stepped_state_bytes(sizes)


def test_states_of_gpt2_by_part() -> None:
    with torch.device("meta"):
        sizes = [p.numel() for p in lab.models.gpt2("gpt2").parameters()]
    assert quantising.adam_state_bytes(sizes, bits=32) == {"moments": 8 * 124_439_808}
    parts = quantising.adam_state_bytes(sizes)
    assert parts["moments"] == 2 * (124_439_808 - 121_344)
    assert parts["small tensors"] == 8 * 121_344
    with pytest.raises(lab.UserError, match="bits"):
        quantising.adam_state_bytes(sizes, bits=4)


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.02), ("nf4", 0.2)])
def test_quantised_blocks_take_the_counted_bytes_and_compute_nearly_the_same(
    model: Any, scheme: str, most: float
) -> None:
    tokens = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = quantising.weight_bytes(model, scheme)
    quantised = quantising.quantise_blocks(copy.deepcopy(model), scheme)
    held = quantising.held_bytes(quantised)
    assert (held["quantised"], held["scales"]) == (expected["blocks"], expected["scales"])
    with torch.no_grad():
        exact, got = model(input_ids=tokens).logits, quantised(input_ids=tokens).logits
    assert 0 < (got - exact).norm() / exact.norm() < most
    assert quantising.held_bytes(quantised) == held  # a forward pass keeps nothing more


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_it_is_what_transformers_loads(model: Any, scheme: str, tmp_path: Any) -> None:
    """Same classes at the same places, same bytes, same results as ``from_pretrained(quantization_config=...)``."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = {"load_in_8bit": True} if scheme == "int8" else {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32,
    }  # fmt: skip
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**how)
    )
    ours = quantising.quantise_blocks(copy.deepcopy(model), scheme)
    kinds = [{name: type(m).__name__ for name, m in x.named_modules()} for x in (loaded, ours)]
    assert kinds[0] == kinds[1]
    for part in ("quantised", "scales"):
        assert quantising.held_bytes(loaded)[part] == quantising.held_bytes(ours)[part]
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, ours(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)


def test_weights_by_scheme(model: Any) -> None:
    numbers = sum(p.numel() for p in model.parameters())
    assert sum(quantising.weight_bytes(model, "fp32").values()) == 4 * numbers
    assert sum(quantising.weight_bytes(model, "bf16").values()) == 2 * numbers
    assert quantising.products(model)["transformer.h.0.mlp.c_fc"] == (64, 256)  # inputs, outputs of a Conv1D
    assert len(quantising.products(model)) == 8 and "lm_head" not in quantising.products(model)
    for scheme in ("int4", "INT8", ""):
        with pytest.raises(lab.UserError, match="scheme"):
            quantising.weight_bytes(model, scheme)
    with pytest.raises(lab.UserError, match="int8 or nf4"):
        quantising.quantise_blocks(model, "bf16")


def test_a_model_of_linear_layers_is_quantised_too() -> None:
    blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU())])
    model = torch.nn.Module()
    model.blocks, model.head = blocks, torch.nn.Linear(32, 8)
    assert quantising.products(model) == {"blocks.0.0": (64, 32)}
    quantising.quantise_blocks(model, "int8")
    assert type(model.blocks[0][0]).__name__ == "Linear8bitLt" and type(model.head) is torch.nn.Linear


def test_adapters_train_beside_quantised_blocks(model: Any) -> None:
    import peft

    frozen = quantising.quantise_blocks(copy.deepcopy(model), "nf4")
    tuned = peft.get_peft_model(frozen, peft.LoraConfig(r=4, target_modules=["c_attn"])).train()
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert len(trained) == 4  # two matrices in each of two blocks
    tokens = torch.arange(16)[None]
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in trained)
    assert not any(p.requires_grad for p in frozen.parameters() if p.dtype is torch.uint8)
