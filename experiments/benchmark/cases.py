"""Benchmark cases: the programs compared, and the tokens, FLOPs and bytes of a round."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from experiments.benchmark.jaxformer_programs import REPEATS, model_config
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
]
JAXFORMER_MODULE, TORCH_MODULE, LINEN_MODULE = (
    f"experiments.benchmark.{name}"
    for name in ("jaxformer_programs", "torch_programs", "linen_programs")
)
TORCH_AND_TRANSFORMERS = ("torch", "transformers")
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
}
CASE_DESCRIPTIONS: Mapping[CaseName, str] = {
    "machine": "What the machine can do at most, in products and in memory.",
    "train": "An update: forward, backward, AdamW.",
    "prefill": "Prompts read, and one token chosen for each.",
    "decode": "Prompts continued greedily.",
    "attention": "Causal attention with its gradient.",
    "loss": "Cross-entropy of hidden vectors with the gradients of vectors and head.",
    "long": "Attention of 4 heads of width 64 with its gradient.",
    "vocabulary": "The loss of 4,096 tokens out of 128,000.",
    "rotary": "Queries turned a hundred times, with the gradient.",
    "remat": "An update: what is kept for the backward pass, and what is computed again.",
    "compile": "The training step compiled.",
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
}


def has_peak_share(case: CaseName) -> bool:
    """Whether the case can be reported as a share of the machine's peak."""
    return case in ("train", "remat", "prefill", "decode", "attention", "loss")


class WorkCounts(NamedTuple):
    """What one round computes: FLOPs, bytes and tokens.

    Attributes:
        tokens: That it works on, or makes.
        flops: Of its matrix products, as `costs` counts them; nothing computed twice counts twice.
        bytes_moved: That must come from memory and go there, at least.
    """

    tokens: int | None = None
    flops: float | None = None
    bytes_moved: float | None = None


def count_work(case: CaseName, size: BenchmarkSize, devices: int) -> WorkCounts:
    """Work of one round; all fields None where the compared programs do different work.

    Args:
        case: The case.
        size: The shapes.
        devices: Of ours. Each makes its own products and copies, and reads all parameters but the
            table of tokens, of which it reads some rows.
    """
    config, rows = model_config(size), size.batch_size * size.length
    width = 2 if size.dtype == "bfloat16" else 4
    match case:
        case "train" | "remat":
            return WorkCounts(rows, rows * costs.training_flops_per_token(config, size.length))
        case "prefill":
            # The head reads the last token of each row alone.
            head = costs.logit_flops(config, size.length) - costs.logit_flops(config, 1)
            flops = size.batch_size * (costs.forward_flops(config, size.length) - head)
            return WorkCounts(rows, flops)
        case "decode":
            # At half the way as many keys are there as on average.
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
            # Two products forward and four backward, of half the pairs.
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
