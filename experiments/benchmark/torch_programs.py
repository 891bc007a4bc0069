"""Benchmark programs in torch: Hugging Face Llama and x-transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from experiments.benchmark.runner import BenchmarkSize, RoundFunction


def llama_model(size: BenchmarkSize) -> Any:
    """A transformers Llama model with scaled_dot_product_attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.model_dim,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads or size.num_heads,
        intermediate_size=size.hidden_dim,
        max_position_embeddings=max(size.length, size.prompt + size.new_tokens),
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as in JAX; no effect on a CPU
    return LlamaForCausalLM(config).to(device())


def autocast(size: BenchmarkSize) -> Any:
    """torch.autocast in the benchmark's dtype; parameters stay float32 in training."""
    dtype = getattr(torch, size.dtype)
    return torch.autocast(device().type, dtype, enabled=dtype != torch.float32)


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_tokens(size: BenchmarkSize, length: int) -> torch.Tensor:
    """A batch of random token ids."""
    torch.manual_seed(0)
    return torch.randint(0, size.vocab_size, (size.batch_size, length), device=device())


def synchronize() -> None:
    """Wait until the GPU has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train_program(size: BenchmarkSize, *, compiled: bool = False) -> RoundFunction:
    """Build an AdamW training step of transformers' Llama."""
    model = llama_model(size)
    run = torch.compile(model) if compiled else model
    return train_round(size, model, lambda tokens: run(tokens, use_cache=False).logits)


def train_round(
    size: BenchmarkSize, model: torch.nn.Module, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> RoundFunction:
    """Build forward, backward and AdamW update of a model that maps tokens to logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = random_tokens(size, size.length + 1)

    def run_round() -> None:
        with autocast(size):
            logits = logits_of(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()

    return run_round


def x_transformers_train_program(size: BenchmarkSize) -> RoundFunction:
    """Build an AdamW training step of an x-transformers decoder with RoPE, RMSNorm and SwiGLU."""
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    decoder = Decoder(
        dim=size.model_dim,
        depth=size.num_layers,
        heads=size.num_heads,
        attn_dim_head=size.model_dim // size.num_heads,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=size.model_dim // size.num_heads,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=size.hidden_dim / size.model_dim,
    )
    model = TransformerWrapper(
        num_tokens=size.vocab_size,
        max_seq_len=size.length,
        use_abs_pos_emb=False,
        attn_layers=decoder,
    ).to(device())
    return train_round(size, model, model)


def decode_program(
    size: BenchmarkSize,
    *,
    prefill_only: bool = False,
    compiled: bool = False,
    rows: int | None = None,
) -> RoundFunction:
    """Build greedy decoding with transformers' cache; or prefill of long prompts plus one token.

    With `compiled` the cache is static, as torch.compile needs fixed shapes.
    """
    size = replace(size, batch_size=rows or size.batch_size)
    model = llama_model(size).to(getattr(torch, size.dtype)).eval()
    options = {}
    if compiled:
        model.forward = torch.compile(model.forward)
        options["cache_implementation"] = "static"
    prompt = random_tokens(size, size.length if prefill_only else size.prompt)
    count = 1 if prefill_only else size.new_tokens
    ones = torch.ones_like(prompt)

    def run_round() -> None:
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=ones,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                **options,
            )
        synchronize()

    return run_round


def attention_program(size: BenchmarkSize) -> RoundFunction:
    """Build causal attention with its gradient."""
    shape = size.batch_size, size.num_heads, size.length, size.model_dim // size.num_heads
    torch.manual_seed(0)
    kind = getattr(torch, size.dtype)
    qkv = [torch.randn(shape, dtype=kind, device=device(), requires_grad=True) for _ in range(3)]

    def run_round() -> None:
        heads = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        torch.autograd.grad(heads.float().square().sum(), qkv)
        synchronize()

    return run_round


def loss_program(size: BenchmarkSize) -> RoundFunction:
    """Build the cross-entropy of hidden states, with gradients of hidden states and output head."""
    torch.manual_seed(0)
    tokens = size.batch_size * size.length
    kind = getattr(torch, size.dtype)
    features = torch.randn(tokens, size.model_dim, dtype=kind, device=device(), requires_grad=True)
    kernel = torch.randn(size.model_dim, size.vocab_size, dtype=kind, device=device()) / 16
    kernel.requires_grad_()
    targets = torch.randint(0, size.vocab_size, (tokens,), device=device())

    def run_round() -> None:
        loss = torch.nn.functional.cross_entropy((features @ kernel).float(), targets)
        torch.autograd.grad(loss, (features, kernel))
        synchronize()

    return run_round
