"""labkit.attention: which backend ran is seen by its operator; why others refuse agrees with the rules of memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import labkit as lab
from labkit import attention, machine
from labkit.memory.attention import choose

HALVES = (torch.float16, torch.bfloat16)


def meta(dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = (2, 12, 128, 64), grad: bool = True) -> Any:
    return [torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for _ in range(3)]


def real(**kind: Any) -> torch.Tensor:
    return torch.randn(2, 3, 16, 8, **kind)


# ------------------------------------------------------------------------------------------- watch


@pytest.mark.parametrize(
    ("options", "backend"),
    [({}, "flash"), ({"is_causal": True}, "flash"), ({"dropout_p": 0.1}, "math")],
)
@pytest.mark.parametrize("grad", [True, False])
def test_the_operator_tells_which_backend_ran(options: dict[str, Any], backend: str, grad: bool) -> None:
    q = real(requires_grad=grad)
    with attention.watch() as calls:
        scaled_dot_product_attention(q, q, q, **options)
    (call,) = calls
    assert (call.backend, call.grad, call.dtype) == (backend, grad, "float32")
    assert call.dropout == options.get("dropout_p", 0.0) and call.causal == options.get("is_causal", False)
    assert call.query == call.key == call.value == (2, 3, 16, 8)


def test_it_is_the_backend_that_was_allowed() -> None:
    q = real()
    for name, backend in (("MATH", "math"), ("FLASH_ATTENTION", "flash")):
        with sdpa_kernel(getattr(SDPBackend, name)), attention.watch() as calls:
            scaled_dot_product_attention(q, q, q)
        assert calls[0].backend == backend


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_inference_is_seen_too(context: Callable[[], Any]) -> None:
    q = real()
    with context(), attention.watch() as calls:
        out = scaled_dot_product_attention(q, q, q)
        with sdpa_kernel(SDPBackend.MATH):
            plain = scaled_dot_product_attention(q, q, q)
    assert [c.backend for c in calls] == ["flash", "math"]
    assert torch.allclose(out, plain, atol=1e-5)


def test_watching_changes_no_result_and_ends_with_the_block() -> None:
    q = real()
    with attention.watch() as calls:
        watched = scaled_dot_product_attention(q, q, q)
    assert torch.equal(watched, scaled_dot_product_attention(q, q, q))
    assert len(calls) == 1


def test_attention_written_out_is_no_call() -> None:
    q = real()
    with attention.watch() as calls:
        (q @ q.transpose(-2, -1)).softmax(-1) @ q
    assert calls == []


def test_a_mask_is_described() -> None:
    q = real()
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    with attention.watch() as calls:
        scaled_dot_product_attention(q, q, q, mask)
        scaled_dot_product_attention(q, q, q)
    assert [c.mask for c in calls] == ["bool (2, 1, 16, 16)", "none"]
    assert calls[0].on("rtx3090", "bfloat16").ran == "efficient"
    assert calls[1].on("rtx3090", "bfloat16").ran == "flash"
    assert calls[1].on("rtx3090").ran == "efficient"  # it was fp32


def test_a_call_of_training_is_judged_as_training() -> None:
    """On sm_86 and sm_89 flash has no backward for heads of more than 192 with dropout."""
    for grad, ran in ((True, "efficient"), (False, "flash")):
        q = torch.randn(1, 1, 4, 256, requires_grad=grad)
        with attention.watch() as calls:
            scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        assert calls[0].on("rtx4090", "float16").ran == ran


@pytest.mark.slow
def test_every_layer_of_a_model_and_of_a_prediction_is_seen() -> None:
    seen: dict[str, list[str]] = {}

    def experiment(device: torch.device) -> Callable[[], torch.Tensor]:
        with device:
            sizes = {"n_embd": 128, "n_head": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
            model = lab.models.gpt2("gpt2", attention="sdpa", n_layer=3, **sizes)
            tokens = torch.zeros(2, 32, dtype=torch.long)

        def step() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16), attention.watch() as calls:
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            seen["now"] = [call.backend for call in calls]
            return loss.detach()

        return step

    for card, backend in (("h200", "cudnn"), ("rtx4090", "flash"), ("rtx2070", "math")):
        lab.measure(experiment, card=card, trace=False, repeats=0)
        assert seen["now"] == [backend] * 3


# ------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize("card", list(machine.PRESETS))
def test_what_runs_is_what_memory_is_predicted_with(card: str) -> None:
    mask = torch.ones(128, 128, dtype=torch.bool, device="meta")
    capability = machine.preset(card).capability
    shapes = [(2, 12, 128, 64), (2, 12, 128, 36), (2, 12, 128, 256), (2, 12, 128, 320), (2, 12, 1, 64), (12, 128, 64)]
    for dtype, shape, m, p in itertools.product((torch.float32, *HALVES), shapes, (None, mask), (0.0, 0.1)):
        tensors = meta(dtype, shape)
        found = attention.explain(*tensors, m, dropout=p, causal=m is None, card=card)
        assert found.ran == choose(capability, *tensors, m, p, m is None, cudnn=True), (dtype, shape, m is None, p)
        assert {found.ran, *found.could, *found.refused} == set(attention.BACKENDS)
        assert all(found.refused.values()), "a refusal without a reason"


@pytest.mark.parametrize(
    ("card", "dtype", "masked", "backend", "reason"),
    [
        ("rtx3090", torch.float32, False, "flash", "takes no float32"),
        ("rtx3090", torch.bfloat16, True, "flash", "takes no mask"),
        ("rtx3090", torch.float32, True, "flash", "takes no float32; takes no mask"),
        ("rtx2070", torch.float16, False, "flash", "sm_75: too old"),
        ("rtx2070", torch.bfloat16, False, "efficient", "takes no bfloat16"),
        ("rtx3090", torch.bfloat16, False, "cudnn", "sm_86: PyTorch prefers it on sm_90 and sm_100 only"),
        ("h200", torch.float32, True, "cudnn", "takes no float32"),
    ],
)
def test_reasons_are_all_that_is_in_the_way_and_no_more(
    card: str, dtype: torch.dtype, masked: bool, backend: str, reason: str
) -> None:
    mask = torch.ones(128, 128, dtype=torch.bool, device="meta") if masked else None
    assert attention.explain(*meta(dtype), mask, card=card).refused[backend] == reason


def test_a_head_that_is_too_wide_is_the_reason() -> None:
    found = attention.explain(*meta(shape=(2, 12, 128, 320)), card="h200")
    assert (found.ran, found.refused["flash"]) == ("efficient", "head size 320")
    in_training = attention.explain(*meta(torch.float32, (2, 12, 128, 256)), dropout=0.1, card="rtx4090")
    assert in_training.refused["flash"] == "takes no float32; head size 256"
    at_rest = attention.explain(*meta(torch.float32, (2, 12, 128, 256), grad=False), dropout=0.1, card="rtx4090")
    assert at_rest.refused["flash"] == "takes no float32"


def test_what_is_switched_off_says_so_and_stays_off() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        good = attention.explain(*meta(), card="h200")
        none = attention.explain(*meta(torch.float32), card="h200")
        assert torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
    assert (good.ran, good.could, good.refused["cudnn"]) == ("flash", (), "switched off")
    assert (none.ran, none.refused["flash"], none.refused["math"]) == (None, "takes no float32", "switched off")
    assert "no kernel runs" in str(none)


def test_without_a_name_it_is_the_default_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CARD", "rtx2070")
    found = attention.explain(*meta())
    assert (found.card, found.ran, found.source) == ("rtx2070", "efficient", "predicted")


def test_a_choice_has_a_word_for_every_backend() -> None:
    found = attention.explain(*meta(), card="rtx4090")
    assert [found.word(b) for b in attention.BACKENDS] == [
        "sm_89: PyTorch prefers it on sm_90 and sm_100 only", "runs", "could run", "could run",
    ]  # fmt: skip
    assert str(found).startswith("flash runs    predicted · rtx4090")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (lambda: (torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2).half()), "dtype"),
        (lambda: (*meta(), torch.ones(128, 128)), "devices"),
        (lambda: (1, 2, 3), "tensors"),
        (lambda: (torch.zeros(2), torch.zeros(2), torch.zeros(2)), "dimensions"),
    ],
)
def test_tensors_that_do_not_go_together_are_one_sentence(arguments: Callable[[], Any], word: str) -> None:
    with pytest.raises(lab.UserError, match=word):
        attention.explain(*arguments())


def test_reasons_are_read_from_what_pytorch_warns_of() -> None:
    """As an H200 with torch 2.11 warned, for fp32 with a mask when only flash may run."""
    place = " (Triggered internally at /pytorch/aten/src/ATen/native/transformers/sdp_utils_cpp.h:91.)"
    off = "has been runtime disabled."
    dtypes = "Expected query, key and value to all be of dtype: {Half, BFloat16}"
    messages = [
        "Memory efficient kernel not used because:", f"Memory Efficient attention {off}",
        "Flash attention kernel not used because:", f"{dtypes}. Got Query dtype: float, Key dtype: float instead.",
        "cuDNN attention kernel not used because:", f"cuDNN attention {off}",
    ]  # fmt: skip
    found = attention.reasons([message + place for message in messages])
    assert found == {
        "efficient": "Memory Efficient attention has been runtime disabled", "flash": dtypes,
        "cudnn": "cuDNN attention has been runtime disabled",
    }  # fmt: skip
    assert attention.reasons(["Something else"]) == {}


@pytest.mark.gpu
def test_on_a_card_the_rules_say_what_the_card_says(capfd: pytest.CaptureFixture[str]) -> None:
    for dtype, masked, p in itertools.product((torch.float32, *HALVES), (False, True), (0.0, 0.1)):
        q = torch.randn(2, 12, 128, 64, dtype=dtype, device="cuda", requires_grad=True)
        mask = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril() if masked else None
        found = attention.explain(q, q, q, mask, dropout=p, causal=not masked)
        preset = next(c.name for c in machine.PRESETS.values() if c.capability == torch.cuda.get_device_capability())
        ruled = attention.explain(q, q, q, mask, dropout=p, causal=not masked, card=preset)
        assert (found.source, ruled.source) == ("measured", "predicted")
        assert (found.ran, set(found.could)) == (ruled.ran, set(ruled.could)), (dtype, masked, p)
        assert all(found.refused.values())
        assert ("attn_mask" in found.refused.get("flash", "")) == masked or dtype is torch.float32
    assert not capfd.readouterr().err, "PyTorch wrote past Python"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        none = attention.explain(*(torch.randn(1, 1, 64, 64, device="cuda") for _ in range(3)))
    assert none.ran is None and "dtype" in none.refused["flash"]


def test_warnings_are_heard_and_not_shown() -> None:
    def loud() -> None:
        warnings.warn("first", stacklevel=1)
        warnings.warn("second", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attention.warned(loud) == ["first", "second"]
        assert attention.warned(lambda: None) == []
