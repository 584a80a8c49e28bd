"""Causes of running out of the card's memory. Sources: field-tested issues named by repository and number."""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

from ..rule import Change, Frame, Number, Rule, Says, Setting, Told, Topic

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
    "lab.stepping, with gradients='in-backward'   # a recipe's field",
    recipe=(("gradients", "in-backward"),),
    unless=(Setting("accumulation", ">", 1), Setting("lora", "is set")),
)
EXPANDABLE = Change(
    "let the allocator grow its segments instead of cutting new ones",
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # before the process starts (PYTORCH_ALLOC_CONF from torch 2.9 on)",
    recipe=(("expandable_segments", True),),
)
FEWER = (CHECKPOINT, CHUNKED, SMALLER_BATCH, SDPA, STATES8)

RULES = (
    Rule(
        "fragmentation", "fragmentation",
        "the free memory is there, but in pieces: the allocator holds segments that no single request fits into",
        needs=(Number("oom", "=", True, 0.4),),
        clues=(
            Number("oom.scattered_share", ">=", 0.15, 0.5, "{value} of what PyTorch reserved is not allocated"),
            Number("oom.scattered_covers", ">=", 1.0, 0.7, "free and scattered memory together are {value} times what was wanted"),
            Number("oom.scattered_bytes", ">=", 400 << 20, 0.3, "{value} lie in pieces"),
            Told(("oom", "over time"), 0.2),
        ),
        unless=(Number("oom.scattered_share", "<", 0.08), Number("oom.scattered_bytes", "<", 64 << 20)),
        changes=(EXPANDABLE, Change("let lengths vary less: pad to multiples of 64, or pack", "DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=64)")),
        lesson="01", source="PyTorch CUDA notes, memory management; torchtune#1185", base=0.3,
    ),
    Rule(
        "other-process", "memory",
        "another process holds most of the card: a notebook that still runs, a run that was not ended, a desktop or another user",
        needs=(Number("oom", "=", True, 0.3),),
        unless=(Number("oom.allowed_bytes", ">", 0),),
        clues=(
            Number("oom.others_bytes", ">=", 1 << 30, 0.9, "others hold {value}"),
            Number("oom.others_bytes", ">=", 4 << 30, 0.3, "others hold {value}"),
        ),
        changes=(
            Change("see who it is and end it, or choose another card", "nvidia-smi   # then: kill PID, restart the old kernel, or CUDA_VISIBLE_DEVICES=1"),
            Change("`labkit doctor` names the processes on the card", "labkit doctor"),
        ),
        lesson="00", source="PyTorch CUDACachingAllocator.cpp lists them in the message", base=0.4,
    ),
    Rule(
        "other-process-told", "memory",
        "the memory of an earlier run is still held by its process",
        clues=(
            Says(r"(?:nvidia-smi|card|gpu)[^.\n]{0,60}(?:still (?:shows|holds|occupied|uses|in use)|not (?:freed|released))[^.\n]{0,80}(?:no process|after (?:killing|i killed|ctrl|closing|the script|stopp|it crash)|process (?:is )?(?:gone|ended|finished))", 1.0),
        ),
        changes=(Change("find the process and end it", "nvidia-smi; fuser -v /dev/nvidia*   # then kill PID; in a notebook: restart the kernel"),),
        lesson="00", source="PyTorch FAQ: my GPU memory isn't freed properly",
    ),
    Rule(
        "evaluation-keeps-logits", "evaluation",
        "evaluation keeps the logits of every batch until the end: batch x tokens x vocabulary values for the whole set",
        clues=(
            Number("oom.phase", "=", "evaluation", 1.0, "it came during evaluation"),
            Frame(r"nested_concat|nested_gather|gather_for_metrics|_pad_across_processes|torch_pad_and_concat|preds_host|all_preds", 0.6),
            Told(("oom", "evaluation"), 1.1, without=()),
            Told(("memory grows", "evaluation"), 1.1),
            Told(("killed", "evaluation"), 1.1),
            Setting("loss_only", "=", False, 0.1),
        ),
        unless=(Setting("loss_only", "=", True), Number("oom.phase", "in", ("optimizer", "loading", "ddp", "generation"))),
        changes=(
            Change("keep only what the metric needs of each batch", "Trainer(..., preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))"),
            Change("keep the loss alone", "TrainingArguments(prediction_loss_only=True)", unless=(Setting("loss_only", "=", True),)),
            Change("move what is kept to the host every few batches, and use a smaller evaluation batch", "TrainingArguments(eval_accumulation_steps=8, per_device_eval_batch_size=4)"),
            Change("in a loop of your own: no graph, and numbers instead of tensors", "with torch.no_grad(): total += model(**batch).loss.item()"),
        ),
        lesson="01", source="transformers#8476, #15466", base=0.5,
    ),
    Rule(
        "optimizer-state", "optimizer",
        "weights, gradients and the optimizer's two moments (16 bytes a parameter in fp32) fill the card, whatever the batch",
        clues=(
            Number("oom.phase", "=", "optimizer", 1.2, "it came in the optimizer's step, where its state is born"),
            Told(("oom", "large model", "batch 1"), 1.1),
            Told(("oom", "optimizer", "large model"), 1.0),
            Told(("oom", "optimizer"), 0.8, without=("8-bit optimizer", "evaluation")),
            Says(r"(?:fail\w*|oom|out of memory|crash\w*|runs? out)[^.\n]{0,60}(?:at|in|on|during|when|calling)[^.\n]{0,20}optimi[sz]er\.?(?: ?step|\.step)|optimi[sz]er(?:\.step| step)[^.\n]{0,60}(?:oom|out of memory|runs? out)", 1.0),
            Number("held.states_share", ">=", 0.45, 0.9, "weights, gradients and states are {value} of what is alive"),
            Setting("batch", "=", 1, 0.2),
            Number("oom", "=", True, 0.3),
            Setting("model", "in", ("gpt2-large", "gpt2-xl", "openai-community/gpt2-large", "openai-community/gpt2-xl"), 0.6),
        ),
        unless=(Setting("lora", "is set"), Topic("lora"), Number("oom.phase", "in", ("evaluation", "generation"))),
        changes=(STATES8, OFFLOAD_STATES, IN_BACKWARD, HALF_WEIGHTS, Change("train few weights instead of all", "peft.get_peft_model(model, LoraConfig(fan_in_fan_out=True, target_modules=['c_attn']))")),
        lesson="04", source="ru-gpts#27; bytes a parameter: 4 + 4 + 8", base=0.2,
    ),
    Rule(
        "logits", "logits",
        "the logits and what the loss makes of them (fp32 copy, log-softmax, gradient) are the largest tensors: batch x tokens x vocabulary",
        needs=(Number("oom", "=", True, 0.3),),
        clues=(
            Number("oom.place", "=", "loss", 0.9, "it came in the loss head"),
            Number("held.logits_share", ">=", 0.3, 0.9, "logits and loss are {value} of what is alive"),
            Number("oom.logits_tokens", ">", 0, 0.7, "what was wanted is one copy of the logits of {value} tokens"),
            Frame(r"cross_entropy|forcausallmloss|log_softmax|lm_head|logits\.float|shift_logits", 0.4),
        ),
        unless=(Number("oom.phase", "in", ("evaluation", "optimizer", "loading", "ddp", "generation", "gather")), Setting("loss", "=", "chunked")),
        changes=(CHUNKED, SMALLER_BATCH, SHORTER),
        lesson="08", source="vocabulary 50257 x 4 bytes x tokens, held three times", base=0.3,
    ),
    Rule(
        "logits-told", "logits",
        "the logits and what the loss makes of them are the largest tensors: batch x tokens x vocabulary",
        clues=(
            Says(r"(?:logits|lm_head|cross[ _]entropy|loss (?:head|layer|computation)|vocab\w*)[^.\n]{0,90}(?:(?:most|largest|huge|all|lots?|\d[\d.]* ?(?:gb|gib)|spikes?|peak|blows?)[^.\n]{0,30}(?:memory|vram|tensor|gb|gib|peak)|out of memory|\boom\b)|(?:oom|out of memory|memory spike|peak)[^.\n]{0,50}(?:logits|cross[ _]entropy|lm_head|loss computation)", 1.0, but=r"no longer|fixed|chunked|to avoid|evaluat|\beval"),
        ),
        unless=(Number("oom.phase", "in", ("evaluation", "optimizer")), Setting("loss", "=", "chunked")),
        changes=(CHUNKED, SMALLER_BATCH, SHORTER),
        lesson="08", source="vocabulary 50257 x 4 bytes x tokens, held three times",
    ),
    Rule(
        "attention-scores", "attention",
        "eager attention stores scores, softmax and dropout mask: batch x heads x tokens x tokens values, three times a block",
        needs=(Number("oom", "=", True, 0.4),),
        clues=(
            Number("oom.place", "=", "attention", 0.5, "it came in attention"),
            Number("oom.scores_seq", ">", 0, 0.6, "what was wanted is one matrix of scores of {value} tokens"),
            Setting("attention", "=", "eager", 0.5),
            Number("held.attention_share", ">=", 0.35, 0.6, "what attention stores is {value} of what is alive"),
            Frame(r"eager_attention|:_attn\b|attn_weights|softmax\(|baddbmm|attention_scores|attn_dropout|torch\.matmul\(q", 0.6),
            Topic("eager attention", 0.2),
        ),
        unless=(Setting("attention", "in", ("sdpa", "flash")), Number("oom.phase", "in", ("optimizer", "evaluation", "loading", "ddp"))),
        changes=(SDPA, CHECKPOINT, SHORTER, SMALLER_BATCH),
        lesson="06", source="transformers#31172", base=0.3,
    ),
    Rule(
        "attention-scores-told", "attention",
        "eager attention stores scores, softmax and dropout mask: they grow with the square of the sequence",
        clues=(Says(r"(?:memory|vram|oom|out of memory)[^.\n]{0,80}(?:quadratic\w*|square of|squared|n\^?2|4 ?x|four times|quadrupl\w*)[^.\n]{0,80}(?:seq\w*|length|context|tokens|attention)|(?:seq\w*|context|length)[^.\n]{0,60}(?:memory|vram)[^.\n]{0,30}(?:quadrupl\w*|quadratic\w*|4 ?x|four times)|doubl\w*[^.\n]{0,30}(?:seq\w*|context|length)[^.\n]{0,50}(?:quadrupl\w*|four times|4 ?x)[^.\n]{0,20}(?:memory|vram)?", 1.0),),
        unless=(Setting("attention", "in", ("sdpa", "flash")),),
        changes=(SDPA, CHECKPOINT, SHORTER), lesson="06", source="transformers#31172",
    ),
    Rule(
        "weights-alone", "memory",
        "the weights do not fit: it failed before the first step, while the model was loaded or moved to the card",
        needs=(Number("oom", "=", True, 0.5),),
        clues=(
            Number("oom.phase", "=", "loading", 0.8, "it came while the model was loaded"),
            Number("oom.phase", "=", "moving", 0.8, "it came while the model was moved to the card"),
            Frame(r":(?:_apply|convert|from_pretrained)\b|\.to\(|\.cuda\(", 0.2),
        ),
        changes=(
            Change("load in 16 bits, or in 8 or 4 where it is not trained whole", "from_pretrained(..., dtype=torch.bfloat16)   # or quantization_config=BitsAndBytesConfig(load_in_4bit=True)"),
            Change("make the model on the card in its final type, once: a load on the host and a second copy need room twice", "from_pretrained(..., device_map={'': 0})"),
            Change("see what else holds the card", "labkit doctor"),
        ),
        lesson="05", source="accelerate, big model inference", base=0.25,
    ),
    Rule(
        "kv-cache", "memory",
        "generation keeps keys and values of every token: layers x 2 x batch x tokens x width",
        needs=(Number("oom", "=", True, 0.4),),
        clues=(
            Number("oom.phase", "=", "generation", 0.7, "it came while text was generated"),
            Number("oom.place", "=", "cache", 0.5, "it came in the cache"),
            Told(("oom", "generation"), 0.7),
        ),
        changes=(
            Change("fewer sequences or tokens at once, and no graph", "with torch.inference_mode(): model.generate(..., max_new_tokens=128, num_return_sequences=1)"),
            Change("after training in the same process: drop gradients and optimizer first", "optimizer.zero_grad(set_to_none=True); del optimizer; torch.cuda.empty_cache()"),
            Change("16-bit weights and cache", "model.to(torch.bfloat16)", unless=(Setting("capability", "<", 80),)),
        ),
        lesson="10", source="transformers, cache documentation", base=0.2,
    ),
    Rule(
        "activations", "memory",
        "activations, kept from forward for backward, grow with batch and sequence and fill the card",
        needs=(Number("oom", "=", True, 1.0),),
        clues=(
            Number("held.activation_share", ">=", 0.4, 0.4, "activations are {value} of what is alive"),
            Number("oom.phase", "in", ("forward", "backward"), 0.1, "it came in {value}"),
            Number("oom.place", "in", ("mlp", "checkpoint"), 0.1),
        ),
        unless=(Number("oom.phase", "in", ("evaluation", "optimizer", "loading", "moving", "ddp", "gather", "generation")),),
        changes=FEWER,
        lesson="03", source="about 34 x width bytes a token and block",
    ),
    Rule(
        "activations-told", "memory",
        "the step needs more than the card has; with a batch above one, mostly for activations",
        clues=(Told(("oom", "gpu"), 1.0),),
        unless=(Number("oom", "=", True),),
        changes=(*FEWER, Change("give the whole error text to `labkit diagnose`: its numbers tell which part it is", "labkit diagnose --file error.txt")),
        lesson="01", source="", base=-0.4,
    ),
    Rule(
        "accumulation-floor", "accumulation",
        "accumulation cannot go below one sequence: what fails at batch 1 fails with any number of accumulation steps",
        clues=(
            Told(("oom", "accumulation", "batch 1"), 1.3),
            Told(("oom", "accumulation"), 1.05, without=("worse loss", "evaluation")),
            Number("oom", "=", True, 0.4),
            Setting("batch", "=", 1, 0.4),
            Setting("accumulation", ">", 1, 0.5),
        ),
        unless=(Number("oom.phase", "in", ("evaluation", "generation", "optimizer")),),
        changes=(CHECKPOINT, CHUNKED, SHORTER, STATES8, SDPA),
        lesson="01", source="transformers#1819", base=0.3,
    ),
    Rule(
        "one-long-batch", "data",
        "lengths vary, and now and then a batch is much longer than the others: it decides the peak",
        needs=(Number("oom", "=", True, 0.4),),
        clues=(
            Number("oom.after_steps", ">=", 20, 0.4, "{value} steps had gone well"),
            Number("oom.phase", "in", ("forward", "backward"), 0.1),
            Topic("over time", 0.05),
            Says(r"dynamic padding|padding=(?:true|'longest'|\"longest\")|datacollatorwithpadding|variable[- ]length|pad to the longest|longest (?:sample|sequence) in", 0.4),
        ),
        unless=(Number("memory.growth", ">=", 1.15), Number("oom.phase", "in", ("evaluation", "generation", "optimizer"))),
        changes=(
            Change("cut at a length that few texts exceed, and run the longest batch first to see whether it fits", "tokenizer(..., truncation=True, max_length=512)"),
            Change("batches with a fixed number of tokens instead of texts", "lab.batching"),
            EXPANDABLE,
        ),
        lesson="09", source="transformers#5195", base=0.1,
    ),
    Rule(
        "memory-creep", "leak",
        "something keeps every step's graph or outputs alive, most often a loss that is summed as a tensor",
        clues=(
            Number("memory.growth", ">=", 1.12, 1.0, "memory grows by a factor of {value} and does not fall"),
            Number("memory.growth", ">=", 1.4, 0.2),
            Told(("memory grows", "over time"), 1.1, without=("evaluation",)),
            Told(("memory grows",), 0.8, without=("evaluation",)),
            Says(r"(?:total|running|epoch|train|sum|cum|avg|tr|mean|accum)\w*_?loss\w* \+= (?:\w+\.)?loss\b(?!\.(?:item|detach))|loss\w*\.append\((?:\w+\.)?loss\)|\.append\((?:outputs?|logits)\)", 0.6),
            Says(r"retain_graph ?= ?true", 0.4),
            Number("oom.after_steps", ">=", 50, 0.3, "{value} steps had gone well"),
            Topic("oom", 0.1),
        ),
        changes=(
            Change("sum numbers, not tensors with their graph", "total += loss.item()   # or loss.detach()"),
            Change("do not keep outputs; clear gradients every step", "optimizer.zero_grad(set_to_none=True)"),
            Change("look at who is alive", "torch.cuda.memory._record_memory_history(); ...; torch.cuda.memory._dump_snapshot('s.pickle')"),
        ),
        lesson="01", source="transformers#6999; PyTorch FAQ", base=0.4,
    ),
    Rule(
        "budget-cap", "memory",
        "a limit was put on this process (a fraction of the card), and that limit is what ran out",
        needs=(Number("oom.allowed_bytes", ">", 0, 1.0, "this process may hold {value}"),),
        clues=(),
        changes=(Change("raise the limit, or make the step smaller", "torch.cuda.set_per_process_memory_fraction(1.0)   # lessons: LABKIT_BUDGET"), *FEWER[:3]),
        lesson="01", source="PyTorch, torch.cuda.set_per_process_memory_fraction", base=0.15,
    ),
    Rule(
        "graph-pools", "compile",
        "CUDA graphs keep pools of their own (torch.compile's mode reduce-overhead), one for each recorded shape",
        needs=(Number("oom", "=", True, 0.4),),
        clues=(Number("oom.pools_bytes", ">=", 1 << 30, 0.8, "{value} lie in private pools"),),
        changes=(Change("record fewer shapes, or compile without graphs", "torch.compile(model)   # not mode='reduce-overhead'"),),
        lesson="07", source="PyTorch CUDACachingAllocator.cpp, private pools", base=0.3,
    ),
    Rule(
        "three-numbers", "measuring",
        "allocated, reserved and what nvidia-smi shows are three things: live tensors, the allocator's segments, and these plus the CUDA context",
        clues=(
            Told(("driver view", "torch view", "mismatch"), 1.1, without=("paged",)),
            Told(("driver view", "torch view", "more memory"), 1.0, without=("paged",)),
            Number("ratio.driver_memory", ">=", 1.15, 1.0, "nvidia-smi shows {value} times what PyTorch says"),
            Told(("driver view", "torch view"), 0.4, without=("paged",)),
            Says(r"empty_cache[^.\n]{0,60}(?:not|n.t|no) (?:\w+ )?(?:free|release|help|chang|reduc|lower)|(?:del |deleted?|deleting|after del)[^.\n]{0,60}nvidia-smi[^.\n]{0,50}(?:still|same|not|n.t)", 0.8),
        ),
        unless=(Number("oom", "=", True), Setting("paged", "is set")),
        changes=(Change("read all three", "torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()"), Change("segments that are cached go back to the driver by empty_cache(); it cures no out-of-memory error", "torch.cuda.empty_cache()")),
        lesson="00", source="nanoGPT#618; PyTorch CUDA notes", base=0.1,
    ),
    Rule(
        "paged-outside", "optimizer",
        "a paged optimizer keeps its state in managed memory: nvidia-smi sees it, PyTorch's counters do not, and it leaves the card only under pressure",
        clues=(
            Told(("paged", "more memory"), 1.2), Told(("paged", "driver view"), 1.1), Told(("paged", "torch view"), 1.0), Told(("paged", "mismatch", "memory"), 1.0),
            Setting("paged", "is set", None, 0.5),
            Number("ratio.driver_memory", ">=", 1.15, 0.5, "nvidia-smi shows {value} times what PyTorch says"),
        ),
        needs=(Topic("paged", 0.0),),
        unless=(Number("oom", "=", True),),
        changes=(Change("compare the whole card's use, and take the plain 8-bit optimizer where nothing has to move", "bitsandbytes.optim.AdamW8bit(...)   # Trainer: optim='adamw_bnb_8bit'"),),
        lesson="04", source="bitsandbytes#801", base=0.3,
    ),
)  # fmt: skip
