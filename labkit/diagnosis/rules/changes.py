"""Changes that several rules share: what makes a step smaller."""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

from ..rule import Change, Setting, Told, Topic

CHECKPOINT = Change(
    "store the input of each block only, and compute the rest again in backward",
    "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})   # Trainer: gradient_checkpointing=True",
    recipe=(("checkpoint", 1),),
    unless=(Setting("checkpoint", ">=", 1),),
)
CHUNKED = Change(
    "compute the loss in pieces, so that never all logits exist",
    "lab.recipes.chunked_loss(model, tokens)   # or Liger's fused linear cross-entropy; TRL does it by itself from 1.7 on",
    recipe=(("loss", "chunked"),),
    unless=(Setting("loss", "=", "chunked"),),
)
STATES8 = Change(
    "keep the optimizer's moments in 8 bits",
    "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())   # Trainer: optim='adamw_bnb_8bit'",
    recipe=(("optimizer", "adam8bit"),),
    unless=(
        Setting("optimizer", "in", ("adam8bit", "sgd", "other")),
        Setting("lora", "is set"),
        Topic("lora"),
        Topic("8-bit optimizer"),
    ),
)
SDPA = Change(
    "use PyTorch's fused attention, which never stores the scores",
    "AutoModelForCausalLM.from_pretrained(..., attn_implementation='sdpa')",
    recipe=(("attention", "sdpa"),),
    unless=(Setting("attention", "in", ("sdpa", "flash")),),
)
SMALLER_BATCH = Change(
    "halve the micro-batch and accumulate twice as many: the same step in less memory",
    "per_device_train_batch_size //= 2; gradient_accumulation_steps *= 2",
    recipe=(("batch", "half"),),
    unless=(Setting("batch", "=", 1), Told(("batch 1",))),
)
SHORTER = Change(
    "shorter sequences: activations and logits shrink with them", "max_length=512", recipe=(("seq", "half"),)
)
HALF_WEIGHTS = Change(
    "train in bf16 weights with stochastic rounding, where the card has bf16 (4 instead of 8 bytes for weight and gradient)",
    "model.to(torch.bfloat16)",
    recipe=(("precision", "bf16"),),
    unless=(
        Setting("precision", "in", ("bf16", "fp16")),
        Setting("capability", "<", 80),
        Topic("turing"),
        Setting("lora", "is set"),
    ),
)
OFFLOAD_STATES = Change(
    "keep optimizer states and gradients on the host",
    "torchao.optim.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True)",
    recipe=(("offload", "optimizer+gradients"),),
    unless=(Setting("lora", "is set"), Topic("lora")),
)
IN_BACKWARD = Change(
    "step each parameter as soon as its gradient is there, so that gradients never exist together (no accumulation, no clipping over all)",
    "labkit.stepping.InBackward(...)   # in a recipe: gradients='in-backward'",
    recipe=(("gradients", "in-backward"),),
    unless=(Setting("accumulation", ">", 1), Setting("lora", "is set")),
)
EXPANDABLE = Change(
    "let the allocator grow its segments instead of cutting new ones",
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # before the process starts (PYTORCH_ALLOC_CONF from torch 2.9 on)",
    recipe=(("expandable_segments", True),),
)
FEWER = (CHECKPOINT, CHUNKED, SMALLER_BATCH, SDPA, STATES8)
