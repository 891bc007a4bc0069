"""Benchmark cases: the programs compared, and the tokens, FLOPs and bytes of a round."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from experiments.benchmark.jaxformer_programs import REPEATS, model_config, moe_config
from experiments.benchmark.runner import BenchmarkSize, Program
from jaxformer import costs

CaseName = Literal[
    "machine",
    "train",
    "prefill",
    "decode",
    "attention",
    "loss",
    "long",
    "vocabulary",
    "rotary",
    "remat",
    "compile",
    "documents",
    "experts",
    "decode_1",
    "decode_8",
    "decode_64",
]
JAXFORMER_MODULE = "experiments.benchmark.jaxformer_programs"
TORCH_MODULE = "experiments.benchmark.torch_programs"
DOCUMENT_CASES: tuple[CaseName, ...] = ("documents", "experts")
DECODE_ROWS: Mapping[CaseName, int] = {"decode_1": 1, "decode_8": 8, "decode_64": 64}


def ours(name: str, function: str, **options: Any) -> Program:
    """A program of jaxformer."""
    return Program(name, f"{JAXFORMER_MODULE}:{function}", (), options)


def linen(name: str, **options: Any) -> Program:
    """The train step of a model with the attention of Flax linen."""
    return Program(name, "experiments.benchmark.linen_programs:train_program", (), options)


def torch(name: str, function: str, *other_modules: str, **options: Any) -> Program:
    """A program in torch, and in other modules that it needs."""
    return Program(name, f"{TORCH_MODULE}:{function}", ("torch", *other_modules), options)


def transformers(name: str, function: str, **options: Any) -> Program:
    """A program of transformers."""
    return torch(f"transformers, {name}", function, "transformers", **options)


CASES: Mapping[CaseName, tuple[Program, ...]] = {  # the baseline first
    "machine": (ours("matrix products", "matmul_program"), ours("copies", "copy_program")),
    "train": (
        transformers("SDPA", "train_program"),
        transformers("SDPA, compiled", "train_program", compiled=True),
        torch("x-transformers", "x_transformers_train_program", "x_transformers"),
        linen("linen's attention"),
        linen("linen's attention, all devices", all_devices=True),
        ours("jaxformer, whole matrices", "train_program", attention_implementation="xla"),
        ours("jaxformer, unrolled", "train_program", scan=False),
        ours("jaxformer", "train_program"),
    ),
    "prefill": (
        transformers("SDPA", "decode_program", prefill_only=True),
        ours("jaxformer", "decode_program", prefill_only=True),
    ),
    "decode": (
        transformers("SDPA", "decode_program"),
        transformers("SDPA, compiled", "decode_program", compiled=True),
        ours("jaxformer", "decode_program"),
    ),
    "attention": (
        torch("torch, SDPA", "attention_program"),
        ours("jaxformer, whole matrices", "attention_program", implementation="xla"),
        ours("jaxformer", "attention_program"),
    ),
    "loss": (
        torch("torch", "loss_program"),
        ours("jaxformer, whole logits", "loss_program", all_logits=True),
        ours("jaxformer", "loss_program"),
    ),
    "long": tuple(
        ours(f"{length:,} tokens{seen}", "long_attention_program", length=length, window=window)
        for window, seen in ((None, ""), (512, ", a window of 512"))
        for length in (8192, 16384)
    ),
    "vocabulary": (
        ours("whole logits", "large_vocabulary_program", all_logits=True),
        ours("jaxformer", "large_vocabulary_program"),
    ),
    "rotary": (
        ours("in real numbers", "rope_program", real_numbers=True),
        ours("jaxformer", "rope_program", real_numbers=False),
    ),
    "remat": tuple(
        ours(f"remat {kind}", "train_program", remat=kind) for kind in ("none", "dots", "full")
    ),
    "compile": tuple(
        ours(f"{layers} layers", "compile_program", layers=layers) for layers in (4, 32)
    ),
    **{
        case: tuple(
            ours(name, "train_program", documents=count, experts=case == "experts", scan=False)
            for count, name in ((1, "1 document a row"), (8, "8 documents a row"))
        )
        for case in DOCUMENT_CASES
    },
    **{
        case: (
            transformers("static cache", "decode_program", compiled=True, rows=rows),
            ours("jaxformer", "decode_program", rows=rows),
        )
        for case, rows in DECODE_ROWS.items()
    },
}
PEER_CASES = tuple(case for case in CASES if case not in (*DOCUMENT_CASES, *DECODE_ROWS))
CARD_CASES: tuple[CaseName, ...] = ("machine", "train", "remat", *DOCUMENT_CASES, *DECODE_ROWS)
PRESET_CASES = {"h100": CARD_CASES, "smoke": tuple(CASES)}  # of others, PEER_CASES
CASE_DESCRIPTIONS: Mapping[CaseName, str] = {
    "machine": "Peak rates of the machine: matmul FLOP/s and memory bandwidth.",
    "train": "Train step: forward, backward, AdamW.",
    "prefill": "Process the prompts and choose one token for each.",
    "decode": "Greedy decoding after a prompt.",
    "attention": "Causal attention with its gradient.",
    "loss": "Cross-entropy of hidden states, with gradients of hidden states and output head.",
    "long": "Attention of 4 heads of width 64 with its gradient.",
    "vocabulary": "Cross-entropy of 4,096 tokens over a vocabulary of 128,000.",
    "rotary": "100 applications of RoPE, with gradient.",
    "remat": "Train step with different rematerialization.",
    "compile": "Compile time of the train step.",
    "documents": "Train step by the number of documents in a row.",
    "experts": "Train step of a mixture of experts.",
    "decode_1": "Greedy decoding of one sequence.",
    "decode_8": "Greedy decoding of eight sequences.",
    "decode_64": "Greedy decoding of 64 sequences.",
}
PRESETS: Mapping[str, BenchmarkSize] = {
    "peers": BenchmarkSize(),
    "smoke": BenchmarkSize(
        model_dim=32,
        num_heads=2,
        num_layers=2,
        hidden_dim=64,
        vocab_size=64,
        length=32,
        batch_size=2,
        prompt=4,
        new_tokens=4,
        matrix_dim=128,
        copy_size=2**16,
    ),
    "gpu": BenchmarkSize(
        model_dim=1024,
        num_heads=16,
        num_layers=12,
        hidden_dim=2816,
        vocab_size=32_768,
        length=2048,
        batch_size=8,
        prompt=512,
        new_tokens=256,
        dtype="bfloat16",
        matrix_dim=8192,
        copy_size=2**28,
    ),
    "h100": BenchmarkSize(  # 1.5e9 parameters
        model_dim=2048,
        num_heads=32,
        num_kv_heads=8,
        num_layers=16,
        hidden_dim=8192,
        moe_layers=6,
        num_experts=64,
        expert_dim=1024,
        vocab_size=128_256,
        length=4096,
        batch_size=4,
        prompt=128,
        new_tokens=128,
        dtype="bfloat16",
        matrix_dim=8192,
        copy_size=2**28,
    ),
}


def has_peak_share(case: CaseName) -> bool:
    """Whether the case can be reported as a share of the machine's peak."""
    cases = "train", "remat", "prefill", "decode", "attention", "loss"
    return case in (*cases, *DOCUMENT_CASES, *DECODE_ROWS)


class WorkCounts(NamedTuple):
    """What one round computes: FLOPs, bytes and tokens.

    Attributes:
        tokens: Tokens processed or generated.
        flops: FLOPs of the matmuls, as `costs` counts them, without recomputation.
        bytes_moved: Minimum bytes read from memory and written to it.
    """

    tokens: int | None = None
    flops: float | None = None
    bytes_moved: float | None = None


def count_work(case: CaseName, size: BenchmarkSize, devices: int) -> WorkCounts:
    """Work of one round; all fields None where the compared programs do different work.

    Args:
        case: The case.
        size: Benchmark size.
        devices: Devices of jaxformer. Each computes all matmuls and copies of "machine", and reads
            all parameters except the embedding; of the embedding it reads only some rows.
    """
    if case in DECODE_ROWS:
        case, size = "decode", replace(size, batch_size=DECODE_ROWS[case])
    config = moe_config(size) if case == "experts" else model_config(size)
    rows = size.batch_size * size.length
    width = 2 if size.dtype == "bfloat16" else 4
    match case:
        case "train" | "remat" | "documents" | "experts":
            return WorkCounts(rows, rows * costs.training_flops_per_token(config, size.length))
        case "prefill":
            # The head is applied to the last token of each row only.
            head = costs.logit_flops(config, size.length) - costs.logit_flops(config, 1)
            flops = size.batch_size * (costs.forward_flops(config, size.length) - head)
            return WorkCounts(rows, flops)
        case "decode":
            # The cache at half of the decoding has the average number of keys.
            middle = size.prompt + size.new_tokens // 2
            cache_bytes = costs.cache_bytes(
                config, middle, batch=size.batch_size, bytes_per_number=width
            )
            read = costs.num_parameters(config) - size.vocab_size * size.model_dim
            bytes_per_step = devices * width * read + cache_bytes
            return WorkCounts(
                size.batch_size * size.new_tokens, None, size.new_tokens * bytes_per_step
            )
        case "attention":
            # Two matmuls forward and four backward, each for half of the pairs.
            return WorkCounts(rows, 6 * rows * size.length * size.model_dim)
        case "loss":
            return WorkCounts(rows, 6 * rows * size.model_dim * size.vocab_size)
        case "machine":
            return WorkCounts(
                None,
                devices * REPEATS * 2 * size.matrix_dim**3,
                devices * REPEATS * 2 * 4 * size.copy_size,
            )
    return WorkCounts()
