"""Number formats: what a card has, what AMP costs, what overflows."""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

from ..rule import Change, Number, Rule, Says, Setting, Told, Topic

TO_FP16 = Change(
    "use fp16 with a GradScaler on this card",
    "torch.autocast('cuda', torch.float16) and torch.amp.GradScaler('cuda')   # Trainer: fp16=True, bf16=False",
    recipe=(("precision", "amp-fp16"),),
)
ASK = Change("ask what is native, not what is emulated", "torch.cuda.is_bf16_supported(including_emulation=False)")

RULES = (
    Rule(
        "amp-more-memory", "dtype",
        "autocast shrinks activations only: weights, gradients and states stay 32-bit, and 16-bit copies of the weights come on top",
        clues=(
            Told(("amp", "more memory", "memory"), 1.1, without=("paged", "8-bit optimizer", "memory grows", "compile", "nan", "ddp", "generation", "accuracy falls")),
            Number("ratio.amp_memory", ">=", 0.9, 1.1, "with 16 bits it takes {value} times the memory of fp32"),
            Told(("amp", "fp32", "memory", "no gain"), 0.7, without=("paged",)),
        ),
        needs=(Topic("amp", 0.0),),
        unless=(Number("error.kind", "!=", "none"), Number("ratio.amp_memory", "<", 0.8)),
        changes=(
            Change("keep AMP for its speed, and cut memory where it lies", "gradient checkpointing, a chunked loss, 8-bit states"),
            Change("to shrink weights and gradients too, hold them in bf16 (with stochastic rounding or an fp32 master copy)", "model.to(torch.bfloat16)", recipe=(("precision", "bf16"),), unless=(Setting("capability", "<", 80), Topic("turing"))),
        ),
        lesson="02", source="transformers#9742", base=0.2,
    ),
    Rule(
        "unscale-fp16", "dtype",
        "a GradScaler scales gradients of fp32 weights; here the trainable weights themselves are fp16",
        clues=(
            Says(r"attempting to unscale fp16 gradients", 1.5),
            Says(r"unscale_?\(?\)?[^.\n]{0,60}(?:fails?|error|refus\w*|complain\w*|valueerror)|gradscaler[^.\n]{0,60}(?:fails?|error|refus\w*|complain\w*|crash\w*)[^.\n]{0,60}(?:half|fp16)|(?:half|fp16) (?:weights|model|parameters)[^.\n]{0,60}gradscaler[^.\n]{0,50}(?:fails?|error|refus\w*|crash\w*|complain\w*)", 1.0),
        ),
        changes=(
            Change("load the weights in fp32 and let autocast cast", "from_pretrained(..., dtype=torch.float32) with fp16=True"),
            Change("under LoRA: only the adapters need fp32", "for p in model.parameters():\n    if p.requires_grad: p.data = p.data.float()"),
            Change("or no scaler: bf16, where the card has it", "TrainingArguments(bf16=True)", unless=(Setting("capability", "<", 80), Topic("turing"))),
        ),
        lesson="02", source="bitsandbytes#945; torch/amp/grad_scaler.py", base=0.5,
    ),
    Rule(
        "bf16-emulated", "dtype",
        "this card has no bf16: PyTorch emulates it, several times slower than fp16",
        clues=(
            Told(("bf16", "turing", "slow"), 1.3), Told(("bf16", "turing", "no gain"), 1.1), Told(("bf16", "turing"), 0.5),
            Setting("capability", "<", 80, 0.5),
            Setting("precision", "in", ("bf16", "amp-bf16"), 0.5),
            Number("ratio.bf16_speed", "<", 0.8, 0.5, "bf16 runs at {value} times the other's speed"),
            Topic("bf16", 0.1),
        ),
        needs=(Topic("bf16", 0.0),),
        unless=(Setting("capability", ">=", 80), Says(r"bf16 (?:=|:|is)? ?(?:false|off|disabled)|--no[-_]bf16|bf16=false")),
        changes=(TO_FP16, ASK), lesson="02", source="pytorch#148322; CUDA programming guide, arithmetic instructions", base=0.2,
    ),
    Rule(
        "bf16-emulated-configured", "dtype",
        "this card has no bf16: PyTorch emulates it, several times slower than fp16",
        needs=(Setting("capability", "<", 80, 0.5), Setting("precision", "in", ("bf16", "amp-bf16"), 0.5)),
        clues=(), unless=(Topic("bf16"),),
        changes=(TO_FP16, ASK), lesson="02", source="pytorch#148322; CUDA programming guide, arithmetic instructions", base=0.2,
    ),
    Rule(
        "bf16-refused", "dtype",
        "this card (or this build) has no bf16, and a library refuses to run with it",
        clues=(Says(r"your setup does ?n.t support bf16|bfloat16 is (?:only|not) supported (?:on|for|by)|bf16 (?:is )?(?:not|isn.t|un)-?\s?(?:supported|available)|(?:does|do)(?: not|n.t) support bf(?:loat)?16|requires? ampere[^.\n]{0,40}bf16|'\.bf16' requires \.target sm_80|feature '(?:cvt|mma|ldmatrix|cp\.async)[^']*' requires \.target sm_(?:80|90)|compute capability of at least 8\.0|current (?:gpu|device|platform)[^.\n]{0,30}not support bf", 1.3, but=r"not supported on (?:tpu|mps|cpu)|supported: true|falling back|will use fp16|using fp16 instead"),),
        changes=(TO_FP16, ASK), lesson="02", source="transformers TrainingArguments; CUDA programming guide", base=0.4,
    ),
    Rule(
        "triton-old-card", "dtype",
        "Triton from 3.3 on has no matrix product (`tl.dot`) for cards below sm_80: its compiler stops",
        clues=(
            Says(r"unsupported conversion from b?f16 to f16|unsupported rounding mode for conversion", 1.3),
            Says(r"passmanager::run failed|failed to (?:translate module to llvm|compile triton|legalize operation 'tt)", 0.7),
            Says(r"fp8e4nv not supported in this architecture|type fp8e\w+ not supported", 1.1),
            Told(("triton", "turing"), 0.6), Setting("capability", "<", 80, 0.4), Topic("turing", 0.2),
            Says(r"triton[^.\n]{0,80}(?:fail\w*|crash\w*|abort\w*|error|not support\w*|unsupported|breaks?)[^.\n]{0,80}|(?:fail\w*|crash\w*|error|abort\w*)[^.\n]{0,60}triton", 0.3),
        ),
        unless=(Setting("capability", ">=", 80),),
        changes=(
            Change("on sm_75: no kernels with tl.dot; use SDPA and cuBLAS, compile without such templates, or an older Triton", "torch._inductor.config.max_autotune_gemm_backends = 'ATEN'   # attn_implementation='sdpa'"),
            Change("or pin the last Triton that had them, with the torch it belongs to", "triton==3.2.0 (torch 2.6)"),
        ),
        lesson="07", source="sglang#7467; triton#6698", base=0.4,
    ),
    Rule(
        "flash-refused", "attention",
        "FlashAttention-2 needs sm_80 or newer and 16-bit inputs; here one of the two is missing",
        clues=(
            Says(r"flash ?attention(?:-?2)? only supports? (?:ampere|fp16|bf16|gpus?|the)|flashattention only support|flash attention[^.\n]{0,50}(?:requires?|needs?)[^.\n]{0,30}(?:ampere|sm_?80|compute capability)|requires device with capability (?:>|>=) \(8|no available kernel\. aborting execution|flash attention (?:only )?(?:supports|requires) (?:fp16|bf16|half)|flash_attn[^.\n]{0,60}not supported|expected (?:query|q)[^.\n]{0,60}(?:half|bfloat16)[^.\n]{0,40}flash", 1.2),
        ),
        changes=(
            Change("let PyTorch choose a kernel that this card has", "attn_implementation='sdpa'"),
            Change("give it 16-bit tensors", "with torch.autocast('cuda', torch.float16): ..."),
        ),
        lesson="06", source="flash-attn README; torch sdp_utils.cpp", base=0.3,
    ),
    Rule(
        "flash-missing", "attention",
        "the package flash_attn, which was asked for, is not installed here",
        clues=(Says(r"flash_attn[^.\n]{0,60}not (?:be )?installed|flash ?attention ?2? is not (?:installed|available)", 1.3),),
        changes=(
            Change("let PyTorch's own fused attention do it: the same kernel on sm_80 and newer, nothing to install", "attn_implementation='sdpa'"),
            Change("or install the package (it compiles for long where no wheel fits)", "pip install flash-attn --no-build-isolation"),
        ),
        lesson="06", source="transformers modeling_utils; flash-attn README", base=0.3,
    ),
    Rule(
        "dtypes-mixed", "dtype",
        "two tensors of different types meet in one operation: part of the model or the input was cast, part was not",
        clues=(
            Says(r"mat1 and mat2 must have the same dtype|expected (?:scalar type|object of scalar type|m1 and m2 to have|mat1 and mat2|tensor for argument[^\n]{0,60}scalar type|both[^\n]{0,40}(?:dtype|type)|query, key,? and value to have the same dtype)|input type \([^)]*\) and (?:weight|bias) type|should be the same (?:d?type)|expected dtype (?:float|half|bfloat16)|found dtype (?:float|half|bfloat16)[^\n]{0,30}expected|must be (?:float|half|bfloat16) but (?:found|got)|self and mat2 must have the same dtype|have the same dtype,? but got", 1.2, but=r"\blong\b|\bint\b|same device|longtensor"),
        ),
        unless=(Number("oom", "=", True),),
        changes=(
            Change("let autocast choose types, around forward and loss, in evaluation and generation too", "with torch.autocast('cuda', torch.bfloat16): loss = model(**batch).loss"),
            Change("or one type everywhere", "model.to(torch.float32)   # inputs_embeds.to(model.dtype)"),
        ),
        lesson="02", source="PyTorch, automatic mixed precision", base=0.3,
    ),
    Rule(
        "half-on-cpu", "dtype",
        "an operation in fp16 on the processor: the model is in fp16 but runs on the CPU",
        clues=(Says(r"\"?\w+\"? not implemented for 'half'|not implemented for 'half' on cpu|slow_conv2d_cpu\" not|_cpu\"? not implemented for '(?:half|bfloat16)'", 1.2),),
        changes=(Change("move the model to the card, or use fp32 (or bf16) on the processor", "model.to('cuda')   # or dtype=torch.float32"),),
        lesson="00", source="ATen CPU kernels", base=0.2,
    ),
    Rule(
        "fp16-overflow", "numerics",
        "numbers leave the range of fp16 (65504): the loss scale is too high for some layers, or activations overflow; steps are skipped or turn NaN",
        clues=(
            Told(("nan", "fp16"), 1.2, without=("int8",)), Told(("nan", "amp"), 1.1, without=("int8",)), Told(("loss zero", "fp16"), 0.8),
            Number("loss.bad", ">=", 1, 0.7, "the log has {value} losses that are no number"),
            Number("grad_norm.bad", ">=", 3, 0.5, "the log has {value} gradient norms that are no number"),
            Number("loss.zero_share", ">=", 0.3, 0.3, "{value} of the losses are exactly 0"),
            Setting("precision", "in", ("amp-fp16", "fp16"), 0.5),
            Topic("fp16", 0.4), Says(r"16[- ]?bit automatic mixed", 0.4),
            Number("scale.fell", ">=", 64, 0.8, "the loss scale fell by a factor of {value}"),
            Says(r"current loss scale already at minimum|minimum loss scale reached|loss scale (?:is )?(?:too small|at minimum)|cannot decrease scale any ?more", 1.2),
            Says(r"gradient overflow\. ? ?skipping step|overflow! rank \d+ skipping step|skipping (?:optimizer )?step[^.\n]{0,30}(?:overflow|inf|nan)", 0.5),
            Says(r"probability tensor contains either `?inf`?,? `?nan`?", 0.7),
        ),
        needs=(Says(r"fp16|float ?16|\bhalf\b|\bamp\b|16[- ]?bit|16-mixed|gradscaler|(?:loss|grad)[ _]?scale|autocast|mixed precision|overflow|inf`?,? `?nan", 0.0),),
        unless=(Number("ratio.amp_memory", ">", 0), Says(r"\bpassed\b *\["), Setting("precision", "in", ("amp-bf16", "bf16", "fp32")), Number("oom", "=", True), Told(("bf16", "nan"), 0, without=("fp16",))),
        changes=(
            Change("find the layers first: gradient norms and largest activations", "labkit.monitors.gradient_norms(model); torch.autograd.set_detect_anomaly(True) for one step"),
            Change("bf16, where the card has it: the range of fp32, no scaler", "TrainingArguments(bf16=True, fp16=False)", unless=(Setting("capability", "<", 80), Topic("turing"))),
            Change("autocast off in those layers (softmax, norms, head in fp32)", "with torch.autocast('cuda', enabled=False): y = layer(x.float())"),
            Change("clip gradients after unscaling, and lower the first scale", "scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); GradScaler(init_scale=2**12)"),
            Change("weights in fp32 where they were loaded in fp16", "from_pretrained(..., dtype=torch.float32)"),
        ),
        lesson="02", source="Micikevicius et al. 2018; torch/amp/grad_scaler.py", base=0.25,
    ),
    Rule(
        "nan-not-fp16", "numerics",
        "the loss is no number although the format has the range of fp32: the learning rate, the data or a mask",
        clues=(
            Number("loss.bad", ">=", 1, 1.0, "the log has {value} losses that are no number"),
            Told(("nan", "bf16"), 1.0, without=("fp16",)), Told(("nan", "fp32"), 0.9, without=("fp16", "amp")), Told(("nan",), 0.6),
            Number("grad_norm.bad", ">=", 1, 0.2, "the log has {value} gradient norms that are no number"),
            Setting("precision", "in", ("amp-bf16", "bf16", "fp32"), 0.4), Setting("learning_rate", ">=", 1e-3, 0.3),
            Says(r"function '\w+backward\d*' returned nan values|nan or inf found in input tensor|loss is nan,? stopp?ing|loss (?:is|became|=) nan", 0.8),
            Says(r"learning[ _]rate|\blr\b|warm-?up|labels?[^.\n]{0,30}-100|all (?:labels|tokens)[^.\n]{0,30}(?:masked|ignored)|padding", 0.2),
        ),
        unless=(Setting("precision", "in", ("amp-fp16", "fp16")), Topic("fp16"), Topic("quantised"), Number("oom", "=", True)),
        changes=(
            Change("lower the learning rate, warm it up, clip gradients", "TrainingArguments(learning_rate=1e-4, warmup_ratio=0.05, max_grad_norm=1.0)"),
            Change("look for a batch whose labels are all -100 (a mean over nothing is NaN), and for rows that are masked whole", "assert (labels != -100).any(1).all()"),
            Change("find the operation", "torch.autograd.set_detect_anomaly(True)"),
        ),
        lesson="02", source="torch.nn.functional.cross_entropy: mean over no label", base=0.0,
    ),
    Rule(
        "scaler-misused", "numerics",
        "the GradScaler's calls are out of order: scale(loss).backward(), unscale_, step(optimizer), update(), once each a step",
        clues=(Says(r"no inf checks were recorded for this optimizer|unscale_\(\) has already been called on this optimizer|unscale_\(\) is being called after step|attempted unscale_ but", 1.2),),
        changes=(Change("one order, once a step; no step for an optimizer without gradients", "scaler.scale(loss).backward(); scaler.unscale_(optimizer); scaler.step(optimizer); scaler.update()"), Change("see that the loss reaches trainable weights", "[n for n, p in model.named_parameters() if p.grad is None]")),
        lesson="02", source="torch/amp/grad_scaler.py", base=0.2,
    ),
    Rule(
        "loaded-in-16-bits", "numerics",
        "the weights were loaded in 16 bits, as the checkpoint has them (the default since transformers 5): small updates are lost in rounding",
        clues=(
            Told(("worse loss", "upgrade"), 1.0, without=("int8", "eager attention")),
            Told(("worse loss", "upgrade", "loaded dtype"), 1.4), Told(("worse loss", "loaded dtype", "bf16"), 1.1, without=("int8",)),
            Told(("worse loss", "bf16"), 0.8, without=("int8", "accumulation", "turing")),
        ),
        unless=(Told(("accumulation", "worse loss")), Number("oom", "=", True), Topic("quantised")),
        changes=(
            Change("ask for fp32 weights and let autocast do the 16-bit part", "from_pretrained(..., dtype=torch.float32) with bf16=True"),
            Change("to stay in 16 bits: stochastic rounding", "torchao.optim.AdamW8bit(..., bf16_stochastic_round=True)"),
            Change("see what was loaded", "{p.dtype for p in model.parameters()}"),
        ),
        lesson="02", source="trl#3910", base=0.1,
    ),
)  # fmt: skip
