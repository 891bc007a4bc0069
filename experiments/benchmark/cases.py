"""Benchmark cases: the programs compared, and the tokens, FLOPs and bytes of a round."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from experiments.benchmark.ours import TURNS, config_of
from experiments.benchmark.turns import Entry, Size
from jaxformer import costs

Task = Literal[
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
OURS, TORCH, LINEN = (f"experiments.benchmark.{name}" for name in ("ours", "peers", "linen"))
BOTH = ("torch", "transformers")
WHOLE, PROMPT = {"implementation": "xla"}, {"only_prompt": True}

TASKS: Mapping[Task, tuple[Entry, ...]] = {  # the baseline first
    "machine": (Entry("matrix products", f"{OURS}:products"), Entry("copies", f"{OURS}:copies")),
    "train": (
        Entry("transformers, SDPA", f"{TORCH}:training", BOTH),
        Entry("transformers, SDPA, compiled", f"{TORCH}:training", BOTH, {"compiled": True}),
        Entry("x-transformers", f"{TORCH}:x_transformers_training", ("torch", "x_transformers")),
        Entry("linen's attention", f"{LINEN}:training"),
        Entry("linen's attention, all devices", f"{LINEN}:training", (), {"spread": True}),
        Entry(
            "jaxformer, whole matrices", f"{OURS}:training", (), {"attention_implementation": "xla"}
        ),
        Entry("jaxformer, unrolled", f"{OURS}:training", (), {"scan": False}),
        Entry("jaxformer", f"{OURS}:training"),
    ),
    "prefill": (
        Entry("transformers, SDPA", f"{TORCH}:decoding", BOTH, PROMPT),
        Entry("jaxformer", f"{OURS}:decoding", (), PROMPT),
    ),
    "decode": (
        Entry("transformers, SDPA", f"{TORCH}:decoding", BOTH),
        Entry("transformers, SDPA, compiled", f"{TORCH}:decoding", BOTH, {"compiled": True}),
        Entry("jaxformer", f"{OURS}:decoding"),
    ),
    "attention": (
        Entry("torch, SDPA", f"{TORCH}:attention", ("torch",)),
        Entry("jaxformer, whole matrices", f"{OURS}:attention", (), WHOLE),
        Entry("jaxformer", f"{OURS}:attention"),
    ),
    "loss": (
        Entry("torch", f"{TORCH}:losses", ("torch",)),
        Entry("jaxformer, whole logits", f"{OURS}:losses", (), {"whole": True}),
        Entry("jaxformer", f"{OURS}:losses"),
    ),
    "long": tuple(
        Entry(f"{length:,} tokens{seen}", f"{OURS}:long_attention", (), options)
        for window, seen in ((None, ""), (512, ", a window of 512"))
        for length in (8192, 16384)
        for options in ({"length": length, "window": window},)
    ),
    "vocabulary": (
        Entry("whole logits", f"{OURS}:large_losses", (), {"whole": True}),
        Entry("jaxformer", f"{OURS}:large_losses"),
    ),
    "rotary": (
        Entry("in real numbers", f"{OURS}:rotations", (), {"real": True}),
        Entry("jaxformer", f"{OURS}:rotations", (), {"real": False}),
    ),
    "remat": tuple(
        Entry(f"remat {kind}", f"{OURS}:training", (), {"remat": kind})
        for kind in ("none", "dots", "full")
    ),
    "compile": tuple(
        Entry(f"{layers} layers", f"{OURS}:compiling", (), {"layers": layers}) for layers in (4, 32)
    ),
}
ABOUT: Mapping[Task, str] = {
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
PRESETS: Mapping[str, Size] = {
    "peers": Size(),
    "smoke": Size(
        model_dim=32,
        num_heads=2,
        num_layers=2,
        hidden_dim=64,
        vocab_size=64,
        length=32,
        batch_size=2,
        prompt=4,
        new_tokens=4,
        matrix=128,
        copied=2**16,
    ),
    "gpu": Size(
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
        matrix=8192,
        copied=2**28,
    ),
}


def has_share(task: Task) -> bool:
    """Whether the case can be reported as a share of the machine's peak."""
    return task in ("train", "remat", "prefill", "decode", "attention", "loss")


class Work(NamedTuple):
    """What one round computes: FLOPs, bytes and tokens.

    Attributes:
        tokens: That it works on, or makes.
        flops: Of its matrix products, as `costs` counts them; nothing computed twice counts twice.
        bytes_moved: That must come from memory and go there, at least.
    """

    tokens: int | None = None
    flops: float | None = None
    bytes_moved: float | None = None


def work(task: Task, size: Size, devices: int) -> Work:
    """Work of one round; all fields None where the compared programs do different work.

    Args:
        task: The case.
        size: The shapes.
        devices: Of ours. Each makes its own products and copies, and reads all parameters but the
            table of tokens, of which it reads some rows.
    """
    config, rows = config_of(size), size.batch_size * size.length
    width = 2 if size.dtype == "bfloat16" else 4
    match task:
        case "train" | "remat":
            return Work(rows, rows * costs.training_flops_per_token(config, size.length))
        case "prefill":
            # The head reads the last token of each row alone.
            head = costs.head_flops(config, size.length) - costs.head_flops(config, 1)
            flops = size.batch_size * (costs.forward_flops(config, size.length) - head)
            return Work(rows, flops)
        case "decode":
            # At half the way as many keys are there as on average.
            middle = size.prompt + size.new_tokens // 2
            cache_bytes = costs.cache_bytes(
                config, middle, batch=size.batch_size, bytes_per_number=width
            )
            read = costs.parameters(config) - size.vocab_size * size.model_dim
            bytes_per_step = devices * width * read + cache_bytes
            return Work(size.batch_size * size.new_tokens, None, size.new_tokens * bytes_per_step)
        case "attention":
            # Two products forward and four backward, of half the pairs.
            return Work(rows, 6 * rows * size.length * size.model_dim)
        case "loss":
            return Work(rows, 6 * rows * size.model_dim * size.vocab_size)
        case "machine":
            return Work(
                None, devices * TURNS * 2 * size.matrix**3, devices * TURNS * 2 * 4 * size.copied
            )
    return Work()
