"""Llama 4 (text): attention by chunks, layers without positions, weights of what experts read."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Change, Field, Options, Unused
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import experts as e
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.heads_by_layer import DIFFERENT_HEADS
from jaxformer.interop.families.ropes import RopeByNumber
from jaxformer.interop.families.windows import PerLayer
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping, glu_rules
from jaxformer.interop.transforms import LINEAR
from jaxformer.zoo.llama import INPUT_EXPERTS, LLAMA

TYPES = PerLayer("layer_types", {"chunked_attention": True, "full_attention": False})
FEED_FORWARD = f"{p.LAYER_PREFIX}.feed_forward"


class SparseLayers:
    """Experts in the layers of ``moe_layers``, by default one of ``interleave_moe_layer_step``."""

    def read(self, reader: ConfigReader, num_layers: int) -> list[bool]:
        """Whether each layer has experts."""
        step = reader.positive_integer("interleave_moe_layer_step", 1)
        listed = reader.sequence("moe_layers", int)
        if listed is None:
            return [(i + 1) % step == 0 for i in range(num_layers)]
        return [i in listed for i in range(num_layers)]

    def write(self, is_sparse: list[bool]) -> Options:
        """The numbers of the layers."""
        layers = [i for i, sparse in enumerate(is_sparse) if sparse]
        return {"moe_layers": layers, "interleave_moe_layer_step": 1}


EXPERTS = e.Experts(
    moe=INPUT_EXPERTS,
    fields=(
        Field("intermediate_size", "expert.hidden_dim", 8192),
        e.ACTIVATION,
        *e.shared_fields("intermediate_size", 8192),
        Field("num_local_experts", "num_experts", 16),
        Field("num_experts_per_tok", "top_k", 1),
    ),
    layers=SparseLayers(),
    dense=(Field("intermediate_size_mlp", "hidden_dim", 16_384), *e.DENSE[1:]),
)


@dataclass(frozen=True, kw_only=True)
class ChunksOfRope:
    """RoPE, norms and chunks in some layers; queries that grow with the position in the others.

    Attributes:
        rope: The fields of RoPE.
    """

    rope: RopeByNumber

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of each layer."""
        count = options["num_layers"]
        cycle = self.rope.read_positions(reader, (None,))
        positions = tuple(cycle[i % len(cycle)] for i in range(count))
        size = reader.optional_integer("attention_chunk_size", 8192)
        chunked = TYPES.read(reader, count, lambda i: bool(size and positions[i]))
        if size is None and any(chunked):
            reader.add_problem("attention_chunk_size", "chunked layers need this size.")
        norm = c.RMSNorm(eps=options["norm.eps"], parameters="none")
        has_norm = reader.boolean("use_qk_norm", True)
        scaling = c.QueryScaling(
            beta=reader.number("attn_scale", 0.1),
            original_max_length=reader.integer("floor_scale", 8192),
            offset=1,
        )
        kinds = partial(
            _kinds_of_layers,
            windows=tuple(c.Chunks(size=size) if size and x else None for x in chunked),
            qk_norm=c.QKNorm(norm=norm, placement="after_rope") if has_norm else None,
            query_scaling=scaling if reader.boolean("attn_temperature_tuning", True) else None,
        )
        return {"attention.positions": positions, "attention": Change(kinds)}

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of RoPE, chunks, norms and growing queries."""
        fields, layers = self.rope.write(model), model.layers
        kinds: list[Any] = [layer.attention for layer in layers]
        chunks = [x.window for x in layers if isinstance(x.window, c.Chunks)]
        scalings = (x.query_scaling for x in kinds)
        scaling = next((x for x in scalings if isinstance(x, c.QueryScaling)), None)
        if fields is None:
            return None
        fields |= TYPES.write(isinstance(layer.window, c.Chunks) for layer in layers)
        fields |= {"attention_chunk_size": chunks[0].size if chunks else None}
        fields |= {"use_qk_norm": any(x.qk_norm is not None for x in kinds)}
        fields |= {"attn_temperature_tuning": scaling is not None}
        if scaling is None:
            return fields
        return fields | {"attn_scale": scaling.beta, "floor_scale": scaling.original_max_length}


def _kinds_of_layers(
    heads: c.MultiHead,
    *,
    windows: tuple[c.Window, ...],
    qk_norm: c.QKNorm | None,
    query_scaling: c.QueryScaling | None,
) -> tuple[c.MultiHead, ...]:
    """The attention of each layer."""
    turned = replace(heads, qk_norm=qk_norm)
    plain = replace(heads, query_scaling=query_scaling)
    return tuple(
        replace(plain if rope is None else turned, positions=(rope,), windows=(window,))
        for rope, window in zip(heads.positions, windows, strict=True)
    )


FAMILIES = (
    Family(
        "llama4_text",
        "Llama4ForCausalLM",
        LLAMA,
        (
            *(*p.decoder(kv_heads=8, head_dim=128, eps=1e-5), p.ATTENTION_BIAS, EXPERTS),
            ChunksOfRope(rope=RopeByNumber(base=5e5, max_length=131_072, pairing="neighbours")),
            Unused("router_jitter_noise", "for_llm_compressor"),  # of training, and of a tool
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS, *p.ATTENTION, *glu_rules(FEED_FORWARD)),
            MappingRule(f"{FEED_FORWARD}.router.weight", "feed_forward/router/kernel", LINEAR),
            MappingRule(
                f"{FEED_FORWARD}.experts.gate_up_proj",
                (f"{e.EXPERTS}/gate/kernel", f"{e.EXPERTS}/up/kernel"),
                "e d f -> e d (+f)",
            ),
            MappingRule(f"{FEED_FORWARD}.experts.down_proj", f"{e.EXPERTS}/down/kernel"),
            *glu_rules(f"{FEED_FORWARD}.shared_expert", e.SHARED),
        ),
        attention_types=DIFFERENT_HEADS,
    ),
)
