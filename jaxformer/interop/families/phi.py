"""Phi 1 to 2 (parallel blocks), Phi-3 (Llama with fused projections), Phi-3.5 MoE, Phi-3-small.

Phi-3.5 MoE has biases, LayerNorm, and two experts chosen by SparseMixer.

Phi-3-small scales as muP does (embedding, scores and logits), clamps its gated feed-forward, and
attends by blocks in all but some layers.
"""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    Field,
    Fixed,
    Options,
    PresenceField,
    Unused,
    Written,
    fixed,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.windows import Windows
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import (
    attention_rules,
    branch_rules,
    decoder_mapping,
    fused_rules,
    linear_rules,
    norm_rules,
    qk_norm_rules,
    top_level_rules,
)
from jaxformer.interop.rope_config import RopeField, first_rope
from jaxformer.interop.transforms import BY_GROUP, IN_TURN
from jaxformer.zoo.llama import LLAMA
from jaxformer.zoo.phi import PHI, PHI_3, PHI_3_SMALL
from jaxformer.zoo.sizes import like


class PhiRope(RopeField):
    """RoPE whose length in training is a field of its own."""

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields; factors for long sequences need head_dim = model_dim / num_heads."""
        fields, rope, attention = super().write(model), first_rope(model), p.heads_of(model)
        if fields is None or rope is None or not isinstance(rope.scaling, c.LongRope):
            return fields
        if attention.head_dim * attention.num_heads != model.model_dim:
            return None
        fields["original_max_position_embeddings"] = rope.scaling.original_max_length
        if rope.scaling.attention_factor is None:  # early Phi-3 code supports no other attribute
            old_fields = ("type", "short_factor", "long_factor")
            fields["rope_scaling"] = {name: fields["rope_scaling"][name] for name in old_fields}
        return fields


class PhimoeRope(RopeField):
    """RoPE whose factor of attention stands under two names, for short and for long sequences.

    Transformers 5 turns by the short factors whatever the length, the released code by the long
    ones beyond the context of the training, as here.
    """

    def write_rope(self, rope: c.Rope) -> dict[str, Any]:
        fields = super().write_rope(rope)
        if not isinstance(rope.scaling, c.LongRope):
            return fields
        for name in ("rope_scaling", "rope_parameters"):
            factor = fields[name].pop("attention_factor", None)
            fields[name] |= {"short_mscale": factor, "long_mscale": factor}
        return fields

    def read_rope(self, reader: ConfigReader) -> c.Rope:
        rope = super().read_rope(reader)
        if rope.scaling is None:
            return rope
        section = reader.section("rope_scaling") or reader.section("rope_parameters") or reader
        short, long = (section.number(f"{name}_mscale") for name in ("short", "long"))
        if not isinstance(rope.scaling, c.LongRope):
            name = "rope_type" if "rope_type" in section else "type"
            section.add_problem(name, "expected default or longrope.")
            return rope
        if short != long and not section.problems:
            section.add_problem("long_mscale", f"it must equal short_mscale, {short}.")
        return replace(rope, scaling=replace(rope.scaling, attention_factor=short))


def two_experts(reader: ConfigReader, name: str, default: int) -> int:
    """Read the number of experts of a token."""
    reader.require_value(name, default, reason="SparseMixer chooses two experts here")
    return default


class Mup:
    """Multipliers of the scores, the embedding and the logits, unless they are switched off."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        scores = reader.number("mup_attn_multiplier", 1.0)
        width = reader.number("mup_width_multiplier", 8.0)
        embedding = reader.number("mup_embedding_multiplier", 10.0)
        if not reader.boolean("mup_use_scaling", True):
            return {}
        return {
            "attention.scale": scores / options["attention.head_dim"],
            "embedding.scale": embedding,
            "head.multiplier": 1 / width,
        }

    def write(self, model: c.TransformerConfig) -> Options:
        attention = p.heads_of(model)
        scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
        return {
            "mup_use_scaling": True,
            "mup_attn_multiplier": scale * attention.head_dim,
            "mup_width_multiplier": 1 / model.head.multiplier,
            "mup_embedding_multiplier": model.embedding.scale,
        }


class BlockSparseLayers:
    """Block-sparse windows in all layers but every n-th."""

    fields = (
        Field("blocksparse_block_size", "block_size", 64),
        Field("blocksparse_num_local_blocks", "local_blocks", 16),
        Field("blocksparse_vert_stride", "stride", 8),
    )

    def read(self, reader: ConfigReader, options: Options) -> Options:
        blocks = with_options(c.BlockSparse(), read_options(reader, self.fields))
        every = reader.optional_integer("dense_attention_every_n_layers", 2)
        layers = range(1, options["num_layers"] + 1)
        windows = tuple(None if every and i % every == 0 else blocks for i in layers)
        return {"attention.windows": windows}

    def write(self, model: c.TransformerConfig) -> Options:
        """The blocks, and the first dense layer."""
        windows = [layer.window for layer in model.layers]
        blocks = next((x for x in windows if isinstance(x, c.BlockSparse)), c.BlockSparse())
        every = windows.index(None) + 1 if None in windows else None
        entries = write_options(blocks, self.fields) or {}
        return {**entries, "dense_attention_every_n_layers": every}


class MaskedIds:
    """Tokens with probability 0, if there are any."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        return {"head.masked_ids": reader.sequence("dummy_token_indices", int) or ()}

    def write(self, model: c.TransformerConfig) -> Options:
        ids = model.head.masked_ids
        return {"dummy_token_indices": [*ids]} if ids else {}


FAMILIES = (
    Family(
        "phi3",
        "Phi3ForCausalLM",
        PHI_3,
        (
            *(*p.decoder(eps=1e-5), *p.GLU, Windows(None)),
            PhiRope(
                fraction=1.0,
                max_length=4096,
                original_max_length=4096,
                aliases=(("su", "longrope"), ("yarn", "longrope")),
            ),
            *fixed(attention_bias=False, mlp_bias=False, lm_head_bias=False),
            *fixed(full_attn_mod=1, interpolate_factor=1),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS),
            *fused_rules(f"{p.SELF_ATTENTION}.qkv_proj", "attention", p.QKV),
            *linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
            *p.FUSED_GLU,
        ),
    ),
    # As Mixtral, except: LayerNorm, biases, experts chosen by SparseMixer.
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        like(LLAMA, norm=c.LayerNorm()),
        (
            *(*p.decoder(kv_heads=8, eps=1e-5), p.ATTENTION_BIAS),
            Field("lm_head_bias", "head.bias", False),
            e.Experts(
                moe=replace(e.MOE, router=c.SparseMixer()),
                fields=(
                    *(e.WIDTH, e.ACTIVATION),
                    Field("num_local_experts", "num_experts", 16),
                    Field("num_experts_per_tok", "top_k", 2, two_experts),
                    Field("router_jitter_noise", "router.jitter", 0.01),
                ),
            ),
            Unused("input_jitter_noise"),  # of training
            *(Windows(None), PhimoeRope(base=1e6, max_length=131_072)),
        ),
        decoder_mapping(*p.TOP_LEVEL, *p.PRE_NORMS, *p.ATTENTION, *e.MIXTRAL_RULES),
    ),
    Family(
        "phi3small",
        "Phi3SmallForCausalLM",
        PHI_3_SMALL,
        (
            *p.decoder(kv_heads=8, eps=1e-5, eps_name="layer_norm_epsilon", tied=True),
            Field("ff_intermediate_size", "feed_forward.hidden_dim"),
            Field("gegelu_limit", "feed_forward.limit", 20.0),
            Field("rope_embedding_base", "attention.positions.base", 1e6),
            *(Mup(), BlockSparseLayers(), MaskedIds()),
            *fixed(hidden_act="gegelu", blocksparse_homo_head_pattern=False, rope_position_scale=1),
            Written(hidden_act="gegelu", blocksparse_homo_head_pattern=False),
            Fixed("rope_scaling", (), "RoPE scaling of Phi-3-small is not supported"),
            # Settings of its kernels.
            Unused("pad_sequence_to_multiple_of_64", "reorder_and_upcast_attn", "attention_bias"),
            Unused("blocksparse_triton_kernel_block_size", "gegelu_pad_to_256"),
            Unused("ff_dim_multiplier"),
        ),
        decoder_mapping(
            *top_level_rules("model.embed_tokens", "model.final_layernorm"),
            *p.PRE_NORMS,
            *fused_rules(f"{p.SELF_ATTENTION}.query_key_value", *("attention", p.QKV, *BY_GROUP)),
            *linear_rules(f"{p.SELF_ATTENTION}.dense", "attention/out", input_axes=2),
            *fused_rules(
                f"{p.LAYER_PREFIX}.mlp.up_proj", *("feed_forward", ("gate", "up"), *IN_TURN)
            ),
            *linear_rules(f"{p.LAYER_PREFIX}.mlp.down_proj", "feed_forward/down"),
        ),
        in_transformers=False,
    ),
    # As Llama, except: parallel blocks with one LayerNorm, biases everywhere, also of the head, no
    # gate, half of a head turned.
    Family(
        "phi",
        "PhiForCausalLM",
        PHI,
        (
            PresenceField(
                *("qk_layernorm", "attention.qk_norm"), part=c.QKNorm(norm=c.LayerNorm())
            ),
            *(*p.decoder(eps=1e-5, eps_name="layer_norm_eps"), *p.glu(activation="gelu_new")),
            RopeField(fraction=0.5),
        ),
        decoder_mapping(
            *top_level_rules("model.embed_tokens", "model.final_layernorm"),
            *norm_rules(f"{p.LAYER_PREFIX}.input_layernorm", "pre_norm"),
            *attention_rules(p.SELF_ATTENTION, out="dense"),
            *qk_norm_rules(p.SELF_ATTENTION, "q_layernorm", "k_layernorm"),
            *branch_rules(f"{p.LAYER_PREFIX}.mlp", "feed_forward", up="fc1", down="fc2"),
        ),
    ),
)
