"""References without a supported family: absolute positions.

Each function gives a configuration by hand and our parameters.
"""

from jaxformer.config import (
    MLP,
    Embedding,
    EncoderDecoder,
    Head,
    LayerNorm,
    Learned,
    MultiHead,
    Sinusoid,
    TransformerConfig,
)
from tests.interop.mapped_pieces import heads, linear, norm, stacked, thirds

BIASES = ("query", "key", "value", "out")
LAYER_NORM = LayerNorm(eps=1e-5)


def transformer_2017(said, tensors):
    """Attention Is All You Need from torch's layers."""
    d, n = said["d_model"], said["heads"]
    config = TransformerConfig(
        vocab_size=said["vocab_size"],
        model_dim=d,
        num_layers=said["layers"],
        attention=MultiHead(
            num_heads=n, num_kv_heads=n, head_dim=d // n, positions=(None,), biases=BIASES
        ),
        feed_forward=(MLP(hidden_dim=said["ff"], activation="relu", bias=True),),
        topology=EncoderDecoder(num_encoder_layers=said["layers"]),
        norm=LAYER_NORM,
        placement="post",
        final_norm=False,
        embedding=Embedding(scale=d**0.5, positions=Sinusoid()),
        head=Head(tied=True),
    )

    def attention(name):
        fused = {
            "kernel": tensors[f"{name}.in_proj_weight"].T,
            "bias": tensors[f"{name}.in_proj_bias"],
        }
        return heads(config, **thirds(fused), out=linear(tensors, f"{name}.out_proj"))

    def layer(at, *, crossed):
        tree = {
            "attention": attention(f"{at}.self_attn"),
            "post_attention_norm": norm(tensors, f"{at}.norm1"),
            "feed_forward": {
                "up": linear(tensors, f"{at}.linear1"),
                "down": linear(tensors, f"{at}.linear2"),
            },
            "post_feed_forward_norm": norm(tensors, f"{at}.norm{2 + crossed}"),
        }
        if crossed:
            tree["cross_attention"] = attention(f"{at}.multihead_attn")
            tree["post_cross_attention_norm"] = norm(tensors, f"{at}.norm2")
        return tree

    params = {"embedding": {"tokens": {"embedding": tensors["embed.weight"]}}}
    for stack, crossed in (("encoder", False), ("decoder", True)):
        layers = [layer(f"{stack}.{i}", crossed=crossed) for i in range(said["layers"])]
        params[stack] = stacked(config, layers)
    return config, params


def gpt3_banded(said, tensors):
    """GPT-2 whose odd layers see the last five tokens; its linears are stored inputs first."""
    d, n = said["n_embd"], said["n_head"]
    config = TransformerConfig(
        vocab_size=said["vocab_size"],
        model_dim=d,
        num_layers=said["n_layer"],
        attention=MultiHead(
            num_heads=n,
            num_kv_heads=n,
            head_dim=d // n,
            positions=(None,),
            windows=(None, 5),
            biases=BIASES,
        ),
        feed_forward=(MLP(hidden_dim=said["n_inner"], activation="gelu_tanh", bias=True),),
        norm=LAYER_NORM,
        embedding=Embedding(positions=Learned(max_length=said["n_positions"])),
        head=Head(tied=True),
    )

    def linear_of(name):
        return linear(tensors, name, transposed=False)

    return config, gpt(
        config,
        tensors,
        lambda at: {
            "attention": heads(
                config, **thirds(linear_of(f"{at}.attn.c_attn")), out=linear_of(f"{at}.attn.c_proj")
            ),
            "feed_forward": {
                "up": linear_of(f"{at}.mlp.c_fc"),
                "down": linear_of(f"{at}.mlp.c_proj"),
            },
        },
    )


def gpt_neo(said, tensors):
    """GPT-Neo: every other layer local, scores not scaled, no biases on query, key and value."""
    d, n = said["hidden_size"], said["num_heads"]
    config = TransformerConfig(
        vocab_size=said["vocab_size"],
        model_dim=d,
        num_layers=said["num_layers"],
        attention=MultiHead(
            num_heads=n,
            num_kv_heads=n,
            head_dim=d // n,
            positions=(None,),
            windows=(None, said["window_size"]),
            scale=1.0,
            biases=("out",),
        ),
        feed_forward=(
            MLP(hidden_dim=said["intermediate_size"], activation="gelu_tanh", bias=True),
        ),
        norm=LAYER_NORM,
        embedding=Embedding(positions=Learned(max_length=said["max_position_embeddings"])),
        head=Head(tied=True),
    )
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    return config, gpt(
        config,
        tensors,
        lambda at: {
            "attention": heads(
                config,
                **{
                    ours: linear(tensors, f"{at}.attn.attention.{theirs}")
                    for ours, theirs in names.items()
                },
            ),
            "feed_forward": {
                "up": linear(tensors, f"{at}.mlp.c_fc"),
                "down": linear(tensors, f"{at}.mlp.c_proj"),
            },
        },
    )


def gpt(config, tensors, branches):
    """What GPT-2 and GPT-Neo share: tables, norms, a final norm."""
    layers = [
        branches(at)
        | {
            "pre_attention_norm": norm(tensors, f"{at}.ln_1"),
            "pre_feed_forward_norm": norm(tensors, f"{at}.ln_2"),
        }
        for at in (f"transformer.h.{i}" for i in range(config.num_layers))
    ]
    return {
        "embedding": {
            "tokens": {"embedding": tensors["transformer.wte.weight"]},
            "positions": {"embedding": tensors["transformer.wpe.weight"]},
        },
        "decoder": stacked(config, layers) | {"final_norm": norm(tensors, "transformer.ln_f")},
    }
