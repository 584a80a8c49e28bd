"""Texts as people post them, and what is wrong in each: rule -> texts. Messages are those that the libraries print."""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 7.78 GiB of which {free}"
    " is free. Including non-PyTorch memory, this process has {used} memory in use. Of the allocated memory {allocated} is allocated"
    " by PyTorch, and {scattered} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def oom(wanted="96.00 MiB", free="60.00 MiB", used="7.62 GiB", allocated="7.20 GiB", scattered="120.00 MiB"):  # type: ignore[no-untyped-def]
    """An out-of-memory message of PyTorch 2.x."""
    return OOM.format(wanted=wanted, free=free, used=used, allocated=allocated, scattered=scattered)


def traceback(frames: list[tuple[str, str, str]], error: str) -> str:
    """A traceback from (file, function, code)."""
    rows = [f'  File "{file}", line {40 + i}, in {name}\n    {code}' for i, (file, name, code) in enumerate(frames)]
    return "\n".join(["Traceback (most recent call last):", *rows, error])


_SITE = "/home/u/env/lib/python3.12/site-packages"
_TRAINER = (f"{_SITE}/transformers/trainer.py", "train", "return inner_training_loop(")
_STEP = (f"{_SITE}/transformers/trainer.py", "training_step", "loss = self.compute_loss(model, inputs)")
_CALL = (f"{_SITE}/torch/nn/modules/module.py", "_call_impl", "return forward_call(*args, **kwargs)")
_GPT2 = (f"{_SITE}/transformers/models/gpt2/modeling_gpt2.py", "forward", "transformer_outputs = self.transformer(")

TEXTS: dict[str, list[str]] = {
    "amp-more-memory": [
        "Turning on mixed precision increases GPU memory: 7.1 GB in fp32, 7.8 GB with autocast. I expected it to halve.",
        "Why doesn't fp16 reduce memory usage? Peak VRAM is the same as before with --fp16, only speed improved.",
        "torch.amp makes things faster, but the memory footprint is larger than with full precision. GPT-2 small, batch 4.",
        "No memory savings with bf16 autocast at all (A100). What am I missing?",
    ],
    "accumulation-floor": [
        "Still getting CUDA out of memory with gradient_accumulation_steps=32 and batch size 1. Shouldn't accumulation fix this?",
        "I set per_device_train_batch_size=1 and accumulate over 64 steps, yet the first step runs out of memory on my 6 GB card.",
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 16 --block_size 1024\n" + traceback([_TRAINER, _STEP, _CALL, _GPT2], oom()),
    ],
    "unscale-fp16": [
        "ValueError: Attempting to unscale FP16 gradients.",
        traceback([_TRAINER, (f"{_SITE}/torch/amp/grad_scaler.py", "_unscale_grads_", 'raise ValueError("Attempting to unscale FP16 gradients.")')], "ValueError: Attempting to unscale FP16 gradients."),
        "clip_grad_norm_ after scaler.unscale_(optimizer) fails with an error as soon as I load the model with torch_dtype=torch.float16",
    ],
    "bf16-emulated": [
        "Training on a Colab T4 crawls when I pass bf16=True, ten times slower than fp16. torch.cuda.is_bf16_supported() says True.",
        "RTX 2080 Ti: bfloat16 autocast gives 0.3 it/s, float16 gives 2.1 it/s. Why is bf16 so slow?",
        "Quadro RTX 5000 (Turing), 40 s/it with mixed_precision: bf16. On the 3090 the same run takes 3 s/it. Everything is very slow.",
        "V100 here. Switching the dtype to bfloat16 made throughput drop to a quarter",
    ],
    "bf16-refused": [
        "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train the model on CPU.",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5.",
        "ptxas /tmp/tmpk3.ptx, line 143; error   : Feature '.bf16' requires .target sm_80 or higher",
    ],
    "sdpa-differs": [
        "GPT-2 with attn_implementation='eager' and 'sdpa' give different logits for the same weights (max abs diff 3.1). torch.allclose fails.",
        "Loaded a Mistral-style GPT2 checkpoint with scale_attn_by_inverse_layer_idx=True: the outputs of SDPA and eager attention do not match.",
        "Same model, same input: eager attention and flash attention predictions diverge, the results are not the same at all",
    ],
    "evaluation-keeps-logits": [
        traceback(
            [_TRAINER, (f"{_SITE}/transformers/trainer.py", "evaluate", "output = eval_loop("), (f"{_SITE}/transformers/trainer.py", "evaluation_loop", "preds_host = logits if preds_host is None else nested_concat(preds_host, logits, padding_index=-100)"), (f"{_SITE}/transformers/trainer_pt_utils.py", "torch_pad_and_concatenate", "result = tensor1.new_full(new_shape, padding_index)")],
            "RuntimeError: CUDA out of memory. Tried to allocate 3.07 GiB (GPU 0; 14.76 GiB total capacity; 11.10 GiB already allocated; 2.05 GiB free; 11.80 GiB reserved in total by PyTorch)",
        ),
        "Training runs fine for the whole epoch, but as soon as evaluation starts I get an OOM. eval batch size is already 1.",
        "My validation loop fills the GPU memory until it crashes, training itself only needs 5 GB",
        "Process gets killed (exit code 137) in trainer.evaluate() after about 300 eval batches, RAM goes up all the time during the evaluation",
        "During prediction on the test set memory keeps growing with each batch. I collect all predictions for compute_metrics.",
    ],
    "optimizer-state": [
        traceback([_TRAINER, (f"{_SITE}/torch/optim/adamw.py", "_init_group", "state['exp_avg_sq'] = torch.zeros_like(p, memory_format=torch.preserve_format)")], oom("24.00 MiB", "18.00 MiB")),
        "gpt2-large does not fit on my 12 GB card, not even with batch size 1 and fp16. OOM every time.",
        "I can do forward and backward of gpt2-xl on the 3090 but it goes out of memory in optimizer.step()",
        "Fine-tuning the 774M model: CUDA out of memory at batch 1, sequence 256. Reducing the length hardly matters.",
    ],
    "paged-outside": [
        "paged_adamw_8bit shows MORE memory in nvidia-smi than adamw_8bit. Isn't paging supposed to save VRAM?",
        "With PagedAdamW8bit torch.cuda.max_memory_allocated() reports 9 GB but nvidia-smi is at 14 GB",
        "optim=paged_adamw_32bit: the card's memory usage (nvidia-smi) grew by 4 GiB compared to normal AdamW",
    ],
    "int8-slow": [
        "load_in_8bit=True is five times slower than fp16 for generation with batch size 1. Is this expected?",
        "Inference speed: fp16 31 tokens/s, int8 7 tokens/s on an RTX 3090. Am I doing something wrong?",
        "LLM.int8() makes my fine-tuned model crawl, GPU utilization sits at 30 %",
    ],
    "conv1d": [
        "You are loading your model in 8bit or 4bit but no linear modules were found in your model. this can happen for some architectures such as gpt2 that uses Conv1D instead of Linear layers.",
        "ValueError: Target modules {'q_proj', 'v_proj'} not found in the base model. Please check the target modules and try again.",
        "peft complains about Conv1D when I want to apply LoRA to GPT-2: it finds no Linear layers",
    ],
    "lora-checkpointing": [
        "/site-packages/torch/utils/checkpoint.py:91: UserWarning: None of the inputs have requires_grad=True. Gradients will be None\nRuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        "LoRA + gradient_checkpointing: loss stays constant, all lora_A.grad are None. Works without checkpointing.",
        "peft model, model.gradient_checkpointing_enable() -> backward raises 'element 0 of tensors does not require grad and does not have a grad_fn'",
    ],
    "generation-after-training": [
        "model.generate() is extremely slow after training in the same script. It warns `use_cache=True` is incompatible with gradient checkpointing.",
        "Sampling in a callback during training takes forever; the same checkpoint generates quickly when I reload it.",
        "After fine-tuning with gradient checkpointing the generated text is garbage, and each token takes longer than the last one",
    ],
    "compile-checkpoint-peak": [
        "torch.compile together with gradient checkpointing uses more memory than eager with checkpointing: 9.4 GB vs 6.1 GB.",
        "With activation checkpointing on every block, compiling the model makes the peak higher. Eager is fine, compiled OOMs.",
        "Memory usage goes up when I compile a checkpointed GPT-2. Looks like inductor recomputes several layers at once",
    ],
    "batch-search-compiles": [
        "auto_find_batch_size=True with torch_compile=True takes 20 minutes before training starts and then OOMs",
        "The batch size finder is super slow: each trial recompiles the model",
        "device_train_microbatch_size='auto' + torch.compile => minutes per attempt, finally CUDA out of memory",
    ],
    "accumulation-not-weighted": [
        "Batch size 1 with gradient accumulation 32 gives a clearly worse loss than batch size 32. Should be identical, no?",
        "gradient_accumulation_steps=8 does not match the full batch: final loss 2.91 with accumulation, 2.74 without accumulation",
        "Why does my model converge worse when I accumulate gradients? Sequences have different lengths.",
    ],
    "loaded-in-16-bits": [
        "After upgrading to transformers 5 my fine-tuning loss is worse, same script, same seed. 2.41 before, 2.68 now.",
        "Since the new version the loss plateaus much higher. I noticed the weights are bfloat16 now although I never asked for it.",
        "from_pretrained without dtype: parameters are in bf16 and training does not converge as well as before",
    ],
    "deepspeed-build": [
        "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f>\nAttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
        "RuntimeError: Error building extension 'cpu_adam'",
        "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 11.8 does not match the version torch was compiled with 12.1, unable to compile cuda/cpp extensions without a matching cuda version.",
        "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
    ],
    "offloaded-8bit": [
        "ValueError: You can't train a model that has been loaded in 8-bit precision with CPU or disk offload.",
        "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized model.",
        "I loaded gpt2-xl in 8bit with device_map='auto' so that half is offloaded to the CPU; now it refuses to train",
    ],
    "activation-offload-slow": [
        "torch.autograd.graph.save_on_cpu makes my training 6x slower, even with pin_memory=True",
        "Activation offloading to the host saves memory but throughput dropped from 14k to 3k tokens/s",
        "activation_offloading=True in TRL: every step takes four times longer. GPU is waiting on copies.",
    ],
    "memory-creep": [
        "GPU memory increases with every step until it crashes after 2000 iterations",
        "memory leak? allocated grows slowly over time. My loop: total_loss += loss; loss.backward(); optimizer.step()",
        "\n".join(f"step {i}: loss {3.2 - i / 500:.3f} | allocated {4.1 + i * 0.02:.2f} GB" for i in range(0, 200, 5)),
        "for batch in loader:\n    out = model(**batch)\n    running_loss += out.loss\n    out.loss.backward()\n\nVRAM creeps up from 3 to 8 GB over the epoch",
    ],
    "ddp-more-memory": [
        "DistributedDataParallel runs out of memory with the batch that worked under DataParallel on the same two cards",
        traceback([("train.py", "main", "model = DDP(model, device_ids=[rank])"), (f"{_SITE}/torch/nn/parallel/distributed.py", "__init__", "self._ddp_init_helper("), (f"{_SITE}/torch/nn/parallel/distributed.py", "_ddp_init_helper", "self.reducer = dist.Reducer(")], "[rank1]: " + oom("474.00 MiB", "200.00 MiB")),
        "With torchrun each GPU uses 10.9 GB, on a single GPU without DDP it was 9.6 GB -> OOM on my 11 GB cards",
    ],
    "unfused-gelu": [
        "Profiler: NewGELUActivation in GPT-2 takes a fifth of the step and stores huge activations. Why so much memory for a gelu?",
        "The MLP of GPT-2 is slow in eager mode, mostly tanh and pow elementwise kernels dominate the time (gelu_new)",
        "GPT2MLP activation memory is larger than expected, seven tensors of batch x seq x 3072 saved by gelu",
    ],
    "triton-old-card": [
        "Unsupported conversion from f16 to f16\nLLVM ERROR: Unsupported rounding mode for conversion.",
        "triton kernel crashes on my T4: RuntimeError: PassManager::run failed",
        "flex_attention on an RTX 2080: triton fails to compile with 'Unsupported conversion from f16 to f16'",
    ],
    "three-numbers": [
        "torch.cuda.memory_allocated() says 2.5 GB but nvidia-smi shows 16.7 GB. Where is the rest?",
        "nvidia-smi reports 11 GiB while max_memory_allocated is only 6.3 GiB. Is that a leak?",
        "Why does PyTorch report less memory than nvtop? 3.1 GB allocated vs 7.0 GB",
    ],
    "wrong-peak": [
        "iter 120: loss 3.4121, time 210.22ms, mfu 104.31%\niter 130: loss 3.4012, time 209.98ms, mfu 104.40%",
        "nanoGPT prints an MFU of 1.3 on my H100, more than 100 percent. How can that be?",
        "My model flops utilization is over 100% of the theoretical peak, which is impossible",
    ],
    "starved": [
        "GPU utilization jumps between 0 and 40 % all the time, one CPU core is at 100 %. DataLoader with num_workers=0.",
        "nvidia-smi says GPU-Util 23% during training. Tokenization happens in __getitem__.",
        "\n".join(f"[{i:04d}] gpu util: {u}%  data_time 0.31s step_time 0.42s" for i, u in enumerate([22, 35, 18, 40, 27, 31, 25, 30] * 3)),
    ],
    "compile-no-gain": [
        "torch.compile gives no speedup for my training loop, 1.02x. Sequence length changes every batch.",
        "W1201 10:22:31.444000 torch/_dynamo/convert_frame.py:1016] [0/8] torch._dynamo hit config.recompile_limit (8)\nW1201 [0/8]    function: 'forward' (modeling_gpt2.py:700)",
        "compiled model is slower than eager: 340 ms/step compiled, 290 ms eager. TORCH_LOGS shows lots of graph breaks",
    ],
    "flash-short": [
        "Flash attention is no faster than eager for my classification task. Sequences are 64 tokens long.",
        "Installed flash-attn 2 but there is no speedup: 212 samples/s with flash_attention_2, 208 samples/s with eager, max_length=96",
        "SDPA vs standard attention: same speed. Inputs are tweets, about 40 tokens.",
    ],
    "quantised-worse": [
        "Perplexity jumps from 17.4 to 29.8 after loading the model in 4bit",
        "int8 quantization of gpt2 drops the accuracy by 5 points on our task",
        "After quantizing to 4-bit (fp4) the outputs are clearly worse. Any way to keep quality?",
    ],
    "fp16-overflow": [
        "Loss becomes nan after a few hundred steps with fp16=True, fp32 is fine",
        "{'loss': 3.1, 'grad_norm': 1.2, 'epoch': 0.1}\n{'loss': 2.9, 'grad_norm': nan, 'epoch': 0.2}\n{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.3}\n{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.4}\nargs: fp16=True",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "mixed precision training (GradScaler): every 2000 steps the loss turns into NaN for a while",
    ],
    "nan-not-fp16": [
        "bf16 training, loss is nan from the first step. Learning rate 5e-3 without warmup.",
        "\n".join(f"step {i} loss {'nan' if i > 6 else 4.2 - i / 10}" for i in range(20)),
        "RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output.",
    ],
    "many-cards-little-gain": [
        "Two RTX 3090 are only 1.1x faster than one. DataParallel, batch 8 in total.",
        "Multi-GPU training gives hardly any speedup: 1 GPU 4.1 it/s, 4 GPUs 4.6 it/s",
        "Adding a second GPU makes training slower, what am I doing wrong?",
    ],
    # ------------------------------------------------------------------- kinds beyond the list
    "fragmentation": [
        "RuntimeError: " + oom("640.00 MiB", "90.00 MiB", "7.60 GiB", "5.02 GiB", "2.31 GiB").split(": ", 1)[1],
        "RuntimeError: CUDA out of memory. Tried to allocate 1.17 GiB (GPU 0; 23.69 GiB total capacity; 14.12 GiB already allocated; 1.05 GiB free; 21.80 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
    ],
    "other-process": [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 30.06 MiB is free. Process 21034 has 19.80 GiB memory in use. Including non-PyTorch memory, this process has 3.80 GiB memory in use. Of the allocated memory 3.20 GiB is allocated by PyTorch, and 88.00 MiB is reserved by PyTorch but unallocated.",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.17 GiB total capacity; 412.50 MiB already allocated; 5.44 MiB free; 440.00 MiB reserved in total by PyTorch)",
    ],
    "logits": [
        traceback([_TRAINER, _STEP, _CALL, _GPT2, (f"{_SITE}/transformers/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()")], oom("1.53 GiB", "700.00 MiB", "6.9 GiB", "6.10 GiB")),
        traceback([("train.py", "step", "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))"), (f"{_SITE}/torch/nn/functional.py", "cross_entropy", "return torch._C._nn.cross_entropy_loss(")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 14.56 GiB of which 500.00 MiB is free."),
    ],
    "attention-scores": [
        traceback([_STEP, _CALL, _GPT2, (f"{_SITE}/transformers/models/gpt2/modeling_gpt2.py", "eager_attention_forward", "attn_weights = nn.functional.softmax(attn_weights, dim=-1)")], oom("384.00 MiB", "130.00 MiB")),
    ],
    "weights-alone": [
        traceback([("train.py", "<module>", "model = AutoModelForCausalLM.from_pretrained('gpt2-xl').to('cuda')"), (f"{_SITE}/transformers/modeling_utils.py", "to", "return super().to(*args, **kwargs)"), (f"{_SITE}/torch/nn/modules/module.py", "_apply", "param_applied = fn(param)"), (f"{_SITE}/torch/nn/modules/module.py", "convert", "return t.to(")], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 5.79 GiB of which 21.00 MiB is free."),
    ],
    "kv-cache": [
        traceback([("gen.py", "<module>", "out = model.generate(ids, max_new_tokens=900, num_return_sequences=64)"), (f"{_SITE}/transformers/generation/utils.py", "generate", "result = self._sample("), _CALL, (f"{_SITE}/transformers/cache_utils.py", "update", "self.keys = torch.cat([self.keys, key_states], dim=-2)")], oom()),
    ],
    "activations": [
        traceback([_STEP, _CALL, _GPT2, (f"{_SITE}/transformers/activations.py", "forward", "return 0.5 * input * (1.0 + torch.tanh(")], oom()),
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "RuntimeError: CUDA out of memory. Tried to allocate 26.00 MiB (GPU 0; 1024.00 MiB total capacity; 895.61 MiB already allocated; 4.17 MiB free; 6.39 MiB cached)",
    ],
    "host-killed": [
        "Loading checkpoint shards:  50%|#####     | 1/2 [00:31<00:31]\nKilled",
        "torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: -9) local_rank: 0 (pid: 411) of binary: /usr/bin/python3",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 6400000000 bytes. Error code 12 (Cannot allocate memory)",
    ],
    "shm": [
        "RuntimeError: DataLoader worker (pid 8812) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ],
    "driver-spill": [
        "On Windows 11 training a bigger batch does not crash, it just gets 20 times slower. Task manager shows 12 GB of shared GPU memory in use.",
        "WSL2: instead of an OOM error the run slows to a crawl once dedicated memory is full",
    ],
    "driver-too-old": [
        "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
        "AssertionError: Torch not compiled with CUDA enabled",
    ],
    "no-kernel-image": [
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
    ],
    "compiler-missing": [
        "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
        "RuntimeError: Cannot find a working triton installation. Either the package is not installed or it is too old.",
    ],
    "bitsandbytes-library": [
        "AttributeError: /site-packages/bitsandbytes/libbitsandbytes_cpu.so: undefined symbol: cget_col_row_stats",
        "bitsandbytes library load error: Configured CUDA binary not found at /site-packages/bitsandbytes/libbitsandbytes_cuda132.so",
        "AttributeError: 'NoneType' object has no attribute 'cadam32bit_grad_fp32'",
    ],
    "flash-refused": [
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        "RuntimeError: No available kernel. Aborting execution.",
    ],
    "dtypes-mixed": [
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float",
        "RuntimeError: expected scalar type Half but found Float",
        "RuntimeError: Expected query, key, and value to have the same dtype, but got query.dtype: float key.dtype: float and value.dtype: c10::BFloat16 instead.",
    ],
    "index-beyond": [
        "../aten/src/ATen/native/cuda/Indexing.cu:1255: indexSelectLargeIndex: block: [12,0,0], thread: [96,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\nRuntimeError: CUDA error: device-side assert triggered",
        "Token indices sequence length is longer than the specified maximum sequence length for this model (1450 > 1024).\nIndexError: index out of range in self",
    ],
    "checkpoint-differs": ["torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation."],
    "graph-used-twice": ["RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed)."],
    "nccl-waits": [
        "[rank1]:[E1201 09:14:55 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=411, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    ],
    "ddp-ready-twice": ["RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons"],
    "devices-mixed": ["RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"],
    "purely-quantised": ["ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on top of the quantized model"],
    "quantised-moved": ["ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models."],
    "scaler-misused": ["AssertionError: No inf checks were recorded for this optimizer."],
    "cudagraph-overwritten": ["RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run."],
    "triton-shared-memory": ["triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help."],
    "half-on-cpu": ['RuntimeError: "addmm_impl_cpu_" not implemented for \'Half\''],
    "dp-first-card": [
        traceback([_STEP, (f"{_SITE}/torch/nn/parallel/data_parallel.py", "forward", "return self.gather(outputs, self.output_device)"), (f"{_SITE}/torch/nn/parallel/scatter_gather.py", "gather", "res = gather_map(outputs)")], oom("1.53 GiB", "800.00 MiB", "6.7 GiB", "6.00 GiB")),
    ],
    "budget-cap": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 400.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 130.02 GiB is free. 8.00 GiB allowed; Including non-PyTorch memory, this process has 8.60 GiB memory in use. Of the allocated memory 7.70 GiB is allocated by PyTorch, and 80.00 MiB is reserved by PyTorch but unallocated."],
    "pinned-limit": ["RuntimeError: Caught RuntimeError in pin memory thread for device 0.\n  data = data.pin_memory()\nRuntimeError: cudaHostAlloc failed: out of memory; check ulimit -l"],
}  # fmt: skip

HEALTHY: dict[str, str] = {
    "a healthy training log": "\n".join(
        ["***** Running training *****", "  Num examples = 23,767", "  Instantaneous batch size per device = 8", "  Gradient Accumulation steps = 4", "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."]
        + [f"{{'loss': {3.9 - i * 0.03:.4f}, 'grad_norm': {1.1 + (i % 3) * 0.1:.3f}, 'learning_rate': 5e-05, 'epoch': {i / 20:.2f}}}" for i in range(40)]
        + ["{'train_runtime': 812.2, 'train_samples_per_second': 29.3, 'train_loss': 3.2}"]
    ),
    "nanoGPT, healthy": "\n".join(f"iter {i}: loss {4.2 - i / 100:.4f}, time {135 + i % 3}.20ms, mfu 41.{i % 10}%" for i in range(60)),
    "a fixed problem": "I used to get CUDA out of memory with GPT-2 medium, but after enabling gradient checkpointing it works now.",
    "another fixed problem": "The NaN loss in fp16 is gone since we lowered the learning rate. Thanks, that helped!",
    "an error that was handled": "\n".join(
        ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 7.78 GiB of which 0.9 GiB is free.", "halving the batch size to 4 and trying again"]
        + [f"step {i} loss {4 - i / 50:.3f} 2.1 it/s" for i in range(30)]
        + ["training finished, model saved"]
    ),
    "a mention of memory": "INFO  allocator: expandable_segments enabled to avoid CUDA out of memory from fragmentation\nINFO  step 10 done\nINFO  step 20 done",
    "a comment in code": "try:\n    train()\nexcept torch.cuda.OutOfMemoryError:  # CUDA out of memory: halve the batch\n    batch //= 2",
    "an unrelated traceback": traceback([("train.py", "<module>", "cfg = yaml.safe_load(open('config.yaml'))")], "FileNotFoundError: [Errno 2] No such file or directory: 'config.yaml'"),
    "a wrong key": traceback([("train.py", "main", "precision = config['bf16']")], "KeyError: 'bf16'"),
    "a missing module": traceback([("train.py", "<module>", "import deepspeed")], "ModuleNotFoundError: No module named 'deepspeed'"),
    "a shape mistake": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x768 and 512x768)",
    "a hub that does not answer": "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
    "a web server": "127.0.0.1 - - [01/Dec/2026 10:02:11] \"GET /memory HTTP/1.1\" 200 -\n127.0.0.1 - - [01/Dec/2026 10:02:12] \"GET /cuda HTTP/1.1\" 404 -",
    "another program's memory": "java.lang.OutOfMemoryError: Java heap space\n\tat java.util.Arrays.copyOf(Arrays.java:3332)",
    "no problem in words": "Training GPT-2 with bf16 on an A100, gradient checkpointing on, 8-bit Adam. Loss goes down nicely, no NaN, no OOM, speed is as expected.",
    "a question about something else": "How do I push my fine-tuned model to the hub? I trained with fp16 and LoRA.",
    "8-bit Adam under LoRA that runs": "We train LoRA adapters with bnb.optim.Adam8bit and everything runs well.",
    "warnings that are harmless": "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n/site-packages/torch/optim/lr_scheduler.py:182: UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`.",
    "zeros counted": "check: nan_count=0 inf_count=0 skipped_steps=0 loss_scale: 65536.0\ncheck: nan_count=0 inf_count=0 skipped_steps=0 loss_scale: 65536.0",
    "a sentence": "everything is fine",
    "utilisation that is high": "\n".join(f"{u} %, 7012 MiB, gpu util: {u}%" for u in (96, 97, 95, 98, 97)),
    "grouped-query advice": "Would grouped-query attention help GPT-2?",
}  # fmt: skip

# Four sets, each written when the rules were finished, to see how far these carry: before anything was mended the
# right cause came first in 34 of 43, 31 of 37, 26 of 30 and 26 of 30 texts; of 32 without a problem one was taken for one.
MORE: list[tuple[str, str]] = [
    ('amp-more-memory', "Hi all, quick question. I wrapped my forward pass in torch.autocast(device_type='cuda', dtype=torch.float16) to save VRAM. Without it the run peaks at 6.9GB, with it at 7.3GB. What's going on? I thought half the bits = half the memory."),
    ('amp-more-memory', 'Mixed precision did speed things up but GPU RAM consumption actually went up a bit, is that normal?'),
    ('accumulation-floor', 'bs=1, grad accum = 128 on a 2060 6GB, GPT2-medium, context 1024. It dies right in the first forward with OOM. I was told that gradient accumulation solves memory problems??'),
    ('accumulation-floor', 'RuntimeError: CUDA out of memory happens no matter how many accumulation steps I choose. 4, 16, 64, always the same. Micro batch is one sequence already.'),
    ('unscale-fp16', '  File "/opt/conda/lib/python3.10/site-packages/accelerate/accelerator.py", line 2396, in unscale_gradients\n    self.scaler.unscale_(opt)\n  File "/opt/conda/lib/python3.10/site-packages/torch/amp/grad_scaler.py", line 338, in unscale_\n    optimizer_state["found_inf_per_device"] = self._unscale_grads_(\nValueError: Attempting to unscale FP16 gradients.'),
    ('bf16-emulated', 'Kaggle notebook with 2x T4. Training a small llama in bf16 runs at 0.2 steps/s, if I change to fp16 I get 1.5 steps/s.'),
    ('bf16-emulated', 'does anybody know why bfloat16 is so painfully slow on my 2070 super? torch says it is supported'),
    ('sdpa-differs', 'I compared hidden states of GPT2 between attn_implementation="sdpa" and "eager", they\'re off by a lot with reorder_and_upcast_attn set. Bug?'),
    ('evaluation-keeps-logits', '{\'loss\': 2.31, \'epoch\': 1.0}\n100%|##########| 500/500\n  File "/usr/lib/python3/site-packages/transformers/trainer.py", line 3812, in evaluation_loop\n    logits = self.accelerator.pad_across_processes(logits, dim=1, pad_index=-100)\n  File "/usr/lib/python3/site-packages/transformers/trainer.py", line 3820, in evaluation_loop\n    all_preds.add(logits)\n  File "/usr/lib/python3/site-packages/transformers/trainer_pt_utils.py", line 327, in add\n    self.tensors = nested_concat(self.tensors, tensors, padding_index=self.padding_index)\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.82 GiB. GPU 0 has a total capacty of 23.65 GiB of which 4.01 GiB is free. Including non-PyTorch memory, this process has 19.6 GiB memory in use.'),
    ('evaluation-keeps-logits', 'train is ok with batch 16 but the eval step at the end of the epoch explodes, CUDA OOM, even with eval batch 2'),
    ('optimizer-state', "Why can't I finetune gpt2-xl on a 24GB 3090? batch size is 1, seq len 128, it always says CUDA out of memory"),
    ('optimizer-state', 'Forward and backward pass of GPT2-large work, but the very first optimizer.step() throws an out of memory error (AdamW).'),
    ('paged-outside', 'bnb PagedAdamW: torch reports 5.1GB allocated, nvidia-smi 11.4GB. Memory leak in bitsandbytes?'),
    ('int8-slow', 'Loaded gpt2-xl with load_in_8bit, generation of 100 tokens takes 21 seconds, in half precision it takes 4. Why is quantized slower?'),
    ('conv1d', 'UserWarning: You are loading your model in 8bit or 4bit but no linear modules were found in your model.'),
    ('conv1d', "ValueError: Target modules ['query_key_value'] not found in the base model. Please check the target modules and try again. (model: gpt2)"),
    ('lora-checkpointing', "Using peft + gradient checkpointing my train loss is flat at 3.91 forever and the adapters' weights never change, UserWarning: None of the inputs have requires_grad=True. Gradients will be None"),
    ('generation-after-training', 'I call model.generate in an evaluation callback and it takes 3 minutes for 10 prompts. When I load the saved checkpoint in a fresh python it takes 8 s. Training uses gradient_checkpointing=True.'),
    ('compile-checkpoint-peak', 'Peak memory: eager + activation checkpointing 11.2 GB; torch.compile + activation checkpointing 14.9 GB. Expected compile to be lower.'),
    ('batch-search-compiles', "Lightning's batch size scaler (mode=binsearch) with a compiled module: every trial spends a minute in inductor and at the end it crashes with OOM."),
    ('accumulation-not-weighted', 'Training curves differ: bs 32 reaches 2.95 eval loss; bs 4 with grad accumulation 8 reaches 3.10. Same lr, same seed, padded SFT data.'),
    ('loaded-in-16-bits', 'We bumped transformers from 4.46 to 5.1 and the final loss of our finetune got worse by 0.2. Nothing else changed. print(model.dtype) shows torch.bfloat16.'),
    ('deepspeed-build', "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'\nException ignored in..."),
    ('offloaded-8bit', "ValueError: You can't train a model that has been loaded in 8-bit precision on a different device than the one you're training on."),
    ('activation-offload-slow', 'with torch.autograd.graph.save_on_cpu(pin_memory=False): step time 0.4s -> 2.9s. GPU mostly idle.'),
    ('memory-creep', 'VRAM usage keeps climbing about 20MB per iteration and after some hours I get CUDA OOM. I keep losses in a python list for plotting.'),
    ('ddp-more-memory', "Switched from nn.DataParallel to DDP (torchrun, 4 gpus) with the same per gpu batch and now I'm OOM"),
    ('unfused-gelu', 'Looking at the memory snapshot, half of the activations of each GPT-2 block come from NewGELUActivation (pow, mul, tanh...).'),
    ('triton-old-card', "Tesla T4, triton 3.3.1, torch.compile(mode='max-autotune') aborts: LLVM ERROR: Unsupported rounding mode for conversion."),
    ('three-numbers', 'Confused about memory: torch.cuda.max_memory_allocated() = 4.2GB, max_memory_reserved() = 6.8GB, nvidia-smi = 7.4GB. Which is right?'),
    ('wrong-peak', 'iter 2010: loss 2.9871, time 58.11ms, mfu 153.20%'),
    ('starved', 'My 3090 sits at 35% GPU-util and the CPU is at 100% on one core. htop shows the main process tokenizing. batch 32 seq 256'),
    ('compile-no-gain', "torch.compile'd my model, the first epoch took ages and afterwards it's the same it/s as before. My batches have variable length."),
    ('flash-short', 'attn_implementation=flash_attention_2 brings nothing: 51 ms vs 50 ms per step on sentences of ~30 tokens.'),
    ('quantised-worse', 'nf4 quantisation: wikitext ppl goes from 18.9 to 24.3, is there a way to keep the quality'),
    ('fp16-overflow', 'Every now and then the loss is NaN for some steps with fp16 AMP and GradScaler, then recovers. scale = 65536 initially.'),
    ('fp16-overflow', '[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4, reducing to 2\n[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1\nException: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.'),
    ('many-cards-little-gain', '4x 2080Ti with DDP: 310 samples/s. One 2080Ti alone: 250 samples/s. Per-GPU batch size 2.'),
    ('host-killed', "accelerate launch train.py\n...\nsubprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' died with <Signals.SIGKILL: 9>."),
    ('fragmentation', 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.20 GiB. GPU 0 has a total capacity of 15.89 GiB of which 1.71 GiB is free. Including non-PyTorch memory, this process has 14.17 GiB memory in use. Of the allocated memory 9.96 GiB is allocated by PyTorch, and 3.79 GiB is reserved by PyTorch but unallocated.'),
    ('other-process', 'OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which 14.50 MiB is free. Process 3021 has 6.02 GiB memory in use. Including non-PyTorch memory, this process has 1.74 GiB memory in use. Of the allocated memory 1.50 GiB is allocated by PyTorch, and 20.50 MiB is reserved by PyTorch but unallocated.'),
    ('driver-spill', 'Windows 10, RTX 3060 12GB. In task manager dedicated memory is 11.8/12 and shared GPU memory is 9 GB. One iteration takes 40 seconds instead of 1.'),
    ('starved', 'PyTorch profiler: 71% of self CPU time is enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__, my GPU is waiting'),
    ('amp-more-memory', 'fp32 peak 5.3 GiB -> amp peak 5.6 GiB (gpt2, batch 2, seq 512). Can someone explain?'),
    ('amp-more-memory', "Enabling --bf16 had zero effect on memory consumption; I still can't raise the batch."),
    ('accumulation-floor', 'Question: I use gradient_accumulation_steps: 8 and per_device_train_batch_size: 1 but training GPT2-large still fails with an out of memory error on a 16GB V100.'),
    ('unscale-fp16', 'Trainer(fp16=True) with model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16) -> ValueError Attempting to unscale FP16 gradients'),
    ('bf16-emulated', 'GTX 1660 Ti laptop; switched dtype to bfloat16 in nanoGPT and each iter takes 2300ms instead of 700ms'),
    ('sdpa-differs', 'Logits mismatch: gpt2 (eager) vs gpt2 (sdpa), max difference 0.7, with scale_attn_by_inverse_layer_idx'),
    ('evaluation-keeps-logits', "torch.cuda.OutOfMemoryError at validation. The training loop has no problems. I append every batch's logits to a list and torch.cat them at the end"),
    ('evaluation-keeps-logits', "Colab RAM crash: 'Your session crashed after using all available RAM' whenever trainer.predict(test_ds) is called"),
    ('optimizer-state', '  File "train.py", line 88, in train\n    optimizer.step()\n  File "/venv/lib/python3.11/site-packages/torch/optim/optimizer.py", line 493, in wrapper\n    out = func(*args, **kwargs)\n  File "/venv/lib/python3.11/site-packages/torch/optim/adam.py", line 150, in _init_group\n    state["exp_avg"] = torch.zeros_like(\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 11.90 GiB of which 8.56 MiB is free.'),
    ('paged-outside', 'paged adamw from bitsandbytes uses more gpu memory than the non-paged one?? measured with nvidia-smi'),
    ('int8-slow', '8bit model: 3 tokens/sec. 16bit model: 20 tokens/sec. Same A10 gpu.'),
    ('lora-checkpointing', 'RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn -- only when I add gradient_checkpointing=True to my QLoRA config'),
    ('generation-after-training', "PPO rollouts are horribly slow since I turned on gradient checkpointing, looks like the KV cache isn't used when generating"),
    ('compile-checkpoint-peak', 'compile + checkpoint OOMs at batch 8 although eager + checkpoint handles batch 12'),
    ('batch-search-compiles', 'I try doubling the batch until OOM to find the biggest batch; with torch.compile on it takes forever since it recompiles at every size'),
    ('accumulation-not-weighted', 'HF Trainer: why is the loss higher with grad accumulation 16 x batch 1 compared to batch 16 directly'),
    ('loaded-in-16-bits', 'transformers v5 changed something? SFT now converges to a higher loss than with 4.57. p.dtype is bfloat16 for all the weights'),
    ('deepspeed-build', "Loading extension module cpu_adam...\nImportError: ~/.cache/torch_extensions/py311_cu121/cpu_adam/cpu_adam.so: cannot open shared object file: No such file or directory\nAttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"),
    ('offloaded-8bit', 'ValueError: \n                        Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit\n                        the quantized model.'),
    ('activation-offload-slow', 'Offloading activations to CPU memory makes it fit, but my steps went from 0.8 s to 3.5 s'),
    ('memory-creep', 'Each epoch needs ~1GB more GPU memory than the epoch before, and epoch 6 fails with out of memory'),
    ('ddp-more-memory', 'One process on one card: 9.1 GB. The same with DDP on two cards: 10.2 GB on each. Where do the extra 1.1 GB come from?'),
    ('unfused-gelu', "Why does gelu_new need so much memory in GPT-2? replacing it with nn.GELU(approximate='tanh') saved 2 GB"),
    ('triton-old-card', 'python: /project/lib/Conversion/TritonGPUToLLVM/ElementwiseOpToLLVM.cpp: Unsupported conversion from f16 to f16\nAborted (core dumped)   # gpu: T4'),
    ('three-numbers', 'print(torch.cuda.memory_allocated()/1e9) gives 1.9 but nvidia-smi claims my process uses 6.5 GB, why the discrepancy'),
    ('wrong-peak', 'My MFU computation reports 118% on an L40S'),
    ('starved', "volatile gpu util hovers between 10% and 50%. Increasing batch size doesn't help. num_workers=2, images... sorry, text is tokenized on the fly."),
    ('compile-no-gain', '[rank0]:W0612 torch/_dynamo/convert_frame.py:906] [4/8] torch._dynamo hit config.cache_size_limit (8)'),
    ('flash-short', 'No difference in speed between eager and sdpa for BERT-style inputs of length 64'),
    ('quantised-worse', 'After GPTQ 4bit my summaries got noticeably worse, rouge falls from 0.41 to 0.33'),
    ('fp16-overflow', 'fp16: loss nan after 1.2k steps. bf16 not possible on V100. fp32 works.'),
    ('nan-not-fp16', 'Loss goes to NaN at step 3 in full fp32, lr=0.01'),
    ('many-cards-little-gain', 'nn.DataParallel with 4 GPUs: epoch takes 58 min; with 1 GPU: 62 min.'),
    ('host-killed', 'DefaultCPUAllocator: not enough memory: you tried to allocate 3221225472 bytes.'),
    ('logits', '  File "/w/train.py", line 31, in forward\n    logits = self.lm_head(x)\n  File "/w/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", line 134, in forward\n    return F.linear(input, self.weight, self.bias)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 23.52 GiB of which 2.20 GiB is free. Including non-PyTorch memory, this process has 21.3 GiB memory in use. Of the allocated memory 20.5 GiB is allocated by PyTorch, and 300.0 MiB is reserved by PyTorch but unallocated.'),
    ('weights-alone', '  File "run.py", line 5, in <module>\n    model.to(device)\n  File "/w/torch/nn/modules/module.py", line 1355, in to\n    return self._apply(convert)\n  File "/w/torch/nn/modules/module.py", line 942, in _apply\n    param_applied = fn(param)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 74.00 MiB. GPU 0 has a total capacity of 3.81 GiB of which 54.00 MiB is free.'),
    ('shm', 'RuntimeError: unable to open shared memory object </torch_29919_1396182366> in read-write mode'),
    ('fp16-overflow', 'torchrun --standalone --nproc_per_node=1 train.py config/train_gpt2.py --dtype=float16\niter 2900: loss 3.9, time 1099.34ms, mfu 15.34%\niter 2910: loss 3.91, time 1100.34ms, mfu 15.34%\niter 2920: loss 3.92, time 1101.34ms, mfu 15.34%\niter 2930: loss 3.93, time 1102.34ms, mfu 15.34%\niter 2940: loss 3.94, time 1103.34ms, mfu 15.34%\niter 2950: loss 3.95, time 1104.34ms, mfu 15.34%\niter 2960: loss 3.96, time 1105.34ms, mfu 15.34%\niter 2970: loss 3.97, time 1106.34ms, mfu 15.34%\niter 2980: loss 3.98, time 1107.34ms, mfu 15.34%\niter 2990: loss 3.99, time 1108.34ms, mfu 15.34%\niter 3000: loss 4.0, time 1109.34ms, mfu 15.34%\niter 3010: loss 4.01, time 1110.34ms, mfu 15.34%\niter 3020: loss nan, time 1111.34ms, mfu 15.34%\niter 3030: loss nan, time 1112.34ms, mfu 15.34%\niter 3040: loss nan, time 1113.34ms, mfu 15.34%\niter 3050: loss nan, time 1114.34ms, mfu 15.34%\niter 3060: loss nan, time 1115.34ms, mfu 15.34%\niter 3070: loss nan, time 1116.34ms, mfu 15.34%\niter 3080: loss nan, time 1117.34ms, mfu 15.34%\niter 3090: loss nan, time 1118.34ms, mfu 15.34%'),
    ('evaluation-keeps-logits', '  File "main.py", line 182, in main\n    trainer.evaluate()\n  File "/x/transformers/trainer.py", line 1157, in evaluate\n    output = self.prediction_loop(eval_dataloader, description="Evaluation")\n  File "/x/transformers/trainer.py", line 1244, in prediction_loop\n    preds = logits if preds is None else torch.cat((preds, logits), dim=0)\nRuntimeError: CUDA out of memory. Tried to allocate 1.90 GiB (GPU 0; 10.76 GiB total capacity; 7.86 GiB already allocated; 1.37 GiB free; 8.40 GiB reserved in total by PyTorch)'),
    ('activations', 'Hi, I have a problem training the model in batch size 2. I keep getting this error:\nRuntimeError: CUDA out of memory. Tried to allocate 488.00 MiB (GPU 0; 9.77 GiB total capacity; 8.90 GiB already allocated; 304.38 MiB free; 8.96 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF\nMy GPU is GeForce RTX 3080 10GB. Any advice?'),
    ('compile-no-gain', 'When running some models on Torch, I have noticed that the torch.compile mode is slightly slower than the eager mode.'),
    ('three-numbers', 'I have a torch model in cuda, after I del it:\ndel model\ntorch.cuda.memory_allocated()\nit shows 0. However nvidia-smi shows 12433MiB / 81920MiB. why are they different?'),
    ('fp16-overflow', "I'm using an Nvidia v100 GPU. I have changed the --mixed_precision to FP16 instead of BF16 since this GPU card can't work on BF16. Everything went well, but during the training phase I'm getting nan losses."),
    ('paged-outside', 'Some weird memory usage (VRAM) is reported (by torch and by NVML) when using 8-bit AdamW, paged or unpaged. One would expect the memory usage of the paged optimizer to be lower. Yet unpaged uses 70.4GiB (NVML) whereas the paged optimizer uses 91.2GiB.'),
    ('triton-old-card', "Encountered the same error while using Modal T4's with unsloth: Unsupported conversion from f16 to f16 LLVM ERROR: Unsupported rounding mode for conversion."),
    ('optimizer-state', "I'm using GTX2060(6GB). When i start the train of gpt2-large, RuntimeError: CUDA out of memory. I've already tried to change batch_size to 1. This doesn't seem to be effective"),
    ('fragmentation', 'OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB (GPU 0; 10.73 GiB total capacity; 4.41 GiB already allocated; 1.75 GiB free; 8.20 GiB reserved in total by PyTorch)'),
    ('one-long-batch', '{\'loss\': 0.9000, \'learning_rate\': 8.7e-06, \'epoch\': 0.00}\n{\'loss\': 0.8967, \'learning_rate\': 8.7e-06, \'epoch\': 0.01}\n{\'loss\': 0.8933, \'learning_rate\': 8.7e-06, \'epoch\': 0.02}\n{\'loss\': 0.8900, \'learning_rate\': 8.7e-06, \'epoch\': 0.03}\n{\'loss\': 0.8867, \'learning_rate\': 8.7e-06, \'epoch\': 0.04}\n{\'loss\': 0.8833, \'learning_rate\': 8.7e-06, \'epoch\': 0.05}\n{\'loss\': 0.8800, \'learning_rate\': 8.7e-06, \'epoch\': 0.06}\n{\'loss\': 0.8767, \'learning_rate\': 8.7e-06, \'epoch\': 0.07}\n{\'loss\': 0.8733, \'learning_rate\': 8.7e-06, \'epoch\': 0.08}\n{\'loss\': 0.8700, \'learning_rate\': 8.7e-06, \'epoch\': 0.09}\n{\'loss\': 0.8667, \'learning_rate\': 8.7e-06, \'epoch\': 0.10}\n{\'loss\': 0.8633, \'learning_rate\': 8.7e-06, \'epoch\': 0.11}\n{\'loss\': 0.8600, \'learning_rate\': 8.7e-06, \'epoch\': 0.12}\n{\'loss\': 0.8567, \'learning_rate\': 8.7e-06, \'epoch\': 0.13}\n{\'loss\': 0.8533, \'learning_rate\': 8.7e-06, \'epoch\': 0.14}\n{\'loss\': 0.8500, \'learning_rate\': 8.7e-06, \'epoch\': 0.15}\n{\'loss\': 0.8467, \'learning_rate\': 8.7e-06, \'epoch\': 0.16}\n{\'loss\': 0.8433, \'learning_rate\': 8.7e-06, \'epoch\': 0.17}\n{\'loss\': 0.8400, \'learning_rate\': 8.7e-06, \'epoch\': 0.18}\n{\'loss\': 0.8367, \'learning_rate\': 8.7e-06, \'epoch\': 0.19}\n{\'loss\': 0.8333, \'learning_rate\': 8.7e-06, \'epoch\': 0.20}\n{\'loss\': 0.8300, \'learning_rate\': 8.7e-06, \'epoch\': 0.21}\n{\'loss\': 0.8267, \'learning_rate\': 8.7e-06, \'epoch\': 0.22}\n{\'loss\': 0.8233, \'learning_rate\': 8.7e-06, \'epoch\': 0.23}\n{\'loss\': 0.8200, \'learning_rate\': 8.7e-06, \'epoch\': 0.24}\n{\'loss\': 0.8167, \'learning_rate\': 8.7e-06, \'epoch\': 0.25}\n{\'loss\': 0.8133, \'learning_rate\': 8.7e-06, \'epoch\': 0.26}\n{\'loss\': 0.8100, \'learning_rate\': 8.7e-06, \'epoch\': 0.27}\n{\'loss\': 0.8067, \'learning_rate\': 8.7e-06, \'epoch\': 0.28}\n{\'loss\': 0.8033, \'learning_rate\': 8.7e-06, \'epoch\': 0.29}\n{\'loss\': 0.8000, \'learning_rate\': 8.7e-06, \'epoch\': 0.30}\n{\'loss\': 0.7967, \'learning_rate\': 8.7e-06, \'epoch\': 0.31}\n{\'loss\': 0.7933, \'learning_rate\': 8.7e-06, \'epoch\': 0.32}\n{\'loss\': 0.7900, \'learning_rate\': 8.7e-06, \'epoch\': 0.33}\n{\'loss\': 0.7867, \'learning_rate\': 8.7e-06, \'epoch\': 0.34}\n{\'loss\': 0.7833, \'learning_rate\': 8.7e-06, \'epoch\': 0.35}\n{\'loss\': 0.7800, \'learning_rate\': 8.7e-06, \'epoch\': 0.36}\n{\'loss\': 0.7767, \'learning_rate\': 8.7e-06, \'epoch\': 0.37}\n{\'loss\': 0.7733, \'learning_rate\': 8.7e-06, \'epoch\': 0.38}\n{\'loss\': 0.7700, \'learning_rate\': 8.7e-06, \'epoch\': 0.39}\nTraceback (most recent call last):\n  File "run.py", line 5, in <module>\n    trainer.train()\n  File "/x/transformers/trainer.py", line 1900, in training_step\n    loss = self.compute_loss(model, inputs)\n  File "/x/torch/nn/modules/module.py", line 1500, in _call_impl\n    return forward_call(*args)\n  File "/x/transformers/models/gpt2/modeling_gpt2.py", line 400, in forward\n    hidden_states = block(hidden_states)\n# DataCollatorWithPadding pads to the longest sample\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 200.00 MiB is free. Including non-PyTorch memory, this process has 15.5 GiB memory in use. Of the allocated memory 14.9 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.'),
    ('memory-creep', "My GPU memory isn't freed: it starts at 2 GB and after each epoch there are 300 MB more. In the loop I do losses.append(loss) and at the end sum(losses)."),
    ('int8-slow', 'is it normal that 8-bit inference is 4-5x slower compared to fp16? bitsandbytes 0.37'),
    ('sdpa-differs', 'Different results with sdpa and eager attention in GPT2Model, assert_close fails'),
    ('loaded-in-16-bits', 'Regression: SFT quality dropped after TRL update, models are now loaded in bf16 by default and loss ends higher'),
    ('activation-offload-slow', 'save_on_cpu hooks: the copy to pinned memory blocks compute. My training throughput drops 5x.'),
    ('many-cards-little-gain', 'Why is training on 2 GPUs not faster than on one? nvidia-smi shows both are in use'),
    ('accumulation-not-weighted', "Loss with gradient accumulation doesn't match the loss of an equivalent larger batch (trl SFTTrainer)"),
    ('bf16-emulated', 'RTX 2060 laptop. Loading in torch.bfloat16: 1 token per second. float16: 11 tokens per second.'),
    ('lora-checkpointing', 'My LoRA run does not learn anything when gradient checkpointing is active: no gradients arrive in lora_B'),
    ('wrong-peak', 'estimate_mfu returns 1.04 on a 4090, i.e. 104 percent of peak'),
    ('offloaded-8bit', "can't train a model loaded in 8bit, it says that some layers are offloaded to cpu"),
    ('batch-search-compiles', 'composer auto microbatching + compile: spends most time recompiling each microbatch size, then cuda oom'),
    ('deepspeed-build', "AssertionError: CUDA_HOME does not exist, unable to compile CUDA op(s)\nAttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"),
    ('ddp-more-memory', 'after moving from DataParallel to DistributedDataParallel I get cuda out of memory, batch per gpu unchanged'),
    ('generation-after-training', 'generate() ignores the KV cache after fine-tuning, every token takes longer than the one before'),
    ('quantised-worse', 'my 8-bit quantized GPT-2 gives nonsense answers and perplexity is 5 points higher'),
    ('unfused-gelu', 'torch profiler shows NewGELUActivation eating 18% of the forward time in GPT2, mostly elementwise kernels'),
    ('flash-short', 'flash attention slower than math sdpa for seqlen 64?'),
    ('starved', 'GPU utilization 40%, data loading takes 60% of each iteration'),
    ('host-killed', 'slurmstepd: error: Detected 1 oom_kill event in StepId=8812.0. Some of the step tasks have been OOM Killed.'),
    ('host-killed', 'Jupyter: The kernel appears to have died. It will restart automatically. (happens when loading the 6GB checkpoint, RAM is full)'),
    ('shm', 'RuntimeError: DataLoader worker (pid(s) 1532) exited unexpectedly\nERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).'),
    ('dtypes-mixed', 'RuntimeError: Input type (float) and bias type (c10::Half) should be the same'),
    ('index-beyond', 'nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [5,0,0] Assertion `t >= 0 && t < n_classes` failed.'),
    ('driver-too-old', 'RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version'),
    ('driver-too-old', 'RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver'),
    ('no-kernel-image', 'UserWarning: Tesla K80 with CUDA capability sm_37 is not compatible with the current PyTorch installation. The current PyTorch install supports CUDA capabilities sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90.'),
    ('bitsandbytes-library', 'The installed version of bitsandbytes was compiled without GPU support. 8-bit optimizers, 8-bit multiplication, and GPU quantization are unavailable.'),
    ('bitsandbytes-library', 'RuntimeError: CUDA Setup failed despite GPU being available. Please run the following command to get more information: python -m bitsandbytes'),
    ('compiler-missing', "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nFileNotFoundError: [Errno 2] No such file or directory: 'gcc'"),
    ('nccl-waits', 'torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2006, unhandled system error (run with NCCL_DEBUG=INFO for details)'),
    ('fp16-overflow', 'RuntimeError: probability tensor contains either `inf`, `nan` or element < 0   (model.half() generation with gpt2-large)'),
    ('nan-not-fp16', "{'loss': 2.4, 'grad_norm': 1.0}\n{'loss': nan, 'grad_norm': nan}\n{'loss': nan, 'grad_norm': nan}\n{'loss': nan, 'grad_norm': nan}\nbf16: true\nlearning_rate: 0.003"),
    ('checkpoint-differs', 'torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.'),
    ('flash-refused', 'ValueError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: Flash Attention 2 requires Ampere'),
    ('flash-refused', 'RuntimeError: FlashAttention only support fp16 and bf16 data type'),
    ('weights-alone', '  File "/x/transformers/modeling_utils.py", line 4010, in from_pretrained\n    model = cls._load_pretrained_model(\n  File "/x/accelerate/utils/modeling.py", line 330, in set_module_tensor_to_device\n    new_value = value.to(device)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 5.93 GiB of which 120.00 MiB is free.'),
    ('kv-cache', '  File "/x/transformers/generation/utils.py", line 3206, in _sample\n    outputs = self(**model_inputs)\n  File "/x/modeling_gpt2.py", line 300, in forward\n    key = torch.cat((past_key, key), dim=-2)\nRuntimeError: CUDA out of memory. Tried to allocate 60.00 MiB'),
    ('logits', '  File "/x/torch/nn/functional.py", line 1946, in log_softmax\n    ret = input.log_softmax(dim)\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.30 GiB'),
    ('attention-scores', '  File "model.py", line 62, in forward\n    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))\n  File "model.py", line 64, in forward\n    att = F.softmax(att, dim=-1)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which 500.00 MiB is free.'),
    ('dp-first-card', 'With nn.DataParallel GPU 0 is full and runs out of memory while GPU 1, 2 and 3 have 4 GB left'),
    ('other-process-told', 'After Ctrl-C nvidia-smi still shows 7.5GB used on the GPU although no process is listed'),
    ('evaluation-keeps-logits', '  File "/l/pytorch_lightning/loops/evaluation_loop.py", line 152, in run\n    self._evaluation_step(batch)\n  File "/p/model.py", line 91, in validation_step\n    self.outs.append(logits)\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.2 GiB'),
    ('devices-mixed', 'RuntimeError: Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0'),
    ('scaler-misused', 'RuntimeError: unscale_() has already been called on this optimizer since the last update().'),
    ('graph-used-twice', 'RuntimeError: Trying to backward through the graph a second time'),
    ('three-numbers', 'why does torch.cuda.empty_cache() not reduce the memory shown in nvidia-smi to zero? allocated is 0'),
    ('purely-quantised', 'ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on top of the quantized model to correctly perform fine-tuning.'),
]  # fmt: skip

SILENT: list[str] = [
    'Everything trains as it should with fp16 and 8-bit AdamW, 14k tokens per second. Just wanted to say thanks.',
    'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n    from transformers import Trainer\nImportError: cannot import name \'Trainer\' from \'transformers\' (unknown location)',
    'RuntimeError: The size of tensor a (1024) must match the size of tensor b (1025) at non-singleton dimension 1',
    '[INFO] gradient checkpointing: enabled\n[INFO] mixed precision: bf16\n[INFO] compile: off\n[INFO] eval every 500 steps\n[INFO] memory: 5.1 GB allocated, 6.0 GB reserved\n[INFO] step 500 loss 2.91\n[INFO] step 1000 loss 2.71\n[INFO] step 1500 loss 2.63',
    'My OOM during evaluation got resolved with preprocess_logits_for_metrics, closing this issue.',
    'What learning rate do you recommend for GPT-2 small with batch size 32?',
    'json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)',
    'Epoch 1: train loss 3.1 val loss 3.3\nEpoch 2: train loss 2.8 val loss 3.1\nEpoch 3: train loss 2.6 val loss 3.0\nBest model saved.',
    'We compared fp32 and bf16: bf16 is twice as fast and uses 30% less memory. Very happy.',
    'torch.compile made training 1.6x faster on my 4090, no recompiles.',
    "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
    'warning: out of memory errors can be avoided by lowering the batch size, see docs',
    "PermissionError: [Errno 13] Permission denied: '/data/memory_dump.pickle'",
    'ssh: connect to host gpu01 port 22: Connection timed out',
    'The evaluation ran 3x faster with batch 32, accuracy 0.81 as before',
    "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.",
    'UserWarning: Using a non-full backward hook when the forward contains multiple autograd Nodes is deprecated',
    'The attention mask and the pad token id were not set. As a consequence, you may observe unexpected behavior.',
    'Finetuned gpt2-medium on an RTX 3090 with AMP, 6.1 it/s, peak memory 9.8 GB. Eval loss 2.71.',
    "ModuleNotFoundError: No module named 'flash_attn'",
    'I replaced DataParallel by DDP and now both GPUs are at 98%, great speedup',
    'subprocess-exited-with-error: error: legacy-install-failure Encountered error while trying to install package. numpy',
    '[2026-12-01 12:00:00] INFO OOM score adjusted to -500 for sshd',
    "git push failed: remote: error: File model.bin is 512.00 MB; this exceeds GitHub's file size limit of 100.00 MB",
    'Does gradient checkpointing change the loss values?',
    'ValueError: Asking to pad but the tokenizer does not have a padding token.',
    'RuntimeError: Sizes of tensors must match except in dimension 1. Expected size 12 but got size 8',
    'CondaError: PackagesNotFoundError: cudatoolkit=12.9',
    'step 1 loss 10.9\nstep 2 loss 10.1\nstep 3 loss 9.7\nutil 96%\nutil 97%\nutil 95%',
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "OSError: [Errno 28] No space left on device: '/home/u/checkpoints/step-1000'",
    'wandb: ERROR Network error (ReadTimeout), entering retry loop.',
]  # fmt: skip
