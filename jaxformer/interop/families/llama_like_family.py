"""A family as Llama with other defaults, biases, windows, QK-norm or feed-forward networks."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from jaxformer import config as c
from jaxformer.interop.config_comparison import shortest_cycle
from jaxformer.interop.config_reader import ConfigReader
from jaxformer.interop.families import llama_like as p
from jaxformer.interop.families.hf_activations import HF_ACTIVATIONS
from jaxformer.interop.family import Family
from jaxformer.interop.param_mapping import MappingRule, ParamMapping
from jaxformer.interop.rope_config import read_rope
from jaxformer.interop.transforms import LinearKernel

FEED_FORWARD_BIAS = ("feed_forward",)


@dataclass(frozen=True)
class BiasField:
    """A field of config.json that says whether some linear layers have biases.

    Attributes:
        name: The field.
        layers: Projections of the attention, or `FEED_FORWARD_BIAS`.
        default: Its value if the file lacks it.
    """

    name: str
    layers: tuple[str, ...]
    default: bool = False


class Windows(Protocol):
    """How config.json has the sliding windows."""

    def read(self, reader: ConfigReader) -> tuple[Any, ...]:
        """Windows of the layers, as a cycle."""
        ...

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The fields of config.json."""
        ...


@dataclass(frozen=True)
class NoWindows:
    """Every layer sees the whole context."""

    def read(self, reader: ConfigReader) -> tuple[Any, ...]:
        """No window."""
        return (None,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """No field."""
        return {}


@dataclass(frozen=True)
class OneWindow:
    """One window for all layers.

    Attributes:
        default: Its value if the file lacks it.
        switch: A field without which there is none.
    """

    default: int | None
    switch: str | None = None

    def read(self, reader: ConfigReader) -> tuple[Any, ...]:
        """The window."""
        window = reader.optional_integer("sliding_window", self.default)
        is_on = self.switch is None or reader.boolean(self.switch, False)
        return (window if is_on else None,)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window and the switch."""
        window = p.first_window(config)
        switch = {} if self.switch is None else {self.switch: window is not None}
        return {"sliding_window": window, **switch}


@dataclass(frozen=True)
class LastLayerWindows:
    """A window for the layers from ``max_window_layers`` on, or by ``layer_types`` (Qwen)."""

    def read(self, reader: ConfigReader) -> tuple[Any, ...]:
        """See `read_last_layer_windows`."""
        return p.read_last_layer_windows(reader)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """See `write_last_layer_windows`."""
        return p.write_last_layer_windows(config)


@dataclass(frozen=True)
class LayerTypeWindows:
    """A window for the layers that ``layer_types`` names; without it, all but every `period`-th.

    Attributes:
        default: The window if the file lacks it.
        period: None is a window in every layer.
    """

    default: int | None
    period: int | None = None

    def read(self, reader: ConfigReader) -> tuple[Any, ...]:
        """The windows."""
        window = reader.optional_integer("sliding_window", self.default)

        def slides(layer: int) -> bool:
            is_full = self.period is not None and (layer + 1) % self.period == 0
            return window is not None and not is_full

        count = reader.integer("num_hidden_layers")
        return p.window_cycle(reader, p.read_layer_types(reader, count, slides), window)

    def write(self, config: c.TransformerConfig) -> dict[str, Any]:
        """The window and the types."""
        return p.write_layer_types(config)


class Branch(Protocol):
    """How config.json and the tensors have the feed-forward networks."""

    @property
    def rules(self) -> tuple[MappingRule, ...]:
        """Mapping rules of a layer."""
        ...

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """Feed-forward networks of the layers, as a cycle."""
        ...

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json beside those of `write_sizes`; None for another network."""
        ...


@dataclass(frozen=True)
class LlamaGLU:
    """A gated network in every layer."""

    rules = p.FEED_FORWARD

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network."""
        return (p.read_glu(reader, bias=bias),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """No more fields."""
        return {} if all(isinstance(x, c.GLU) for x in config.feed_forward) else None


@dataclass(frozen=True)
class LlamaMLP:
    """A network without a gate in every layer.

    Attributes:
        activation: Default of the activation, by its name in config.json.
    """

    activation: str = "relu2"
    rules = p.FEED_FORWARD

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The network."""
        activation = reader.choice("hidden_act", self.activation, HF_ACTIVATIONS)
        hidden_dim = reader.integer("intermediate_size")
        return (c.MLP(hidden_dim=hidden_dim, activation=activation, bias=bias),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """No more fields."""
        return {} if all(isinstance(x, c.MLP) for x in config.feed_forward) else None


def expert_rules(prefix: str, *, gate: str, up: str, down: str) -> tuple[MappingRule, ...]:
    """Mapping rules of a router and of experts with a tensor each."""
    names = {"gate": gate, "up": up, "down": down}
    experts = (
        MappingRule(
            f"{prefix}.experts.{{expert}}.{name}.weight",
            f"feed_forward/experts/{ours}/kernel",
            LinearKernel(),
        )
        for ours, name in names.items()
    )
    router = MappingRule(f"{prefix}.gate.weight", "feed_forward/router/kernel", LinearKernel())
    return (router, *experts)


@dataclass(frozen=True)
class MixtralMoE:
    """Mixtral's experts in every layer, of width ``intermediate_size``."""

    rules = expert_rules(f"{p.LAYER_PREFIX}.block_sparse_moe", gate="w1", up="w3", down="w2")

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """The experts."""
        count = reader.integer("num_local_experts", reader.integer("num_experts", 8))
        top_k = reader.integer("num_experts_per_tok", 2)
        return (c.MoE(expert=p.read_glu(reader), num_experts=count, top_k=top_k),)

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Numbers of experts."""
        if len(config.feed_forward) > 1 or not isinstance(config.feed_forward[0], c.MoE):
            return None
        moe = config.feed_forward[0]
        return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}


@dataclass(frozen=True, kw_only=True)
class QwenMoE:
    """Experts of width ``moe_intermediate_size``, and dense layers by number (Qwen 3).

    Attributes:
        num_experts: Default of the number of experts.
        top_k: Default of the experts per token.
    """

    num_experts: int
    top_k: int
    rules = (
        *p.FEED_FORWARD,
        *expert_rules(f"{p.LAYER_PREFIX}.mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )

    def read(self, reader: ConfigReader, *, bias: bool) -> tuple[c.FeedForward, ...]:
        """Experts in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` lacks."""
        count = reader.integer("num_local_experts", self.num_experts)
        moe = c.MoE(
            expert=p.read_glu(reader, width_name="moe_intermediate_size", hidden_dim=768),
            num_experts=reader.integer("num_experts", count),
            top_k=reader.integer("num_experts_per_tok", self.top_k),
            renormalise=reader.boolean("norm_topk_prob", False),
        )
        dense = p.read_glu(reader, hidden_dim=6144)
        step = reader.integer("decoder_sparse_step", 1)
        dense_layers = reader.sequence("mlp_only_layers", int) or ()
        layers = range(reader.integer("num_hidden_layers"))
        return shortest_cycle(
            tuple(dense if i in dense_layers or (i + 1) % step else moe for i in layers)
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Experts, and the numbers of the dense layers."""
        branches = [config.layer(i).feed_forward for i in range(config.num_layers)]
        experts = {x for x in branches if isinstance(x, c.MoE)}
        dense = {x for x in branches if isinstance(x, c.GLU)}
        if len(experts) != 1 or len(dense) > 1 or len(experts | dense) < len(set(branches)):
            return None
        (moe,) = experts
        return {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.renormalise,
            "moe_intermediate_size": moe.expert.hidden_dim,
            "intermediate_size": next(iter(dense), moe.expert).hidden_dim,
            "mlp_only_layers": [i for i, x in enumerate(branches) if x in dense],
            "decoder_sparse_step": 1,
        }


@dataclass(frozen=True)
class LlamaLike:
    """A pre-norm decoder with RMSNorm, rotary positions and grouped queries.

    Attributes:
        model_type: As in `Family`.
        architecture: As in `Family`.
        kv_heads: Default of the number of KV heads; None is all heads.
        head_dim: Default of the width of a head; None is model_dim / num_heads.
        base: Default of RoPE's base.
        max_length: Default of ``max_position_embeddings``.
        pairing: Features that RoPE turns as a pair.
        eps: Default of the RMSNorm's eps.
        tied: Default of ``tie_word_embeddings``.
        biases: Fields that say which linear layers have biases.
        constant_biases: Projections that always have biases.
        qk_norm: What the norms of queries and keys are over; None has none.
        windows: Sliding windows.
        branch: Feed-forward networks.
        heads_divide_width: Whether transformers requires that num_heads divides model_dim.
    """

    model_type: str
    architecture: str
    _: KW_ONLY
    kv_heads: int | None = None
    head_dim: int | None = None
    base: float = 1e4
    max_length: int = 2048
    pairing: Any = "halves"
    eps: float = 1e-6
    tied: bool = False
    biases: tuple[BiasField, ...] = ()
    constant_biases: tuple[str, ...] = ()
    qk_norm: Any = None
    windows: Windows = NoWindows()
    branch: Branch = LlamaGLU()
    heads_divide_width: bool = False

    def family(self) -> Family:
        """The family."""
        rules = (*p.PRE_NORMS, *p.ATTENTION, *p.QK_NORMS, *self.branch.rules)
        mapping = ParamMapping(top_level=p.TOP_LEVEL, stacks={"decoder": rules})
        return Family(self.model_type, self.architecture, self.read, self.write, mapping)

    def read(self, reader: ConfigReader) -> c.TransformerConfig:
        """Read config.json."""
        biased = set(self.constant_biases)
        for field in self.biases:
            if reader.boolean(field.name, field.default):
                biased |= {*field.layers}
        norm = c.RMSNorm(eps=reader.number("rms_norm_eps", self.eps))
        rope = read_rope(reader, base=self.base, max_length=self.max_length, pairing=self.pairing)
        heads: dict[str, Any] = dict(
            **p.read_heads(reader, kv_heads=self.kv_heads, head_dim=self.head_dim),
            positions=(rope,),
            windows=self.windows.read(reader),
            qk_norm=self.qk_norm and c.QKNorm(norm=norm, over=self.qk_norm),
            biases=tuple(name for name in p.ALL_BIASES if name in biased),
        )
        has_bias = {*FEED_FORWARD_BIAS} <= biased
        return c.TransformerConfig(
            **p.read_sizes(reader),
            attention=c.MultiHead(**heads),
            feed_forward=self.branch.read(reader, bias=has_bias),
            norm=norm,
            head=c.LMHead(tied=reader.boolean("tie_word_embeddings", self.tied)),
        )

    def write(self, config: c.TransformerConfig) -> dict[str, Any] | None:
        """Fields of config.json, or None for another model."""
        if not p.is_rope_decoder(config):
            return None
        branch = self.branch.write(config)
        if branch is None:
            return None
        if self.heads_divide_width and config.model_dim % config.multi_head.num_heads:
            return None
        biased = set[str](config.multi_head.biases)
        if getattr(config.feed_forward[0], "bias", False):
            biased |= {*FEED_FORWARD_BIAS}
        biases = {field.name: {*field.layers} <= biased for field in self.biases}
        return {**p.write_rope_decoder(config), **biases, **self.windows.write(config), **branch}
