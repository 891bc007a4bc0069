"""References without a supported family: absolute positions.

Each function gives a configuration by hand and our parameters.
"""

from jaxformer import config as c
from tests.interop.param_trees import linear, norm, split_heads, split_qkv, stack_layers

BIASES = ("query", "key", "value", "out")
LAYER_NORM = c.LayerNorm(eps=1e-5)


def transformer_2017(hf_config, tensors):
    """Attention Is All You Need from torch's layers."""
    d, n = hf_config["d_model"], hf_config["heads"]
    config = c.TransformerConfig(
        vocab_size=hf_config["vocab_size"],
        model_dim=d,
        num_layers=hf_config["layers"],
        attention=c.MultiHead(
            num_heads=n, num_kv_heads=n, head_dim=d // n, positions=(None,), biases=BIASES
        ),
        feed_forward=(c.MLP(hidden_dim=hf_config["ff"], activation="relu", bias=True),),
        topology=c.EncoderDecoder(num_encoder_layers=hf_config["layers"]),
        norm=LAYER_NORM,
        norm_placement="post",
        final_norm=False,
        embedding=c.Embedding(scale=d**0.5, positions=c.Sinusoid()),
        head=c.LMHead(tied=True),
    )

    def attention(name):
        fused = {
            "kernel": tensors[f"{name}.in_proj_weight"].T,
            "bias": tensors[f"{name}.in_proj_bias"],
        }
        return split_heads(config, **split_qkv(fused), out=linear(tensors, f"{name}.out_proj"))

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
        layers = [layer(f"{stack}.{i}", crossed=crossed) for i in range(hf_config["layers"])]
        params[stack] = stack_layers(config, layers)
    return config, params


def gpt3_banded(hf_config, tensors):
    """GPT-2 whose odd layers see the last five tokens; its linears are stored inputs first."""
    d, n = hf_config["n_embd"], hf_config["n_head"]
    config = c.TransformerConfig(
        vocab_size=hf_config["vocab_size"],
        model_dim=d,
        num_layers=hf_config["n_layer"],
        attention=c.MultiHead(
            num_heads=n,
            num_kv_heads=n,
            head_dim=d // n,
            positions=(None,),
            windows=(None, 5),
            biases=BIASES,
        ),
        feed_forward=(c.MLP(hidden_dim=hf_config["n_inner"], activation="gelu_tanh", bias=True),),
        norm=LAYER_NORM,
        embedding=c.Embedding(positions=c.Learned(max_length=hf_config["n_positions"])),
        head=c.LMHead(tied=True),
    )

    def linear_of(name):
        return linear(tensors, name, transposed=False)

    return config, gpt(
        config,
        tensors,
        lambda at: {
            "attention": split_heads(
                config,
                **split_qkv(linear_of(f"{at}.attn.c_attn")),
                out=linear_of(f"{at}.attn.c_proj"),
            ),
            "feed_forward": {
                "up": linear_of(f"{at}.mlp.c_fc"),
                "down": linear_of(f"{at}.mlp.c_proj"),
            },
        },
    )


def gpt(config, tensors, branches):
    """Tables, norms and a final norm of a GPT."""
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
        "decoder": stack_layers(config, layers) | {"final_norm": norm(tensors, "transformer.ln_f")},
    }
