"""Checkpointing, accumulation, LoRA, generation, evaluation code: how the step is written."""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

from ..rule import Change, Frame, Number, Rule, Says, Setting, Told, Topic

NON_REENTRANT = Change(
    "non-reentrant checkpointing",
    "gradient_checkpointing_kwargs={'use_reentrant': False}   # torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
)

RULES = (
    Rule(
        "lora-checkpointing", "checkpointing",
        "the input of a checkpointed block is frozen: reentrant checkpointing then builds no graph, and the adapters inside get no gradients",
        clues=(
            Says(r"none of the inputs have requires_grad=true", 0.9),
            Says(r"element 0 of tensors does not require grad|does not require grad and does not have a grad_fn", 0.5),
            Told(("lora", "checkpointing"), 0.6),
            Topic("lora", 0.3), Topic("checkpointing", 0.3), Setting("lora", "is set", None, 0.1), Setting("checkpoint", ">=", 1, 0.2),
            Frame(r"utils/checkpoint\.py", 0.3),
        ),
        unless=(Says(r"use_reentrant['\"]?\s*[:=]\s*false"),),
        needs=(Says(r"none of the inputs have requires_grad|does not require grad|grads? (?:are|is|=+|stays?|remain\w*)[^.\n]{0,12}none|gradients? (?:\w+ ){0,3}(?:none|zero|missing|empty|lost|vanish\w*)|loss (?:\w+ ){0,4}(?:change|mov|decreas|constant|flat|budge)\w*|no grad\w*|without grad\w*|(?:not|n.t) (?:\w+ ){0,2}(?:train|learn|updat|receive|get)\w*|\.grad (?:is|==?) none|weights? (?:\w+ ){0,2}(?:never|not|n.t) (?:chang|updat|mov)\w*|have no grad", 0.1),),
        changes=(NON_REENTRANT, Change("or let the embedding's output require gradients", "model.enable_input_require_grads()"), Change("see that something is trainable", "model.print_trainable_parameters()")),
        lesson="03", source="peft#1142; torch/utils/checkpoint.py", base=0.4,
    ),
    Rule(
        "nothing-requires-grad", "checkpointing",
        "the loss reaches no trainable weight: everything is frozen, was computed without a graph, or was detached",
        clues=(Says(r"element 0 of tensors does not require grad|does not require grad and does not have a grad_fn", 1.0),),
        changes=(Change("look at what is trainable, and for no_grad, detach() or .item() before backward", "[n for n, p in model.named_parameters() if p.requires_grad]"), NON_REENTRANT),
        lesson="03", source="torch/autograd", base=-0.1,
    ),
    Rule(
        "checkpoint-differs", "checkpointing",
        "the recomputation of a checkpointed block saved other tensors than the forward pass did: something in it changed in between",
        clues=(Says(r"different number of tensors was saved during the original forward and recomputation|recomputed values for the following tensors have different metadata|checkpointerror|trying to backward through the graph a second time[\s\S]{0,400}checkpoint", 1.2),),
        changes=(
            Change("the same autocast, dropout and branches in both passes; no cache, no state that the block changes", "use_cache=False; torch.utils.checkpoint.checkpoint(..., use_reentrant=False, preserve_rng_state=True)"),
            Change("see which tensor", "torch.utils.checkpoint.checkpoint(..., debug=True)"),
        ),
        lesson="03", source="torch/utils/checkpoint.py", base=0.3,
    ),
    Rule(
        "graph-used-twice", "leak",
        "backward ran twice over one graph: a tensor of the last step (a hidden state, a summed loss) is still part of this step's graph",
        clues=(Says(r"trying to backward through the graph a second time", 1.1),),
        changes=(Change("cut it off from the last step", "state = state.detach()   # retain_graph=True only hides it, and keeps the memory"),),
        lesson="01", source="torch/autograd", base=0.1,
    ),
    Rule(
        "generation-after-training", "checkpointing",
        "checkpointing, train mode or a cache that is switched off were left on from training: every new token computes the whole text again",
        clues=(
            Told(("generation", "after training", "bad output"), 1.0, without=("int8", "oom", "worse loss", "nan")),
            Told(("generation", "checkpointing", "bad output"), 1.0, without=("oom",)),
            Says(r"use_cache ?(?:=|:|is|was|set to)? ?(?:set to )?`?(?:false|off|disabled)|past_key_values ?= ?none|caching is incompatible with gradient checkpointing|`?use_cache=true`? is incompatible with gradient checkpointing", 0.4),
            Frame(r":generate\b", 0.2), Setting("use_cache", "=", False, 0.3), Setting("checkpoint", ">=", 1, 0.2),
        ),
        needs=(Topic("generation", 0.0), Topic("bad output", 0.0)),
        unless=(Number("oom", "=", True), Topic("quantised")),
        changes=(Change("switch all three back before generating", "model.gradient_checkpointing_disable(); model.config.use_cache = True; model.eval()"),),
        lesson="10", source="trl#3891", base=0.3,
    ),
    Rule(
        "accumulation-not-weighted", "accumulation",
        "each micro-batch's loss is a mean over its own tokens, so that short ones count too much: it equals the large batch only when weighted by tokens",
        clues=(
            Told(("accumulation", "worse loss"), 1.2, without=("oom",)),
            Told(("batch 1", "worse loss", "long batch"), 0.7, without=("oom",)),
            Number("ratio.accumulated_loss", ">=", 1.02, 1.0, "the accumulated loss is {value} times the other"),
        ),
        unless=(Number("oom", "=", True), Number("error.kind", "!=", "none")),
        changes=(
            Change("divide the sum of token losses by the tokens of the whole step", "loss = cross_entropy(logits, labels, reduction='sum') / tokens_in_step"),
            Change("with Trainer: a version that passes num_items_in_batch to the loss (4.46 or later), and a model that takes it", "pip install -U transformers"),
        ),
        lesson="09", source="trl#2175; transformers, fix of October 2024", base=0.3,
    ),
    Rule(
        "sdpa-differs", "attention",
        "older transformers pass GPT-2's scaling options (scale_attn_by_inverse_layer_idx, reorder_and_upcast_attn) to eager attention only",
        clues=(
            Told(("flash", "eager attention", "mismatch", "outputs"), 1.1, without=("slow", "no gain", "memory")),
            Told(("flash", "outputs", "worse loss"), 0.6, without=("slow",)),
            Told(("reorder", "flash"), 1.1), Says(r"scale_attn_by_inverse_layer_idx|reorder_and_upcast_attn", 0.3, but=r"['\"]\s*:\s*(?:false|true)"),
        ),
        unless=(Number("oom", "=", True), Number("ratio.flash_speed", ">", 0)),
        changes=(Change("upgrade transformers, or keep eager attention for such a configuration", "pip install -U transformers   # attn_implementation='eager'"), Change("without those options, differences of rounding size are normal: compare in fp32", "torch.testing.assert_close(a.float(), b.float(), atol=1e-3, rtol=1e-3)")),
        lesson="06", source="transformers#44380", base=0.3,
    ),
    Rule(
        "index-beyond", "data",
        "an index is outside its table: a position beyond the model's 1024, a token id beyond the embedding, or a label beyond the classes",
        clues=(
            Says(r"indexselect\w*[\s\S]{0,200}assertion|srcindex < srcselectdimsize|index out of range in self|vectorized_gather_kernel[^\n]*assertion|`?t >= 0 && t < n_classes`?|target \d+ is out of bounds|ind >= 0 && ind < ind_dim_size|index out of bounds", 1.2, but=r"list index|string index|tuple index"),
            Says(r"device-side assert triggered", 0.7),
            Says(r"token indices sequence length is longer than the specified maximum sequence length", 0.3),
            Says(r"cublas_status_(?:not_initialized|execution_failed|internal_error)", 0.3),
            Frame(r"embedding|wpe|wte|cross_entropy|nll_loss", 0.3),
        ),
        needs=(Says(r"indexselect\w*|srcselectdimsize|index out of range in self|vectorized_gather|n_classes|is out of bounds|ind_dim_size|index out of bounds|device-side assert|longer than the specified maximum", 0.0),),
        unless=(Number("oom", "=", True),),
        changes=(
            Change("cut texts at the model's positions; grow the embedding after adding tokens", "tokenizer(..., truncation=True, max_length=1024); model.resize_token_embeddings(len(tokenizer))"),
            Change("find the line: on the processor the error comes where it happens", "CUDA_LAUNCH_BLOCKING=1   # or model.cpu()"),
            Change("check the batch", "assert input_ids.max() < model.config.vocab_size and input_ids.shape[1] <= 1024"),
        ),
        lesson="08", source="ATen embedding and nll_loss kernels", base=0.2,
    ),
    Rule(
        "devices-mixed", "offload",
        "tensors that meet lie on different devices: part of the model or the batch was not moved, or was dispatched elsewhere",
        clues=(Says(r"expected all tensors to be on the same device|but found at least two devices|tensor for (?:argument|'out')[^\n]{0,80}is on cpu|is on cpu,? but expected|expected [^\n]{0,40}on cuda|should be on the same device|stored in cuda|arguments are located on different gpus", 1.2),),
        changes=(
            Change("move the batch where the first weight is", "batch = {k: v.to(model.device) for k, v in batch.items()}"),
            Change("a model that device_map has dispatched is for inference; to train, keep it on one card", "from_pretrained(..., device_map={'': 0})"),
        ),
        lesson="05", source="accelerate, big model inference", base=0.2,
    ),
)  # fmt: skip
