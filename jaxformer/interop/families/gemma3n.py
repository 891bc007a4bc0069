"""Gemma 3n: four streams through the depth, embeddings for each layer, and sparse gates.

`gemma3n` is the text part of a model that also reads images and sound; it can be read, and is
written as `gemma3n_text`.
"""

from dataclasses import replace
from itertools import cycle
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import Change, Field, Options, Unused, fixed
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import gemma, gemma4
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.ropes import RopeByLayerType
from jaxformer.interop.families.windows import Windows, all_but_every
from jaxformer.interop.family import Family
from jaxformer.interop.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.param_mapping import MappingRule, decoder_mapping
from jaxformer.zoo.gemma import GEMMA_3N

MOST_STREAMS = 8
ALTUP, LAUREL = f"{p.LAYER_PREFIX}.altup", f"{p.LAYER_PREFIX}.laurel"
PROJECTIONS = tuple(
    MappingRule(f"model.{theirs}.{i - 1}.weight", f"decoder/residual/{ours}_{i}", "i o -> o i")
    for theirs, ours in (
        ("altup_projections", "project"),
        ("altup_unembed_projections", "unproject"),
    )
    for i in range(1, MOST_STREAMS)
)
STREAMS = (
    MappingRule(f"{ALTUP}.correct_output_scale", "layer_embedding_residual/scale"),
    MappingRule(f"{ALTUP}.correction_coefs.weight", "layer_residual/correct", "k i -> i k"),
    MappingRule(f"{ALTUP}.prediction_coefs.weight", "layer_residual/predict", "k i j -> (i j) k"),
    MappingRule(f"{ALTUP}.modality_router.weight", "layer_residual/router", "d n -> n d"),
    MappingRule(f"{ALTUP}.router_norm.weight", "layer_residual/norm"),
    MappingRule(f"{p.LAYER_PREFIX}.input_layernorm.weight", "attention_residual/norm"),
    MappingRule(f"{LAUREL}.linear_left.weight", "attention_residual/left", "d r -> r d"),
    MappingRule(f"{LAUREL}.linear_right.weight", "attention_residual/right", "r d -> d r"),
    MappingRule(f"{LAUREL}.post_laurel_norm.weight", "attention_residual/post_norm"),
)


def read_num_streams(reader: ConfigReader, name: str, default: Any) -> int:
    """Number of streams."""
    count = reader.positive_integer(name, default)
    if count > MOST_STREAMS:
        reader.add_problem(name, f"expected at most {MOST_STREAMS}.")
    return count


class Networks:
    """Widths and sparsities of the gated networks."""

    widths, shares, activation = (
        "intermediate_size",
        "activation_sparsity_pattern",
        "hidden_activation",
    )

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The network of each layer; a width that is a number is the width of all."""
        count = options["num_layers"]
        num_sparse = 10 if count > 10 else 0
        widths: Any = (16_384,) * count
        shares: Any = (0.95,) * num_sparse + (0.0,) * (count - num_sparse)
        if isinstance(reader.values.get(self.widths), int):
            widths = (reader.positive_integer(self.widths),) * count
        else:
            widths = reader.sequence(self.widths, int) or widths
        shares = reader.sequence(self.shares, float) or shares
        for name, numbers in ((self.widths, widths), (self.shares, shares)):
            if len(numbers) != count:
                reader.add_problem(name, f"expected a number for each of {count} layers.")
        if not all(0 <= share < 1 for share in shares):
            reader.add_problem(self.shares, "expected numbers from 0 to less than 1.")
        activation = reader.choice(self.activation, "gelu_pytorch_tanh", HF_ACTIVATIONS)
        networks = tuple(
            c.GLU(hidden_dim=width, activation=activation, sparsity=share or None)
            for width, share in zip(widths, shares, strict=False)
            if 0 <= share < 1
        )
        return {"feed_forward": networks} if networks else {}

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields; None for networks of another kind."""
        networks: Any = [layer.feed_forward for layer in model.layers]
        if not all(isinstance(network, c.GLU) for network in networks):
            return None
        return {
            self.widths: [network.hidden_dim for network in networks],
            self.shares: [network.sparsity or 0.0 for network in networks],
            self.activation: hf_activation_name(networks[0].activation),
        }


class Readers:
    """The last layers, which read keys and values of earlier ones."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The attention of all layers."""
        windows = options["attention.windows"]
        first = len(windows) - gemma4.read_num_shared(reader, windows, False, default=15)

        def kinds(local: Any) -> tuple[Any, ...]:
            each = [
                replace(local, positions=(rope,), windows=(window,))
                for rope, window in zip(cycle(local.positions), windows, strict=False)
            ]
            return (*each[:first], *map(gemma4.with_source, each[first:]))

        return {"attention": Change(kinds)}

    def write(self, model: c.TransformerConfig) -> Options:
        """How many layers have no keys of their own."""
        return {"num_kv_shared_layers": sum(x.attention.cross_layer_kv for x in model.layers)}


class LayerEmbeddings(gemma4.LayerEmbeddings):
    """The embeddings of each layer, whose table may have fewer tokens than the vocabulary."""

    def read(self, reader: ConfigReader, options: Options) -> Options:
        """The embeddings, with the activation of the networks."""
        rows = reader.positive_integer("vocab_size_per_layer_input", 262_144)
        embedding = c.LayerEmbedding(
            dim=reader.positive_integer("hidden_size_per_layer_input", 256),
            activation=reader.choice("hidden_activation", "gelu_pytorch_tanh", HF_ACTIVATIONS),
            vocab_size=None if rows == options["vocab_size"] else rows,
        )
        return {"layer_embedding": embedding}


FAMILIES = (
    Family(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        GEMMA_3N,
        (
            *p.decoder(
                heads=8,
                kv_heads=2,
                head_dim=256,
                vocab_size=262_400,
                model_dim=2048,
                num_layers=35,
                tied=True,
            ),
            *(p.ATTENTION_BIAS, p.HEADS_DIVIDE_WIDTH, gemma.MULTIPLIER),
            Field("rms_norm_eps", "attention.value_norm.eps", 1e-6),
            Field("rms_norm_eps", "residual.norm_eps", 1e-6),
            Field("rms_norm_eps", "residual.branches.norm_eps", 1e-6),
            Field("altup_num_inputs", "residual.num_streams", 4, read_num_streams),
            Field("laurel_rank", "residual.branches.rank", 64),
            *fixed(altup_active_idx=0, altup_correct_scale=True),
            Unused("altup_coef_clip"),  # of training
            Field("final_logit_softcapping", "head.softcap", 30.0),
            Windows(512, rule=all_but_every(5), needs_size=True),
            RopeByLayerType(base=1e6, local_base=1e4, max_length=32_768),
            *(Networks(), Readers(), LayerEmbeddings()),
        ),
        decoder_mapping(
            *(*p.TOP_LEVEL, *gemma4.LAYER_EMBEDDINGS, *PROJECTIONS, *STREAMS, *gemma.SANDWICH),
            *(*p.ATTENTION, *p.QK_NORMS, *p.FEED_FORWARD, *gemma4.LAYER_EMBEDDING_BRANCH),
        ),
        attention_types=(c.MultiHead, c.MultiHead),  # with keys and values, and without
    ),
)
