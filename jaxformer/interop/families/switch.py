"""Switch Transformers: T5 with one expert a token in some layers, each with a capacity."""

from typing import Any

from jaxformer import config as c
from jaxformer.interop.config_fields import (
    Derived,
    Field,
    Fixed,
    Options,
    Unused,
    fixed,
    read_options,
    with_options,
    write_options,
)
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import t5
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping, linear_rules, norm_rules
from jaxformer.interop.transforms import LINEAR
from jaxformer.zoo.switch import SWITCH

# Settings of training, and one that the released code reads and never uses.
WITHOUT_EFFECT = ("router_z_loss_coef", "add_router_probs", "router_ignore_padding_tokens")


def feed_forward_rules(theirs: str) -> tuple[MappingRule, ...]:
    """Mapping rules of the feed-forward branch, with experts or without."""
    rules = list(norm_rules(f"{theirs}.layer_norm", "pre_feed_forward_norm"))
    for ours, name in (("up", "wi"), ("down", "wo")):
        rules += linear_rules(f"{theirs}.mlp.{name}", f"feed_forward/{ours}")
        expert = f"{theirs}.mlp.experts.expert_{{expert}}.{name}.weight"
        rules.append(MappingRule(expert, f"feed_forward/experts/{ours}/kernel", LINEAR))
    return (*rules, *linear_rules(f"{theirs}.mlp.router.classifier", "feed_forward/router"))


class Networks:
    """Experts in some layers of each stack, and in the others a network like one of them."""

    moe = c.MoE(
        expert=c.MLP(hidden_dim=1), num_experts=1, top_k=1, router=c.Router(renormalise=False)
    )
    fields = (
        Field("d_ff", "expert.hidden_dim"),
        Field("dense_act_fn", "expert.activation", "relu"),
        Field("num_experts", "num_experts", 8),
        Field("router_bias", "router.bias", False),
        Field("expert_capacity", "router.capacity", 64),
    )

    def read(self, reader: ConfigReader, options: Options) -> Options:
        word = reader.get("dense_act_fn", "relu")
        reader.require_value("feed_forward_proj", word, reason="it repeats dense_act_fn")
        moe = with_options(self.moe, read_options(reader, self.fields))
        encoder, decoder = (
            tuple(moe if sparse else moe.expert for sparse in read_sparse_layers(reader, *stack))
            for stack in (
                ("encoder", options["topology.num_encoder_layers"]),
                ("decoder", options["num_layers"]),
            )
        )
        return {
            "topology.feed_forward": None if encoder == decoder else encoder,
            "feed_forward": decoder,
        }

    def write(self, model: c.TransformerConfig) -> Options | None:
        """The fields of the experts, and which layers have them; None for other networks."""
        layers, networks = dict[str, Any](), set[c.FeedForward]()
        for stack, options in model.stacks.items():
            networks |= {layer.feed_forward for layer in options}
            sparse = [i for i, x in enumerate(options) if isinstance(x.feed_forward, c.MoE)]
            step = sparse[1] - sparse[0] if len(sparse) > 1 else len(options) * len(sparse)
            layers |= {f"num_sparse_{stack}_layers": len(sparse), f"{stack}_sparse_step": step}
        mixtures = [network for network in networks if isinstance(network, c.MoE)]
        experts = write_options(mixtures[0], self.fields) if len(mixtures) == 1 else None
        return None if experts is None else {**experts, **layers}


def read_sparse_layers(reader: ConfigReader, stack: str, num_layers: int) -> list[bool]:
    """Whether each layer of a stack has experts: the second of every ``sparse_step`` layers.

    As in transformers, 0 layers with experts are one where there are two layers or more.
    """
    count = reader.integer(f"num_sparse_{stack}_layers", 3)
    if count < 0:
        reader.add_problem(f"num_sparse_{stack}_layers", "expected 0 or more.")
    step = reader.integer(f"{stack}_sparse_step", num_layers // max(1, count))
    if step < 0:
        reader.add_problem(f"{stack}_sparse_step", "expected 0 or more.")
    return [step == 1 or (step > 1 and i % step == 1) for i in range(num_layers)]


FAMILIES = (
    Family(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        SWITCH,
        (
            *t5.FIELDS,
            Fixed(
                "tie_word_embeddings",
                (True,),
                "without it, transformers has an embedding for each stack",
            ),
            Derived("head.multiplier", t5.head_scale),
            Networks(),
            *fixed(is_gated_act=False, num_selected_experts=1, batch_prioritized_routing=False),
            *fixed(router_dtype="float32", router_type="tokens_masked"),
            Unused(*WITHOUT_EFFECT),
        ),
        ParamMapping(
            top_level=t5.MAPPING.top_level,
            stacks={
                "encoder": (*t5.ENCODER_ATTENTION, *feed_forward_rules(f"{t5.ENCODER}.1")),
                "decoder": (*t5.DECODER_ATTENTION, *feed_forward_rules(f"{t5.DECODER}.2")),
            },
        ),
        ignored_tensors=t5.IGNORED_TENSORS,
    ),
)
