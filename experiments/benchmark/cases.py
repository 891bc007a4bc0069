"""Benchmark cases: the programs compared, and the tokens, FLOPs and bytes of a round."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

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
JAXFORMER_MODULE, TORCH_MODULE, LINEN_MODULE = (
    f"experiments.benchmark.{name}"
    for name in ("jaxformer_programs", "torch_programs", "linen_programs")
)
TORCH_AND_TRANSFORMERS = ("torch", "transformers")
DOCUMENT_CASES: tuple[CaseName, ...] = ("documents", "experts")
DECODE_ROWS: Mapping[CaseName, int] = {"decode_1": 1, "decode_8": 8, "decode_64": 64}
XLA_ATTENTION, PREFILL_ONLY = {"implementation": "xla"}, {"prefill_only": True}

CASES: Mapping[CaseName, tuple[Program, ...]] = {  # the baseline first
    "machine": (
        Program("matrix products", f"{JAXFORMER_MODULE}:matmul_program"),
        Program("copies", f"{JAXFORMER_MODULE}:copy_program"),
    ),
    "train": (
        Program("transformers, SDPA", f"{TORCH_MODULE}:train_program", TORCH_AND_TRANSFORMERS),
        Program(
            "transformers, SDPA, compiled",
            f"{TORCH_MODULE}:train_program",
            TORCH_AND_TRANSFORMERS,
            {"compiled": True},
        ),
        Program(
            "x-transformers",
            f"{TORCH_MODULE}:x_transformers_train_program",
            ("torch", "x_transformers"),
        ),
        Program("linen's attention", f"{LINEN_MODULE}:train_program"),
        Program(
            "linen's attention, all devices",
            f"{LINEN_MODULE}:train_program",
            (),
            {"all_devices": True},
        ),
        Program(
            "jaxformer, whole matrices",
            f"{JAXFORMER_MODULE}:train_program",
            (),
            {"attention_implementation": "xla"},
        ),
        Program("jaxformer, unrolled", f"{JAXFORMER_MODULE}:train_program", (), {"scan": False}),
        Program("jaxformer", f"{JAXFORMER_MODULE}:train_program"),
    ),
    "prefill": (
        Program(
            "transformers, SDPA",
            f"{TORCH_MODULE}:decode_program",
            TORCH_AND_TRANSFORMERS,
            PREFILL_ONLY,
        ),
        Program("jaxformer", f"{JAXFORMER_MODULE}:decode_program", (), PREFILL_ONLY),
    ),
    "decode": (
        Program("transformers, SDPA", f"{TORCH_MODULE}:decode_program", TORCH_AND_TRANSFORMERS),
        Program(
            "transformers, SDPA, compiled",
            f"{TORCH_MODULE}:decode_program",
            TORCH_AND_TRANSFORMERS,
            {"compiled": True},
        ),
        Program("jaxformer", f"{JAXFORMER_MODULE}:decode_program"),
    ),
    "attention": (
        Program("torch, SDPA", f"{TORCH_MODULE}:attention_program", ("torch",)),
        Program(
            "jaxformer, whole matrices", f"{JAXFORMER_MODULE}:attention_program", (), XLA_ATTENTION
        ),
        Program("jaxformer", f"{JAXFORMER_MODULE}:attention_program"),
    ),
    "loss": (
        Program("torch", f"{TORCH_MODULE}:loss_program", ("torch",)),
        Program(
            "jaxformer, whole logits", f"{JAXFORMER_MODULE}:loss_program", (), {"all_logits": True}
        ),
        Program("jaxformer", f"{JAXFORMER_MODULE}:loss_program"),
    ),
    "long": tuple(
        Program(
            f"{length:,} tokens{seen}", f"{JAXFORMER_MODULE}:long_attention_program", (), options
        )
        for window, seen in ((None, ""), (512, ", a window of 512"))
        for length in (8192, 16384)
        for options in ({"length": length, "window": window},)
    ),
    "vocabulary": (
        Program(
            "whole logits", f"{JAXFORMER_MODULE}:large_vocabulary_program", (), {"all_logits": True}
        ),
        Program("jaxformer", f"{JAXFORMER_MODULE}:large_vocabulary_program"),
    ),
    "rotary": (
        Program("in real numbers", f"{JAXFORMER_MODULE}:rope_program", (), {"real_numbers": True}),
        Program("jaxformer", f"{JAXFORMER_MODULE}:rope_program", (), {"real_numbers": False}),
    ),
    "remat": tuple(
        Program(f"remat {kind}", f"{JAXFORMER_MODULE}:train_program", (), {"remat": kind})
        for kind in ("none", "dots", "full")
    ),
    "compile": tuple(
        Program(f"{layers} layers", f"{JAXFORMER_MODULE}:compile_program", (), {"layers": layers})
        for layers in (4, 32)
    ),
    **{
        case: tuple(
            Program(
                f"{documents} document{'s' if documents > 1 else ''} a row",
                f"{JAXFORMER_MODULE}:train_program",
                (),
                {"documents": documents, "experts": case == "experts", "scan": False},
            )
            for documents in (1, 8)
        )
        for case in DOCUMENT_CASES
    },
    **{
        case: (
            Program(
                "transformers, static cache",
                f"{TORCH_MODULE}:decode_program",
                TORCH_AND_TRANSFORMERS,
                {"compiled": True, "rows": rows},
            ),
            Program("jaxformer", f"{JAXFORMER_MODULE}:decode_program", (), {"rows": rows}),
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
            all parameters except the embedding, of which it reads only some rows.
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
