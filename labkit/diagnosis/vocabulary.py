"""What settings are called: by a recipe, by Trainer, accelerate, DeepSpeed, nanoGPT and trl."""

# ruff: noqa: E501 (a pattern stands on one line, where it can be searched for)
from __future__ import annotations

import re
from typing import Any

# the vocabulary of rules; the first block has the names of a recipe's fields
NAMES: dict[str, str] = {
    "model": "name of the model", "batch": "sequences in a micro-batch", "seq": "tokens in a sequence",
    "precision": "fp32, amp-fp16, amp-bf16, bf16 or fp16", "attention": "eager, sdpa or flash", "checkpoint": "0: none",
    "optimizer": "as a recipe names it", "loss": "full or chunked", "activation": "of the feed-forward part",
    "accumulation": "micro-batches in a step", "dropout": "",
    "compile": "", "lora": "", "quantised": "int8 or int4", "reentrant": "", "use_cache": "", "loss_only": "",
    "eval_accumulation": "", "eval_batch": "", "evaluates": "", "device_map": "", "cards": "processes or cards",
    "parallel": "ddp, dp, fsdp or deepspeed", "zero_stage": "", "offload": "", "workers": "", "pinned": "",
    "batch_search": "", "paged": "", "learning_rate": "", "clip": "", "capability": "of the card, as 75", "expandable": "",
    "group_by_length": "", "packing": "", "warmup": "",
}  # fmt: skip
# what Trainer, accelerate, DeepSpeed, nanoGPT and trl call them
CALLED: dict[str, tuple[str, ...]] = {
    "model": ("model", "model_name_or_path", "model_name", "pretrained_model_name_or_path", "init_from", "model_type", "base_model", "config_name"),
    "batch": ("batch", "per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size", "train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu", "device_batch_size", "micro_batch"),
    "seq": ("seq", "block_size", "max_seq_length", "max_length", "max_seq_len", "seq_len", "sequence_length", "context_length", "sequence_len", "cutoff_len"),
    "accumulation": ("accumulation", "gradient_accumulation_steps", "grad_accum", "accumulation_steps", "accumulate_grad_batches", "grad_accumulation_steps"),
    "eval_batch": ("per_device_eval_batch_size", "eval_batch_size"),
    "eval_accumulation": ("eval_accumulation_steps",),
    "learning_rate": ("learning_rate", "lr"),
    "clip": ("max_grad_norm", "gradient_clipping", "grad_clip"),
    "workers": ("dataloader_num_workers", "num_workers"),
    "dropout": ("dropout",),
    "warmup": ("warmup_steps", "warmup_ratio", "warmup_iters"),
    "zero_stage": ("zero_stage", "zero_optimization.stage", "stage"),
    "cards": ("world_size", "nproc_per_node", "num_processes", "n_gpu", "num_gpus"),
}  # fmt: skip
SWITCHES: dict[str, tuple[str, Any]] = {  # a name that is on: what it sets
    "fp16": ("precision", "amp-fp16"), "bf16": ("precision", "amp-bf16"), "gradient_checkpointing": ("checkpoint", 1),
    "torch_compile": ("compile", True), "compile": ("compile", True), "load_in_8bit": ("quantised", "int8"), "load_in_4bit": ("quantised", "int4"),
    "use_reentrant": ("reentrant", True), "prediction_loss_only": ("loss_only", True), "auto_find_batch_size": ("batch_search", True),
    "dataloader_pin_memory": ("pinned", True), "pin_memory": ("pinned", True), "use_cache": ("use_cache", True), "do_eval": ("evaluates", True),
    "group_by_length": ("group_by_length", True), "packing": ("packing", True), "use_peft": ("lora", True), "use_lora": ("lora", True),
    "cpu_offload": ("offload", True), "offload_optimizer": ("offload", True), "activation_offloading": ("offload", True), "lora": ("lora", True),
    "expandable_segments": ("expandable", True),
}  # fmt: skip
WORDS: dict[str, tuple[str, dict[str, Any]]] = {  # a name whose value is a word: what it sets
    "mixed_precision": ("precision", {"fp16": "amp-fp16", "bf16": "amp-bf16", "no": "fp32"}),
    "precision": ("precision", {"fp16": "amp-fp16", "16": "amp-fp16", "16-mixed": "amp-fp16", "bf16-mixed": "amp-bf16", "bf16": "bf16", "bf16-true": "bf16", "16-true": "fp16", "fp32": "fp32", "32": "fp32", "32-true": "fp32", "amp-fp16": "amp-fp16", "amp-bf16": "amp-bf16"}),
    "dtype": ("precision", {"float16": "amp-fp16", "bfloat16": "amp-bf16", "torch.bfloat16": "bf16", "torch.float16": "fp16", "float32": "fp32"}),
    "torch_dtype": ("precision", {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "torch.float16": "fp16"}),
    "attn_implementation": ("attention", {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash"}),
    "attention": ("attention", {"eager": "eager", "sdpa": "sdpa"}),
}  # fmt: skip
OPTIMIZERS = (
    (r"8bit|8-bit", "adam8bit"), (r"fused", "adamw-fused"), (r"forloop", "adamw-forloop"), (r"sgd-momentum|momentum", "sgd-momentum"),
    (r"\bsgd", "sgd"), (r"adam", "adamw"), (r"adafactor|lion|muon|sophia|galore|lomo", "other"),
)  # fmt: skip
# a file with one of these is a configuration of a run, not a model's config.json
KNOWN = {name for names in CALLED.values() for name in names} | set(SWITCHES) | set(WORDS) | {
    "optim", "optimizer", "peft_type", "device_map", "eval_strategy", "evaluation_strategy", "parallel_mode", "lora_r", "lora_alpha", "deepspeed",
}  # fmt: skip


_WORD = r"[\"']?[\w./\-+]*[\w+][\"']?"
# --name value, name=value, "name": value; a few names with a space only
ASSIGNED = re.compile(
    rf"--(?P<flag>[\w\-]{{2,40}})(?:[= ]{{1,2}}(?!-)(?P<of_flag>{_WORD}))?"
    rf"|[\"']?\b(?P<name>[A-Za-z]\w{{1,40}})[\"']? {{0,3}}[=:] {{0,3}}(?P<of_name>{_WORD})"
    r"|\b(?P<plain>batch[ _]size|block_size|micro_batch_size) (?P<of_plain>\d+)\b",
    re.I,
)
# names of configurations that say nothing, or something else, in a text
NOT_IN_TEXT = {"loss", "step", "stage", "compile", "dropout", "model_type"}
CARDS = (
    (re.compile(r"\bt4s?\b|rtx ?20[678]0|\b20[678]0(?: ?ti| super)?\b|titan rtx|gtx ?16[56]0|\bsm_?75\b|quadro rtx|turing", re.I), 75),
    (re.compile(r"\bv100|\bsm_?70\b|titan v\b|volta", re.I), 70),
    (re.compile(r"\bp100\b|gtx ?10[5678]0|\b10[678]0 ?ti|\bp40\b|pascal|\bsm_?6[01]\b", re.I), 61),
    (re.compile(r"\ba100|\ba30\b|\bsm_?80\b", re.I), 80),
    (re.compile(r"rtx ?30\d0|\b30[5-9]0(?: ?ti)?\b|\ba10g?\b|\ba40\b|rtx a\d000|\bsm_?86\b", re.I), 86),
    (re.compile(r"rtx ?40\d0|\b40[5-9]0(?: ?ti| super)?\b|\bl4\b|\bl40s?\b|\bsm_?89\b", re.I), 89),
    (re.compile(r"\bh[12]00\b|\bgh200\b|\bsm_?90a?\b", re.I), 90),
    (re.compile(r"rtx ?50\d0|\bb[12]00\b|\bsm_?1[02]0\b|blackwell", re.I), 120),
)  # fmt: skip
GPT2 = re.compile(r"\bgpt-?2[-_ ]?(medium|large|xl)\b|\bgpt-?2\b|\bgpt[- ](large|medium|xl)\b", re.I)
