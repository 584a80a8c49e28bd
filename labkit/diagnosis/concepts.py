"""The words that people use for the same thing: patterns over text in lower case.

A concept of trouble does not count where it is denied ("no NaN so far", "avoids running out"): see `prose.py`.
"""

# ruff: noqa: E501 (a pattern or a message stands on one line, where it can be searched for)
from __future__ import annotations

from dataclasses import dataclass

_UP = r"(?:more|higher|larger|bigger|increas\w*|grow\w*|grew|goes up|went up|going up|rose|rises?|jump\w*|extra|doubl\w*|worse|spik\w*|balloon\w*|exceed\w*|blows? up)"
_DOWN = r"(?:less|lower|reduc\w*|sav\w*|decreas\w*|drop\w*|shrink\w*|shrank|halv\w*|smaller|go(?:es)? down|went down|difference|change[ds]?|help\w*|benefit\w*|improv\w*)"
_NOT = (
    r"(?:no|not|n.t|cannot|without|hardly|barely|little|zero|never|nothing|any|isn.?t|doesn.?t|didn.?t|don.?t|neither)"
)
_MEM = r"(?:memory|\bv?ram\b|footprint|gpu usage|\d (?:gb|gib)|mem usage)"
_OOM = (
    r"out[- ]of[- ](?:gpu |cuda |v?ram |graphics |video )*(?:memory|vram)|\boom(?:s|ed|ing|.?ed|.s)?\b|(?<!lang\.)outofmemory\w*"
    r"|(?:does ?n.?t|do ?n.?t|did ?n.?t|won.?t|can ?not|can.?t|not|never|fails? to|unable to|barely) fit|ran out (?:of )?|runn?(?:s|ing)? out"
    r"|not enough (?:gpu |cuda |video )*(?:memory|v?ram)|(?:memory|vram) (?:overflow\w*|explo\w*|error|blow\w*|is full|exhaust\w*)"
    r"|exceeds? (?:the )?(?:gpu |video )*memory|allocation fail\w*|insufficient (?:gpu |cuda )?(?:memory|vram)|tried to allocate"
    r"|crash\w* (?:with|due to|because of|from) (?:\w+ )?memory|fill(?:s|ed)? (?:up )?(?:the |my |all )?(?:\w+ )?(?:memory|vram|card)"
)


@dataclass(frozen=True)
class Concept:
    """A word field: a pattern over lower-case text; ``trouble`` where a denial in front of it takes it back."""

    pattern: str
    trouble: bool = False


CONCEPTS: dict[str, Concept] = {
    "oom": Concept(_OOM, trouble=True),
    "gpu": Concept(r"gpu|cuda|vram|torch|\brtx|\bcards?\b|nvidia|train\w*|batch\w*|model|gpt|epoch|tokens?|transformer|fine-?tun\w*|\d ?gi?b\b|colab|kaggle|tesla|a100|h100|\bt4\b"),
    "memory": Concept(r"memory|vram|\d ?(?:gb|gib|mib|mb)\b|footprint|gpu ram"),
    "more memory": Concept(
        rf"{_UP}[^.\n]{{0,50}}{_MEM}|{_MEM}[^.\n]{{0,60}}{_UP}|{_UP} (?:than|with|compared|when)\b"
        rf"|{_MEM}[^.\n]{{0,40}}(?:\bnot|n.t|unchanged|identical|(?:the )?same|hardly|barely|no)\b(?:[^.\n]{{0,25}}{_DOWN})?"
        rf"|\b{_NOT}\b[^.\n]{{0,40}}{_DOWN}[^.\n]{{0,50}}{_MEM}|\b(?:no|zero|without|hardly any|little) (?:\w+ )?{_MEM}[- ](?:saving|reduction|benefit|gain|improvement|difference|drop)\w*|(?:the )?same (?:\w+ ){{0,3}}{_MEM}"
        rf"|{_MEM} (?:usage |use |consumption )?(?:is |stays? |remains? )?(?:(?:the )?same|equal|unchanged|high)"
        rf"|(?:so|that|too|very|this|how) much (?:\w+ ){{0,2}}{_MEM}|(?:lots?|a lot|tons?|plenty) of (?:\w+ )?{_MEM}|(?:huge|enormous|massive|large) (?:\w+ ){{0,2}}(?:{_MEM}|activations?)|where (?:do|does) (?:\w+ ){{0,3}}(?:extra|additional)"
        rf"|peaks? (?:\w+ )?(?:higher|above|at more)|(?:higher|worse|larger|bigger) peak"
    ),
    "slow": Concept(
        r"slow\w*|crawl\w*|sluggish|takes? (?:forever|ages|much longer|longer|(?:\w+ )?times (?:longer|as long)|\d+x|so long|hours)"
        r"|(?:\d+(?:[.,]\d+)?|two|three|four|five|six|ten|several|twice|many) ?(?:x|times|×)? ?(?:as )?(?:slow\w*|long\w*)"
        r"|(?:poor|low|bad|terrible|awful|abysmal|worse|lower) (?:\w+ )?(?:speed|performance|throughput|tokens?/s\w*|it/s|samples/s\w*)"
        r"|(?:speed|throughput|it/s|tokens?(?:/s\w*| per second)|performance)[^.\n]{0,30}(?:drop\w*|fell|falls|halv\w*|(?:is|are|was) (?:low\w*|bad|terrible|poor|worse)|tank\w*|lower|decreas\w*|worse|collapses?)"
        r"|\b(?:no|not|n.t) (?:any )?faster|loses? (?:\w+ )?(?:speed|throughput)|latency (?:is )?(?:higher|high|up)|drags?\b", trouble=True,
    ),
    "no gain": Concept(
        rf"\b{_NOT}\b[^.\n]{{0,40}}(?:faster|speed[- ]?ups?|quick\w*|gains?|improv\w*|benefit\w*|accelerat\w*|scal(?:e|es|ing)|help\w*|difference|effect|speed\w*|better)"
        r"|(?:the )?same (?:\w+ )?(?:speed|time|throughput|it/s|duration|tokens|step time|runtime|wall)|slower|equally (?:fast|slow)"
        r"|(?:only|just|barely|merely|a mere|about) (?:a )?(?:1[.,][0-4]\d* ?(?:x|×|times)|\d ?%|(?:\w+ )?(?:slightly|marginally|percent)|[1-9] percent)|just as (?:slow|fast|long)"
        r"|identical (?:speed|time|throughput)|as (?:slow|fast|long) as|(?:slightly|marginally|barely|hardly|scarcely) (?:\w+ )?(?:faster|quicker|better)|disappoint\w*|no (?:real |noticeable )?(?:gain|win)"
        r"|(?:brings?|brought|gives?|gave|gains?|does|did|makes?|changes?|buys?|adds?|yields?) (?:me |us |almost |absolutely |basically |virtually |practically )*(?:nothing|zero|no )"
        r"|(?:speed|throughput|tokens?/s|samples?/s|it/s|time)[^.\n]{0,30}(?:same|unchanged|identical|equal|flat)|worse (?:than|speed|throughput|perf\w*)|scal\w* (?:is )?(?:bad|poor|terrible|badly|poorly)|poor scaling|longer than"
    ),
    "turing": Concept(
        r"\bt4s?\b|\brtx ?(?:20[678]0|[3-8]000(?! ada))|\b20[678]0(?: ?ti| super)?\b|turing|titan (?:rtx|v|xp)|gtx ?16[56]0|sm_?(?:60|61|70|75)\b"
        r"|compute capability[^\d\n]{0,8}[67]\.\d|\bv100\w*|volta|\bp100\b|gtx ?10[5678]0|\b10[678]0 ?ti\b|pascal|\bp40\b|quadro (?:rtx|t)\b|(?:kaggle|colab)[^.\n]{0,20}(?:free|t4|p100)|free colab"
    ),
    "fp16": Concept(r"\bfp16\b|float ?16|\bhalf[- ]precision|\.half\(\)|torch\.half|\bf16\b|16-mixed|gradscaler|\bfp-16\b|halftensor|fp16"),
    "bf16": Concept(r"\bbf16\w*|b(?:rain )?float ?16|bfloat\w*|\bbf-16\b"),
    "amp": Concept(
        r"\bamp\b|autocast|mixed[- _]precision|gradscaler|\bapex\b|\bb?fp?16\b|b?float16|half[- ]precision|16[- ]bit (?:training|mixed)|automatic mixed|--b?fp?16"
    ),
    "fp32": Concept(r"\bfp32\b|float ?32|full[- ]precision|single[- ]precision|32[- ]bit"),
    "checkpointing": Concept(
        r"(?:gradient|activation|grad)[ _-]?check ?point\w*|activation[ _-]recomput\w*|torch\.utils\.checkpoint|\bcheckpointing\b|checkpointed|recomput\w*|\bcheckpoint\((?!path)|selective checkpoint\w*|use_reentrant|(?:compile\w*|eager|amp|b?fp?16|flash|sdpa|lora|ddp) ?(?:\+|and|with|&) ?checkpoint\b|checkpoint(?:s|ing)? (?:each|every|all) (?:\w+ )?(?:blocks?|layers?)"
    ),
    "accumulation": Concept(r"accumulat\w*|grad[ _-]?accum\w*|micro[- _]?batch\w*|\bga ?= ?\d+"),
    "batch 1": Concept(
        r"(?:micro[- ]?)?batch[ _-]?size[ _]*(?:of|=|:|is|to|was|at)?[ _]*(?:1|one)\b(?!\d|\.\d)|\bbatch (?:of |= ?|is )?(?:1|one)\b(?!\d|\.\d)|\bbs ?[=:]? ?1\b|single (?:sample|sequence|example)|batch_size['\"]?[ =:]{1,3}1\b(?!\d|\.\d)|one (?:sample|sequence|example)|smallest batch|minimum batch|batch \(1\)|mbs ?= ?1\b"
    ),
    "evaluation": Concept(
        r"evaluat\w*|\beval\w*|validat\w*|\bpredict(?:ion|ions|ing)?\b|compute_metrics|(?:test|dev) set|\bval (?:step|loop|loss|set|epoch)|do_eval|computing (?:the )?metrics"
    ),
    "large model": Concept(
        r"gpt-?2?[- _]?(?:large|xl)\b|\b(?:774|762|770)\s?m\w*|\b(?:1[.,]\d|1558|2[.,]7|3|6|7|8)\s?b\b|\b(?:1[.,]5|1[.,]3|1[.,]6|2[.,]7|6|7) ?billion|rugpt\w*|gpt-?neo|gpt-?j|llama|mistral|qwen|large (?:language )?model|\bxl\b|gpt-?large|gptlarge\w*"
    ),
    "optimizer": Concept(r"optimi[sz]er\w*|\badam\w*|exp_avg\w*|momentum|moments\b|optim\.\w+"),
    "8-bit optimizer": Concept(r"adamw?_?8[- ]?bit|8[- ]?bit (?:\w+ )?(?:adam\w*|optim\w*|states?)|adamw_(?:bnb_)?8bit|lion8bit|adam\w*_8bit|optim\w*[^.\n]{0,20}8[- ]?bit"),
    "paged": Concept(r"\bpaged?[ _-]?\w*(?:adam|optim|lion|8bit|32bit)\w*|pagedadam\w*|unified memory|managed memory|\bpaged\b|cudamallocmanaged"),
    "driver view": Concept(r"nvidia[- ]?smi|nvtop|nvitop|task manager|gpustat|nvml|the driver|device memory|actual (?:gpu )?usage|system monitor|\bsmi\b"),
    "torch view": Concept(r"memory_allocated|memory_reserved|max_memory\w*|memory_summary|torch(?:\.cuda)?[^.\n]{0,25}(?:says|reports?|shows?|claims?|memory|thinks|counts?|sees)|pytorch (?:says|reports?|shows?|claims?|only|thinks|counts?|sees)|allocated|allocator|torch'?s? counters?"),
    "mismatch": Concept(r"differ\w*|discrepan\w*|mismatch\w*|not (?:the )?(?:same|equal|match\w*|agree)|n.t (?:match|agree|equal|add up)|inconsisten\w*|while|whereas|\bbut\b|\bvs\.?\b|versus|yet\b|however|although|even though|unlike|\bonly\b|(?:more|higher|larger|less|lower) than|diverge\w*|allclose|not identical"),
    "int8": Concept(r"\bint8\b|(?<!adamw_)(?<!adam)8[- ]?bit|load_in_8bit|llm\.int8|bitsandbytes|\bbnb\b|\bw8a8\b|quanti[sz]\w*"),
    "quantised": Concept(r"\bint[48]\b|[48][- ]?bit|load_in_[48]bit|quanti[sz]\w*|\bnf4\b|\bgptq\b|\bawq\b|qlora|llm\.int8|bitsandbytes|\bfp4\b|\bbnb\b"),
    "lora": Concept(r"\bq?lora\b|\bpeft\b|\badapters?\b|get_peft_model|loraconfig|frozen (?:base|model|weights|backbone)|prompt tuning|prefix tuning"),
    "generation": Concept(r"generat\w*|\bsampl(?:e|es|ing)\b|inference|decod(?:e|ing)\b|\.generate\("),
    "after training": Concept(
        r"after (?:\w+ ){0,4}(?:train\w*|fine-?tun\w*|epoch|step)|during (?:\w+ )?(?:train\w*|fine-?tun\w*)|callback|inside (?:the )?(?:train\w*|loop)|between (?:epochs|steps)|while training|just trained|train(?:ed|ing) (?:with|model|using)|fine-?tun\w*|same (?:process|script|session)|rollouts?|right after|once training|when training (?:ends|is done|finishes)|in train(?:ing)? mode|grpo|ppo|rlhf"
    ),
    "bad output": Concept(r"slow\w*|takes? (?:\w+ ){0,2}\d+(?:\.\d+)? ?(?:minutes?|min|hours?)\b|garbage|gibberish|nonsense|broken|repeat\w*|wrong|random (?:text|tokens|words)|incoherent|takes? (?:forever|ages|minutes|long\w*)|no (?:kv[- ]?)?cache|cache (?:is )?(?:off|disabled|not used|ignored|none)|degenerat\w*|crawl\w*|worse|bad (?:text|output|quality)|quadratic|longer and longer", trouble=True),
    "compile": Concept(r"torch[._]?compile\w*|\bcompil\w*|inductor|dynamo\b|--compile|_dynamo"),
    "eager mode": Concept(r"\beager\w*|without compil\w*|uncompiled|non-compiled"),
    "batch search": Concept(
        r"auto_find_batch_size|find_executable_batch_size|automatic(?:ally)? (?:\w+ ){0,4}batch|batch[- _]?size (?:finder|search\w*|scal\w*|tuner|probe|probing)|auto[- _]?(?:scale|micro)?[- _]?batch\w*|microbatch_?size[ =:'\"]+auto|scale_batch_size|(?:search|find\w*|prob\w*|bisect\w*|try\w*|tun\w*) (?:\w+ ){0,4}(?:largest|biggest|maximum|max|best|optimal|right) (?:\w+ )?batch|batchsizefinder|power scaling|auto micro-?batching|(?:doubling|halving|increasing|decreasing) (?:the )?batch|tries (?:several|different|many|each) batch"
    ),
    "worse loss": Concept(
        r"\bloss\w*[^.\n]{0,60}(?:worse|higher|larger|plateau\w*|stuck|stall\w*|\bnot\b|n.t\b|differ\w*|bigger|stops?|diverg\w*|flat|mismatch\w*|inconsisten\w*|off by|slower|too high|wrong|above|never|lags?|gap)"
        r"|(?:worse|higher|different|larger|wrong|inconsistent|lower) (?:\w+ ){0,3}(?:loss\w*|perplexity|results?|quality|accuracy|convergence|f1|scores?|model)|converg\w*[^.\n]{0,20}(?:worse|slower|badly|differ\w*|poorly)|(?:does ?n.?t|not|never|no longer|fails? to|stopped) (?:converg\w*|match\w*|learn\w*|improv\w*|reproduc\w*|train\w* (?:well|properly))"
        r"|(?:perplexity|quality|accuracy|results?) (?:is |are |got |gets |was )?(?:much |a bit |slightly |clearly )?(?:worse|higher|different|degrad\w*|not (?:the same|equal))|gradients? (?:are |is )?(?:not equal|differ\w*|too (?:large|small))|not equivalent|trains? worse|underperform\w*"
        r"|(?:curves?|losses|runs|trainings?)[^.\n]{0,30}(?:differ\w*|diverge\w*|n.t match|not match|not (?:the )?same|not equal|apart)|differ\w*[^.\n]{0,60}\bloss"
    ),
    "long batch": Concept(r"batch[ _-]?(?:size)?[ _]*(?:of|=|:|is)?[ _]*(?:[2-9]\d*|1\d+)\b|(?:large|full|real|big|one) batch|no accumulation|without accumulation|× ?\d+|x ?\d+|\d+ ?x ?\d+"),
    "upgrade": Concept(
        r"upgrad\w*|updat(?:e|ed|ing) (?:\w+ )?(?:to|of|transformers|torch|trl|peft|libraries|packages|the lib\w*|pip)|(?:newer|new|latest|recent|different|later) (?:\w+ )?(?:version|release|transformers|trl|torch)|after (?:moving|switching|migrating|bumping|going) (?:\w+ )?(?:to|from)|transformers(?:==| )v?(?:5|4\.5\d)|v5\b|since (?:v?\d|the (?:new|last|latest)|version)|old(?:er)? (?:version|release)|regression|bump\w*|migrat\w*"
    ),
    "loaded dtype": Concept(r"torch_dtype|\bdtype\b|loaded (?:as|in)|from_pretrained|weights? (?:are|is|were|in|load\w*|come|now)|parameters? (?:are|is|were|in)|default (?:d?type|precision)|\.dtype|precision of the weights|params? (?:are|in)|(?:bf16|bfloat16|half) (?:weights|parameters)|model (?:is|was) (?:now )?(?:in )?(?:bf16|bfloat16)"),
    "nan": Concept(
        r"\bnans?\b|not[- ]a[- ]number|\bloss\w*[^.\n]{0,30}\binf(?:inity|inite)?\b|infinite loss|becomes? inf\b|overflow\w*|inf(?:inity)? (?:loss|grad\w*)|grad\w*[^.\n]{0,20}\binf\b", trouble=True,
    ),
    "offload": Concept(r"offload\w*|save_on_cpu|\bto (?:the )?(?:cpu|host|ram)\b|zero-?(?:3|infinity)|saved_tensors_hooks|spill\w*|on the (?:cpu|host)"),
    "activations": Concept(r"activation\w*|save_on_cpu|saved[ _]tensors?\w*|intermediate (?:results|tensors|states)"),
    "memory grows": Concept(
        r"(?:memory|vram|usage|gpu mem\w*|allocated|consumption|footprint)[^.\n]{0,60}(?:grow\w*|grew|increas\w*|creep\w*|crept|climb\w*|leak\w*|rises?|rising|rose|goes up|going up|accumulat\w*|builds? up|keeps? (?:going|growing|increasing|rising|climbing)|adds? up|(?:not|n.t) (?:being )?(?:freed|released)|never (?:freed|released))"
        r"|(?:memory|vram|cuda|gpu) leak\w*|leak\w* (?:\w+ )?(?:memory|vram)|(?:grow\w*|increas\w*|creep\w*|climb\w*|rising) (?:\w+ ){0,3}(?:memory|vram|usage)|eats? (?:up )?(?:more|all) (?:\w+ )?memory"
        r"|(?:each|every) (?:epoch|step|iteration|batch)[^.\n]{0,30}(?:more|additional|extra|higher)[^.\n]{0,20}(?:memory|\bv?ram\b|\d ?gi?b|\d ?mi?b)|(?:each|every) (?:epoch|step|iteration|batch)[^.\n]{0,40}\d ?[gm]i?b (?:more|extra|on top)", trouble=True,
    ),
    "over time": Concept(
        r"(?:each|every|per|with|after|over|from) (?:\w+ ){0,3}(?:steps?|iterations?|batch(?:es)?|epochs?|iters?|time|few|hundred|thousand|\d+|while|minutes?|hours?|step to step)|slowly|steadily|gradually|linear\w*|eventually|until|constantly|continu\w*|monoton\w*|step by step|little by little|bit by bit|forever|over and over"
    ),
    "ddp": Concept(r"\bddp\b|distributeddataparallel|distributed data parallel|torchrun|torch\.distributed|accelerate launch|nn\.parallel\.distributed|--nproc"),
    "dp": Concept(r"\bdp\b|(?<!distributed)(?<!distributed )data[- ]?parallel\b|nn\.dataparallel"),
    "one card": Concept(r"(?:single|one|1)[- ](?:gpu|card|device)|without (?:ddp|distributed)|non-distributed|plain|alone|on one\b|single process"),
    "many cards": Concept(
        r"(?:\b[2-9]|\b1[0-6]|two|three|four|six|eight|multiple|several|both|many|more|dual|additional|second)[ -]?x? ?(?:\w+ ){0,2}(?:gpus?|cards?|t4s?|a100s?|h100s?|h200s?|v100s?|\w*\d{3,4}(?:ti)?s?\b|devices)|multi-?[ -]?gpu\w*|\b[2-9]x ?(?:rtx|a100|h100|v100|t4|\d{4})|dataparallel|\bddp\b|torchrun|nvlink|distributed|world[ _]size|\bfsdp\b"
    ),
    "gelu": Concept(r"gelu\w*|newgelu\w*|activation function|torch\.tanh|\btanh\b|elementwise kernels?|aten::(?:pow|tanh)"),
    "mlp": Concept(r"\bmlp\b|feed[- ]?forward|\bffn\b|c_fc|gpt2mlp|activation"),
    "triton": Concept(r"triton|tl\.dot|inductor|ptxas|flex_?attention|liger"),
    "flash": Concept(r"flash[- _]?att\w*|\bfa-?[123]\b|flash_attn|\bsdpa\b|scaled[ _]dot[ _]product\w*|xformers|memory[- ]efficient attention|flash sdp|fused attention"),
    "eager attention": Concept(r"\beager\b|attn_implementation|manual attention|vanilla attention|standard attention|output_attentions|default attention"),
    "short": Concept(r"short (?:seq\w*|text\w*|input\w*|sentence\w*|prompt\w*|context)|(?:seq\w*|length|tokens|context)[^.\n\d]{0,20}(?:of |= ?|is |: ?)?(?:16|32|48|50|60|64|80|96|100|120|127|128)\b|\b(?:16|32|48|64|80|96|100|128)[- ](?:token|tok)\w*|tweets?|max_length ?= ?(?:32|64|128)\b|block_size ?= ?(?:32|64|128)\b"),
    "outputs": Concept(r"outputs?|logits?|results?|generat\w*|predictions?|hidden states?|values|numbers|perplexit\w*"),
    "reorder": Concept(r"scale_attn_by_inverse_layer_idx|reorder_and_upcast_attn|scale_attn\w*|scaling options?|layer_idx"),
    "utilisation": Concept(
        r"(?:gpu|volatile|cuda)?[- ]?util\w*[^.\n]{0,40}(?:\b[0-6]?\d ?%|low|poor|drop\w*|zero|fluctuat\w*|oscillat\w*|spik\w*|jump\w*|bounc\w*|under \d+|below|saw ?tooth|never (?:above|exceeds)|around \d\d|only|idle)|(?:low|poor|bad|under-?) ?(?:gpu )?utili[sz]\w*|gpu (?:\w+ ){0,4}(?:idle|idling|starv\w*|wait\w*|bored|unused|doing nothing|underused|sits?)|\b[0-6]?\d ?% (?:gpu|utili[sz]ation|usage|busy)|starv\w*|waits? (?:for|on) (?:the )?(?:data\w*|batch\w*|cpu|loader|input)|gpu[- ]usage (?:is )?(?:low|\b[0-6]?\d ?%)"
    ),
    "loader": Concept(r"data ?loader\w*|num_workers|\bworkers?\b|data loading|loading (?:the )?data|tokeni[sz]\w*|pre-?process\w*|input pipeline|disk|__getitem__|collat\w*|pin_memory|next\(|fetch\w*|cpu (?:is |at )?(?:100|busy|bound|pinned|maxed)|data pipeline|augment\w*|enumerate\((?:\w*loader|\w*dl)"),
    "accuracy falls": Concept(
        r"(?:accuracy|perplexity|ppl|f1|quality|bleu|rouge\w*|scores?|summar\w*|texts?|translations?|generations?|eval loss|outputs?|results?|performance|answers?)[^.\n]{0,50}(?:drop\w*|worse\w*|fall\w*|fell|degrad\w*|decreas\w*|lost|loses?|rises?|rose|jump\w*|increas\w*|higher|collapse\w*|bad|terrible|went (?:up|down)|garbage|suffers?|nonsense|tank\w*|from \d|lower)|(?:los\w*|drop\w*|degrad\w*|worse|lower|reduced|hurts?|much worse|bad) (?:\w+ ){0,3}(?:accuracy|perplexity|quality|f1|points?|ppl|results?|outputs?|metrics?)", trouble=True,
    ),
    "mfu": Concept(r"\bm\.?f\.?u\b|flops? util\w*|model flops|peak flops|of (?:the )?(?:theoretical )?peak|hardware util\w*|\bhfu\b"),
    "over 100": Concept(r"\b1[0-9]\d(?:\.\d+)? ?(?:%|percent)|(?:over|above|more than|exceed\w*|greater than|>|beyond|higher than) (?:100|one hundred|1\.0|unity|the (?:theoretical|data ?sheet|peak)|peak|its peak|what the card)|impossibl\w*|mfu[^\d\n]{0,12}1\.[0-9]|\b[2-9]\d\d ?%"),
    "shared memory": Concept(r"shared (?:gpu |video )?memory|sysmem|system memory fallback|sysmem fallback|spill\w* (?:in)?to (?:the )?(?:ram|system|host|shared)|uses? (?:my |the |system )*ram instead|\bram\b[^.\n]{0,30}instead of"),
    "windows": Concept(r"windows|\bwsl2?\b|task manager|win1[01]|geforce driver|\bwddm\b|nvidia control panel"),
    "killed": Concept(r"\bkilled\b|exit(?:ed)? (?:with )?(?:code |status )?(?:137|-9)|sigkill|signal 9|oom[- ]?killer|kernel (?:died|dies|restart\w*|crash\w*|appears to have died)|your session crashed|used all available ram|return ?code:? -9"),
    "host memory": Concept(r"(?:system|host|cpu|main|computer.?s?) (?:memory|ram)|\bram\b|swap\w*"),
    "no warning": Concept(r"used to (?:work|oom|crash|run out|be|get|fail|take|have)"),
    "loss zero": Concept(r"loss[^.\n]{0,16}\b0\.0+\b|loss (?:is |becomes |drops to |stays (?:at )?)?(?:zero|0)\b(?![.\d])"),
    "periodic": Concept(r"period\w*|every (?:few|\w+ hundred|\d+)|sometimes|occasional\w*|intermittent\w*|now and then|at random|sporadic\w*|from time to time|after (?:\d+|a few|some|several)|suddenly|at step"),
    "conv1d": Concept(r"conv1d|(?:no|not|n.t|any|find|finds|found)[^.\n]{0,30}linear (?:modules|layers)|linear (?:modules|layers)[^.\n]{0,30}(?:not|none|missing|n.t)|target[_ ]modules"),
    "cannot train": Concept(r"(?:can.?t|cannot|can not|not|n.t|unable to|refuses to|impossible to|fails? to) (?:be )?(?:train|fine-?tune)\w*|(?:train\w*|fine-?tun\w*) (?:\w+ ){0,4}(?:fails?|refus\w*|not (?:possible|supported|allowed)|error|raises)"),
}  # fmt: skip
