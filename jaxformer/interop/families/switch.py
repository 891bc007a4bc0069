"""Switch Transformers: T5 with one expert a token in some layers, each with a capacity."""

from dataclasses import replace
from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import t5
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS, hf_activation_name
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import LinearKernel

# Settings of training, and one that the released code reads and never uses.
WITHOUT_EFFECT = ("router_z_loss_coef", "add_router_probs", "router_ignore_padding_tokens")
CONSTANTS = {
    "is_gated_act": False,
    "router_dtype": "float32",
    "router_type": "tokens_masked",
    "batch_prioritized_routing": False,
    "num_selected_experts": 1,
}


def feed_forward_rules(theirs: str) -> tuple[MappingRule, ...]:
    """Mapping rules of the feed-forward branch, with experts or without."""
    rules = list(norm_rules(f"{theirs}.layer_norm", "pre_feed_forward_norm"))
    for ours, name in (("up", "wi"), ("down", "wo")):
        rules += linear_rules(f"{theirs}.mlp.{name}", f"feed_forward/{ours}")
        expert = f"{theirs}.mlp.experts.expert_{{expert}}.{name}.weight"
        rules.append(MappingRule(expert, f"feed_forward/experts/{ours}/kernel", LinearKernel()))
    return (*rules, *linear_rules(f"{theirs}.mlp.router.classifier", "feed_forward/router"))


TABLE = ParamMapping(
    top_level=t5.MAPPING.top_level,
    stacks={
        "encoder": (*t5.ENCODER_ATTENTION, *feed_forward_rules(f"{t5.ENCODER}.1")),
        "decoder": (*t5.DECODER_ATTENTION, *feed_forward_rules(f"{t5.DECODER}.2")),
    },
)


def read(reader: ConfigReader) -> c.TransformerConfig:
    """Read the config.json of a switch_transformers model."""
    for name in WITHOUT_EFFECT:
        reader.get(name)
    for name, value in CONSTANTS.items():
        reader.require_value(name, value)
    word = reader.get("dense_act_fn", "relu")
    reader.require_value("feed_forward_proj", word, reason="it repeats dense_act_fn")
    reason = "without it, transformers has an embedding for each stack"
    reader.require_value("tie_word_embeddings", True, reason=reason)
    options = {
        "feed_forward.activation": reader.choice("dense_act_fn", "relu", HF_ACTIVATIONS),
        "head.multiplier": reader.positive_integer("d_model") ** -0.5,
    }
    config = t5.TABLE.read(reader, options)
    dense: Any = config.feed_forward[0]
    moe = c.MoE(
        expert=dense,
        num_experts=reader.integer("num_experts", 8),
        top_k=1,
        router=c.Router(
            bias=reader.boolean("router_bias", False),
            renormalise=False,
            capacity=reader.integer("expert_capacity", 64),
        ),
    )
    encoder, decoder = (
        _read_pattern(reader, stack, len(layers), dense, moe)
        for stack, layers in config.stacks.items()
    )
    topology = c.EncoderDecoder(
        num_encoder_layers=config.topology.num_encoder_layers,
        feed_forward=None if encoder == decoder else encoder,
    )
    return replace(config, feed_forward=decoder, topology=topology)


def _read_pattern(
    reader: ConfigReader, stack: str, num_layers: int, dense: c.MLP, moe: c.MoE
) -> tuple[c.FeedForward, ...]:
    """Feed-forward networks of a stack: experts in the second of every `step` layers.

    As in transformers, 0 layers with experts are one where there are two layers or more.
    """
    count = reader.integer(f"num_sparse_{stack}_layers", 3)
    if count < 0:
        reader.add_problem(f"num_sparse_{stack}_layers", "expected 0 or more.")
    step = reader.integer(f"{stack}_sparse_step", num_layers // max(1, count))
    if step < 0:
        reader.add_problem(f"{stack}_sparse_step", "expected 0 or more.")
    layers = range(num_layers)
    return tuple(moe if step == 1 or (step > 1 and i % step == 1) else dense for i in layers)


def write(config: c.TransformerConfig) -> dict[str, Any] | None:
    """A switch_transformers' configuration from ours."""
    steps, branches = dict[str, Any](), set[c.FeedForward]()
    if not isinstance(config.topology, c.EncoderDecoder):
        return None
    for stack, layers in config.stacks.items():
        branches |= {layer.feed_forward for layer in layers}
        sparse = [i for i, layer in enumerate(layers) if isinstance(layer.feed_forward, c.MoE)]
        step = sparse[1] - sparse[0] if len(sparse) > 1 else len(layers) * len(sparse)
        steps[f"num_sparse_{stack}_layers"] = len(sparse)
        steps[f"{stack}_sparse_step"] = step
    experts = [branch for branch in branches if isinstance(branch, c.MoE)]
    if len(experts) != 1 or not isinstance(expert := experts[0].expert, c.MLP):
        return None
    (moe,) = experts
    topology = replace(config.topology, feed_forward=None)
    fields = t5.TABLE.write(replace(config, feed_forward=(expert,), topology=topology))
    return fields and {
        **fields,
        **steps,
        "dense_act_fn": hf_activation_name(expert.activation),
        "num_experts": moe.num_experts,
        "expert_capacity": moe.router.capacity,
        "router_bias": moe.router.bias,
    }


FAMILIES = (
    Family(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        read,
        write,
        TABLE,
        ignored_tensors=t5.IGNORED_TENSORS,
    ),
)
