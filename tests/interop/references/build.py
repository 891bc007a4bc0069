"""Builds reference models with random parameters and records their logits."""

import functools
import math

import torch
import transformers
from torch import nn

from tests.interop.references import (
    specs_from_2023,
    specs_of_chunks,
    specs_of_coverage,
    specs_of_coverage_2,
    specs_of_recurrent,
    specs_of_small_options,
    specs_to_2022,
)
from tests.interop.references import torch_models as written
from tests.interop.references.specs_to_2022 import V

STEPS_PER_UNIT = (
    64  # parameters are whole numbers up to 127 over 64, exact in float16 and bfloat16 too
)
SPECS = (
    specs_to_2022.SPECS
    | specs_from_2023.SPECS
    | specs_of_coverage.SPECS
    | specs_of_coverage_2.SPECS
    | specs_of_chunks.SPECS
    | specs_of_recurrent.SPECS
    | specs_of_small_options.SPECS
)
TORCH_MODELS = {
    "ref_transformer2017": written.Transformer2017,
    "lamda_like": written.LamdaLike,
    "ref_gopher": written.Gopher,
    "ref_phi3_small": written.Phi3Small,
    "ref_baichuan2_7b": functools.partial(written.Baichuan2, max_position_embeddings=64),
    "ref_baichuan2_13b": written.Baichuan2,
    "muse_glimmer_text": written.MuseGlimmer,
}
NAMES = (*SPECS, *TORCH_MODELS)
GAIN_FROM_ZERO = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "nemotron",
    "recurrent_gemma",
    "vaultgemma",
)  # scales are 1 + weight
UNSCALED_ATTENTION = (
    "t5",
    "mt5",
    "switch_transformers",
    "gpt_neo",
)  # their scores are not scaled; their queries are small


def round_to_steps(x):
    """Round to whole numbers over STEP, none beyond a signed byte."""
    return (x * STEPS_PER_UNIT).round().clamp(-127, 127) / STEPS_PER_UNIT


def head_dim(config):
    """Width of a head of a T5 or GPT-Neo."""
    return getattr(config, "d_kv", None) or config.hidden_size // config.num_heads


def randomise(model, seed):
    """Draw parameters: scales of norms about what leaves a vector alone, biases not zero.

    Matrices keep the size of what they multiply. Tables of sinusoids stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if model.config.model_type in GAIN_FROM_ZERO else 1.0
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        path, _, leaf = name.rpartition(".")
        # DBRX has its attention in a module of this name.
        norm = any(
            word in path.replace("norm_attn_norm", "") for word in ("norm", "ln_", ".ln", ".pre_ln")
        )
        if "embed_positions" in path and model.config.model_type in ("marian", "fsmt", "pegasus"):
            continue
        if (norm and leaf in ("weight", "scale")) or (path.endswith(".router") and "scale" in leaf):
            noise = 0.2 * noise + centre
        elif parameter.ndim == 1 or "bias" in leaf:
            noise = 0.2 * noise
        elif "relative_attention_bias" not in path:
            table = any(word in path for word in ("embed", "wte", "wpe", "shared"))
            noise = noise * (0.5 if table else 1.2 / math.sqrt(parameter.shape[-1]))
        if path.endswith((".q", ".q_proj")) and model.config.model_type in UNSCALED_ATTENTION:
            noise = noise / math.sqrt(head_dim(model.config))
        with torch.no_grad():
            parameter.copy_(round_to_steps(noise))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of the choice of experts
            buffer.copy_(round_to_steps(0.15 * torch.randn(buffer.shape, generator=generator)))
        if name.endswith("layer_scalar"):
            buffer.copy_(round_to_steps(1 + 0.2 * torch.randn(buffer.shape, generator=generator)))
    return model.eval()


def build(name, *, seed=0, **changes):
    """A reference in float32 with random parameters; `changes` replace what its config says."""
    if name in TORCH_MODELS:
        return randomise(TORCH_MODELS[name](**changes), seed)
    model_type, kind, arguments = SPECS[name]
    config = transformers.AutoConfig.for_model(model_type, **(arguments | changes))
    # Transformers 5's eager Falcon adds ALiBi twice; its sdpa does not know Gemma 2's caps.
    attention = "sdpa" if name == "falcon_rw" else "eager"
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    model = randomise(getattr(transformers, kind)(config).float(), seed)
    add_special_tensors(name, model, seed)
    return model


def add_special_tensors(name, model, seed):
    """What single references have beside their random parameters."""
    generator = torch.Generator().manual_seed(seed + 1)
    if name in ("t5_v1_1", "mt5"):  # built tied; released files hold a head of their own
        shape = model.lm_head.weight.shape
        head = torch.randn(shape, generator=generator) * (1.2 / math.sqrt(shape[-1]))
        model.lm_head.weight = nn.Parameter(round_to_steps(head))
    if name in ("marian", "pegasus"):
        for stack in (model.model.encoder, model.model.decoder):
            stack.embed_positions.weight.data = stack.embed_positions.create_weight()
        bias = torch.randn(model.final_logits_bias.shape, generator=generator)
        model.final_logits_bias.copy_(round_to_steps(0.3 * bias))
    if name == "xlnet_uni":  # its projections are stored with heads as an axis
        for parameter in model.parameters():
            if parameter.ndim == 3:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data = round_to_steps(noise / math.sqrt(model.config.d_model))
    if name == "gpt3_banded":
        for block in model.transformer.h[1::2]:
            block.attn.register_forward_pre_hook(written.band(5), with_kwargs=True)


def tokens(model, length, *, source_length=None, batch=1, seed=0):
    """Random ids that no model takes for padding, as the keywords of its forward."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length, vocab_size):
        return torch.randint(4, vocab_size, (batch, length), generator=generator)

    config = model.config
    target = draw(length, config.vocab_size)
    if not getattr(config, "is_encoder_decoder", False):
        return {"input_ids": target}
    source = draw(source_length, getattr(config, "src_vocab_size", config.vocab_size))
    return {"input_ids": source, "decoder_input_ids": target}


@torch.no_grad()
def logits(model, ids):
    """Float32 logits as a numpy array."""
    if isinstance(model, written.TorchReference):
        return model(**ids).numpy()
    return model(**ids, use_cache=False).logits.numpy()


__all__ = ["NAMES", "SPECS", "STEPS_PER_UNIT", "V", "TORCH_MODELS", "build", "logits", "tokens"]
