"""Baichuan 2: Llama with fused queries, keys and values, and a head whose rows have length 1.

7B has RoPE. 13B has ALiBi, and no ``max_position_embeddings`` in its config.json.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.llama_like_family import LlamaLike
from jaxformer.interop.families.llama_like_options import OneRope
from jaxformer.interop.param_mapping import fused_rules, linear_rules, top_level_rules

VERSION_1_VOCAB_SIZE = 64_000


@dataclass(frozen=True, kw_only=True)
class RopeOrAlibi(OneRope):
    """RoPE where ``max_position_embeddings`` is, else ALiBi."""

    def read(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        """RoPE or ALiBi."""
        if reader.integer("vocab_size") == VERSION_1_VOCAB_SIZE:
            reader.add_problem("vocab_size", "Baichuan 1 has another head; only version 2 is read.")
        has_rope = "max_position_embeddings" in reader.values
        return (self.read_rope(reader) if has_rope else c.Alibi(),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of RoPE, or none."""
        fields = super().write(config)
        return {} if fields is None else {"max_position_embeddings": self.max_length, **fields}


@dataclass(frozen=True, kw_only=True)
class Baichuan(LlamaLike):
    """A head whose rows are divided by their length."""

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        config = super().read(reader)
        return replace(config, head=replace(config.head, unit_rows=True))


ROW = Baichuan(
    "baichuan",
    "BaichuanForCausalLM",
    top_level=top_level_rules("model.embed_tokens", "model.norm"),
    attention_rules=(
        *fused_rules(f"{p.SELF_ATTENTION}.W_pack", "attention", p.QKV),
        *linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
    ),
    positions=RopeOrAlibi(max_length=4096),
    unused=("z_loss_weight", "_from_model_config"),
    in_transformers=False,
)
FAMILIES = (ROW.family(),)
