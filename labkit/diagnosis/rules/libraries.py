"""Quantised models, DeepSpeed, bitsandbytes, drivers, the host: what libraries and the system refuse."""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

from ..rule import Change, Frame, Number, Rule, Says, Setting, Told, Topic

RULES = (
    Rule(
        "int8-slow", "quantisation",
        "int8 weights are for fitting, not for speed: outliers are computed apart in fp16 and every layer converts, which dominates small batches",
        clues=(
            Told(("int8", "slow"), 1.15, without=("nan", "batch search", "8-bit optimizer")), Told(("int8", "no gain"), 0.9, without=("accuracy falls", "8-bit optimizer", "more memory", "memory")),
            Told(("quantised", "slow"), 1.0, without=("batch search", "8-bit optimizer")),
            Number("ratio.int8_speed", "<", 0.8, 1.0, "8 bits run at {value} times the speed of 16"), Number("ratio.int8_speed", "<", 0.95, 0.2),
            Setting("quantised", "=", "int8", 0.2),
        ),
        needs=(Topic("quantised", 0.0),),
        unless=(Number("oom", "=", True), Number("error.kind", "!=", "none")),
        changes=(Change("16 bits where they fit", "from_pretrained(..., dtype=torch.float16)"), Change("4 bits with a 16-bit compute type, or kernels made for speed", "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)   # GPTQ/AWQ with Marlin kernels"), Change("larger batches hide the conversions", "batch generation")),
        lesson="04", source="bitsandbytes#490; LLM.int8() paper, appendix D", base=0.25,
    ),
    Rule(
        "quantised-worse", "quantisation",
        "the weights lost too much in rounding; the optimizer's states can be quantised at far less cost",
        clues=(Told(("quantised", "accuracy falls"), 1.1, without=("8-bit optimizer",)), Told(("quantised", "worse loss"), 0.9, without=("8-bit optimizer",)), Number("ratio.quantised_quality", ">=", 1.15, 0.4, "the quantised model's number is {value} times the other's"), Told(("quantised", "nan"), 0.9, without=("fp16",))),
        needs=(Topic("quantised", 0.0),),
        unless=(Number("oom", "=", True), Number("error.kind", "!=", "none")),
        changes=(Change("quantise the optimizer's states only", "bitsandbytes.optim.AdamW8bit(model.parameters())"), Change("a calibrated method, or the layers that suffer left in 16 bits", "GPTQModel; BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=['lm_head'])"), Change("NF4 with double quantisation instead of plain 4 bits", "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True)")),
        lesson="04", source="LLM.int8(), QLoRA, GPTQ papers", base=0.2,
    ),
    Rule(
        "conv1d", "quantisation",
        "GPT-2's layers are `Conv1D`, not `Linear` (weights transposed, other names): a library that looks for Linear finds none",
        clues=(
            Says(r"no linear modules were found", 1.3),
            Says(r"target modules? (?:\{|\[|'|\"|`|\w)[^\n]{0,120}not found in the base model", 1.0),
            Says(r"target module[^\n]{0,40}conv1d[^\n]{0,60}not supported|conv1d(?:\(\))? is not supported|currently,? only[^\n]{0,100}are supported[\s\S]{0,20}", 1.1, but=r"^\s*$"),
            Told(("quantised", "conv1d"), 1.0), Told(("lora", "conv1d"), 1.0),
        ),
        changes=(Change("upgrade: transformers and bitsandbytes convert Conv1D since 2023", "pip install -U transformers bitsandbytes peft"), Change("LoRA on GPT-2: its own names, and transposed weights", "LoraConfig(target_modules=['c_attn', 'c_proj'], fan_in_fan_out=True)")),
        lesson="04", source="bitsandbytes#629", base=0.4,
    ),
    Rule(
        "offloaded-8bit", "offload",
        "a device map put part of the quantised model on the host or the disk; device maps are for inference, it cannot be trained so",
        clues=(
            Says(r"can.?t train a model (?:that has been )?loaded in [48]-?bit[^\n]{0,20}(?:precision)?[^\n]{0,20}(?:with|on|using)? ?(?:cpu|disk|a different)", 1.3), Says(r"you can.?t train a model that has been loaded in [48]-bit", 1.0),
            Says(r"some modules are dispatched on the cpu or the disk", 1.1), Says(r"load_in_8bit_fp32_cpu_offload|llm_int8_enable_fp32_cpu_offload", 0.4),
            Says(r"(?:can.?t|cannot|can not|unable to) (?:train|fine-?tune)[^.\n]{0,80}(?:device_map|dispatched|offload\w*)|device_map=['\"]?auto['\"]? in any distributed", 1.0),
            Told(("quantised", "offload", "cannot train"), 1.1),
        ),
        changes=(Change("the whole model on one card, quantised further if it must be", "from_pretrained(..., quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={'': 0})"), Change("then train adapters", "peft.prepare_model_for_kbit_training(model); get_peft_model(...)"), Change("to offload while training: the optimizer, not the weights", "CPUOffloadOptimizer, ZeRO-Offload")),
        lesson="05", source="text-generation-webui#3368; accelerate", base=0.4,
    ),
    Rule(
        "purely-quantised", "quantisation",
        "quantised weights have no gradients: a quantised model is trained through adapters only",
        clues=(Says(r"cannot perform fine-?tuning on purely quantized models|only tensors of floating point[^\n]{0,40}can require gradients|attach trainable adapters", 1.2),),
        changes=(Change("LoRA on top", "model = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), LoraConfig(...))"),),
        lesson="04", source="transformers Trainer", base=0.4,
    ),
    Rule(
        "quantised-moved", "quantisation",
        "a quantised model cannot be moved or cast after loading: it is placed while it is loaded",
        clues=(Says(r"`?\.to`? is not supported for `?[48]-?bit`?|you shouldn.?t move a model (?:that is |when it is )?dispatched|calling `?(?:cuda|to|half|float)\(?\)?`? is not supported for", 1.2),),
        changes=(Change("leave out .to() and .half(); say where at loading", "from_pretrained(..., quantization_config=..., device_map={'': 0})"),),
        lesson="04", source="transformers modeling_utils", base=0.4,
    ),
    Rule(
        "bitsandbytes-library", "quantisation",
        "bitsandbytes found no compiled library for this CUDA version, or loaded the one without CUDA",
        clues=(
            Says(r"cuda setup failed|libbitsandbytes_cpu\.so|undefined symbol: c(?:get_|adam|quant)\w*|could not find the bitsandbytes cuda binary|compiled without gpu support|bitsandbytes[^\n]{0,60}(?:not compiled|without cuda|failed to load|no cuda)|configured cuda binary not found|required library version not found: libbitsandbytes|'nonetype' object has no attribute '(?:cget_|cquant|cadam|cdequant)\w*'|libcusparse\.so|libcudart\.so[^\n]{0,60}(?:not found|cannot open)|no gpu detected!? (?:check|bitsandbytes)|native (?:library functionality but it.s not available|code method attempted to call)|cuda version mismatch", 1.2),
            Frame(r"bitsandbytes/cextension|bitsandbytes/cuda_setup", 0.6),
            Says(r"bitsandbytes", 0.1),
        ),
        unless=(Number("oom", "=", True),),
        changes=(Change("a wheel that has a library for torch's CUDA", "pip install -U bitsandbytes; python -m bitsandbytes"), Change("or name the version that it should load", "export BNB_CUDA_VERSION=126"), Change("see whether torch sees the card", "labkit doctor")),
        lesson="04", source="bitsandbytes, installation", base=0.3,
    ),
    Rule(
        "deepspeed-build", "offload",
        "DeepSpeed's Adam for the host was never compiled: the real error stands further up, most often another CUDA toolkit than torch's, or no compiler",
        clues=(
            Says(r"deepspeedcpuadam'?[^\n]{0,40}no attribute '?ds_opt_adam|ds_opt_adam", 1.2),
            Says(r"installed cuda version [\d.]+ does not match the version torch was compiled with|cudamismatchexception|error building extension '(?:cpu_adam|fused_adam|utils|async_io)'|cuda_home does not exist|unable to jit load the (?:cpu_adam|fused_adam)|ninja is required to load c\+\+ extensions|missingcudaexception|cuda_home environment variable is not set|deepspeed[^.\n]{0,60}(?:nvcc|build fail|fails? to build|compil\w* fail)", 1.0),
            Frame(r"deepspeed/ops/", 0.3),
        ),
        changes=(Change("read upwards to the first error of the build; give it the toolkit that torch was built with", "python -c 'import torch; print(torch.version.cuda)'; nvcc --version; ds_report"), Change("skip the version check only where the minor versions differ", "DS_SKIP_CUDA_CHECK=1"), Change("or an optimizer on the host that needs no compiler", "torchao.optim.CPUOffloadOptimizer")),
        lesson="05", source="DeepSpeed#1846", base=0.4,
    ),
    Rule(
        "driver-too-old", "environment",
        "the driver does not carry the CUDA version that this torch was built with, or torch was built without CUDA",
        clues=(Says(r"nvidia driver on your system is too old|cuda driver version is insufficient|torch not compiled with cuda enabled|found no nvidia driver on your system|cuda unknown error - this may be due to an incorrectly set up|no cuda gpus are available|no gpu found\. a gpu is needed|attempting to deserialize object on a cuda device but torch\.cuda\.is_available\(\) is false|driver/library version mismatch|forward compatibility was attempted on non supported hw", 1.2),),
        changes=(Change("`labkit doctor` compares driver, toolkit and torch and names the wheel that fits", "labkit doctor"), Change("update the driver (CUDA 13 wheels need 580), or take a torch for the driver that is there", "pip install torch --index-url https://download.pytorch.org/whl/cu126")),
        lesson="00", source="NVIDIA, CUDA compatibility", base=0.3,
    ),
    Rule(
        "no-kernel-image", "environment",
        "this torch has no kernels for this card: it is too old or too new for the build",
        clues=(Says(r"no kernel image is available for execution|is not compatible with the current pytorch installation|error invalid device function|cuda capability sm_\d+ is not compatible|supports cuda capabilities sm_", 1.2),),
        changes=(Change("a build that has the card's architecture", "torch.cuda.get_arch_list()   # cu126 for Maxwell to Hopper, cu130 for Turing to Blackwell"),),
        lesson="00", source="PyTorch RELEASE.md, CUDA support matrix", base=0.3,
    ),
    Rule(
        "host-killed", "host",
        "the host ran out of memory and the system ended the process: no Python error, exit code 137 or -9",
        clues=(
            Says(r"^ ?(?:\d+ )?killed *$|exit(?:ed)? (?:with )?(?:code |status |exitcode ?:? ?)+(?:137|-9)\b|exitcode ?: ?-9|return ?code ?[=:]? ?-9\b|\(sigkill\) received by pid|worker \(pid[^)]*\) is killed by signal: killed|paging file is too small|error code: <1455>|signal 9\b|\(signal: ?9\)|oom[ _-]?kill\w*|out of memory: killed process|died with <signals\.sigkill|\bkilled +(?:python|torchrun|accelerate)|^[^\n]{0,80}line \d+: +\d+ killed|pid (?:\d+ )?\(?[^\n]{0,20}was terminated by signal 9|your session crashed after using all available ram", 1.1, but=r"\bif |see docs|forcefully exiting via"),
            Told(("killed", "host memory"), 1.1), Told(("killed", "offload"), 0.8), Told(("host memory", "oom"), 1.0, without=("driver view", "evaluation", "shared memory")), Told(("killed",), 0.6), Told(("host memory", "memory grows"), 0.9),
            Says(r"defaultcpuallocator:? (?:can.t allocate|not enough) memory|cannot allocate memory|unable to allocate [\d.]+ [gm]ib for an array|\bmemoryerror\b", 1.2),
        ),
        unless=(Number("oom", "=", True), Says(r"killed by user|keyboardinterrupt"), Told(("killed", "evaluation"))),
        changes=(
            Change("fewer workers (each copies what Python holds), and map files instead of reading them", "DataLoader(num_workers=2); torch.load(..., mmap=True, weights_only=True)"),
            Change("load the weights once, in their final type, straight to the card", "from_pretrained(..., dtype=torch.bfloat16, device_map={'': 0})"),
            Change("count what lies on the host: an optimizer there takes 12 to 16 bytes a parameter, pinned", "labkit doctor; free -h"),
        ),
        lesson="05", source="Linux OOM killer; exit code 128 + 9", base=0.2,
    ),
    Rule(
        "shm", "host",
        "/dev/shm is too small (64 MB in a container by default) for the batches that DataLoader workers hand over",
        clues=(Says(r"dataloader worker \(pid[^)]*\) is killed by signal: bus error|insufficient shared memory|bus error[^\n]{0,60}shm|no space left on device[^\n]{0,80}(?:/dev/shm|torch_|shm)|unable to (?:open|write|mmap)[^\n]{0,30}shared memory|could not allocate shared memory|unable to write to file </torch_|error while creating shared memory", 1.2), Says(r"dataloader worker \(pid\(?s?\)?[^\n]{0,40}(?:exited unexpectedly|killed by signal: (?!killed))", 1.0)),
        changes=(Change("give the container more", "docker run --shm-size=8g ...   # or --ipc=host"), Change("or hand over by files, or use fewer workers", "torch.multiprocessing.set_sharing_strategy('file_system'); num_workers=0"), Change("see its size", "labkit doctor; df -h /dev/shm")),
        lesson="09", source="PyTorch, multiprocessing notes", base=0.4,
    ),
    Rule(
        "too-many-files", "host",
        "the workers' shared tensors each hold an open file, and the limit is reached",
        clues=(Says(r"too many open files|received 0 items of ancdata", 1.1),),
        changes=(Change("raise the limit, or share by name", "ulimit -n 65536; torch.multiprocessing.set_sharing_strategy('file_system')"),),
        lesson="09", source="PyTorch, multiprocessing notes", base=0.1,
    ),
    Rule(
        "pinned-limit", "host",
        "the system refuses to pin so much memory of the host",
        clues=(Says(r"cudahostalloc|cudahostregister|pin_?memory[^\n]{0,80}(?:fail\w*|out of memory|error|cannot)|cannot pin|os call failed or operation not supported on this os", 0.7), Says(r"memlock|ulimit -l|max locked memory", 0.4), Frame(r"pin_memory", 0.5), Number("oom", "=", True, 0.3), Says(r"in pin memory thread[\s\S]{0,1200}cuda error: (?:out of memory|invalid argument)|caching ?host ?allocator|cuda error: (?:out of memory|invalid argument)[\s\S]{0,600}pin_memory", 0.5)),
        needs=(Says(r"pin|hostalloc|hostregister|memlock|locked memory", 0.0),),
        changes=(Change("allow more locked memory, or pin less", "ulimit -l unlimited   # docker: --ulimit memlock=-1; WSL: a smaller offload"), Change("no pinning in the loader", "DataLoader(pin_memory=False)")),
        lesson="05", source="CUDA runtime, cudaHostAlloc", base=0.2,
    ),
    Rule(
        "nccl-waits", "many cards",
        "one process waits for another that never came to the exchange: it failed, has another number of batches, or took another branch",
        clues=(
            Says(r"watchdog caught collective operation timeout|collective operation timeout|nccl (?:communicator was aborted|operations? timed? ?out)|timed out (?:waiting|after)[^\n]{0,60}(?:nccl|allreduce|collective|barrier)|distbackenderror|nccl error|ncclunhandledcudaerror|ncclsystemerror|ncclinternalerror|unhandled (?:cuda|system) error", 1.1),
            Says(r"expected to have finished reduction in the prior iteration", 1.1), Says(r"monitored ?barrier", 0.5),
        ),
        unless=(Number("oom", "=", True),),
        changes=(Change("read the log of the other ranks first: the first error is the cause", "torchrun --log-dir logs --redirects 3 ...; NCCL_DEBUG=INFO"), Change("the same number of batches for every process; unused parameters found or removed", "DistributedSampler(drop_last=True); DistributedDataParallel(find_unused_parameters=True)"), Change("in containers, room to talk", "--shm-size=1g --ulimit memlock=-1; NCCL_P2P_DISABLE=1 to test")),
        lesson="11", source="PyTorch, distributed notes", base=0.2,
    ),
    Rule(
        "ddp-ready-twice", "many cards",
        "DDP saw a parameter's gradient twice: reentrant checkpointing or shared weights under DDP",
        clues=(Says(r"expected to mark a variable ready only once", 1.2),),
        changes=(Change("non-reentrant checkpointing", "gradient_checkpointing_kwargs={'use_reentrant': False}"), Change("or tell DDP that the graph never changes", "DistributedDataParallel(model, static_graph=True)")),
        lesson="11", source="torch/nn/parallel/distributed.py", base=0.4,
    ),
)  # fmt: skip
