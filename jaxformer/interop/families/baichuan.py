"""Baichuan 2: Llama with fused queries, keys and values, and a head whose rows have length 1.

7B has RoPE. 13B has ALiBi, and no ``max_position_embeddings`` in its config.json.
"""

from dataclasses import dataclass
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Field, Unused
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import decoder_mapping, fused_rules, linear_rules
from jaxformer.interop.rope_config import RopeField
from jaxformer.zoo.baichuan import BAICHUAN_2


def vocab_size_of_version_2(reader: ConfigReader, name: str, default: Any) -> int:
    """Read the size of the vocabulary, by which version 1 is known."""
    size = reader.integer(name)
    if size == 64_000:
        reader.add_problem(name, "Baichuan 1 has another head; only version 2 is read.")
    return size


@dataclass(frozen=True, kw_only=True)
class RopeOrAlibi(RopeField):
    """RoPE where ``max_position_embeddings`` is, else ALiBi."""

    def read_positions(self, reader: ConfigReader, windows: tuple[Any, ...]) -> tuple[Any, ...]:
        has_rope = "max_position_embeddings" in reader.values
        return (self.read_rope(reader) if has_rope else c.Alibi(),)

    def write(self, model: c.TransformerConfig) -> dict[str, Any] | None:
        """The fields of RoPE, or none."""
        fields = super().write(model)
        return {} if fields is None else {"max_position_embeddings": self.max_length, **fields}


FAMILIES = (
    Family(
        "baichuan",
        "BaichuanForCausalLM",
        BAICHUAN_2,
        (
            *(*p.decoder(), *p.GLU, RopeOrAlibi(max_length=4096)),
            Field("vocab_size", "vocab_size", parse=vocab_size_of_version_2),
            Unused("z_loss_weight", "_from_model_config"),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *p.PRE_NORMS),
            *fused_rules(f"{p.SELF_ATTENTION}.W_pack", "attention", p.QKV),
            *linear_rules(f"{p.SELF_ATTENTION}.o_proj", "attention/out", input_axes=2),
            *p.FEED_FORWARD,
        ),
        in_transformers=False,
    ),
)
