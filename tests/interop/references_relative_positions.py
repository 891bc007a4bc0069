"""References without a supported family: relative positions.

Each function gives a configuration by hand and our parameters.
"""

from jaxformer import config as c
from tests.interop.param_trees import linear, norm, split_heads, stack_layers


def lamda_like(hf_config, tensors):
    """The decoder of T5 on its own, with a head of its own."""
    n, h = hf_config["num_heads"], hf_config["d_kv"]
    config = c.TransformerConfig(
        vocab_size=hf_config["vocab_size"],
        model_dim=hf_config["d_model"],
        num_layers=hf_config["num_layers"],
        attention=c.MultiHead(
            num_heads=n,
            num_kv_heads=n,
            head_dim=h,
            positions=(
                c.T5Bias(
                    num_buckets=hf_config["relative_attention_num_buckets"],
                    max_distance=hf_config["relative_attention_max_distance"],
                ),
            ),
            scale=1.0,
        ),
        feed_forward=(c.GLU(hidden_dim=hf_config["d_ff"], activation="gelu_tanh"),),
        norm=c.RMSNorm(eps=hf_config["layer_norm_epsilon"]),
    )

    def layer(at):
        path = f"{at}.layer.0.SelfAttention"
        names = {"query": "q", "key": "k", "value": "v", "out": "o"}
        dense = f"{at}.layer.2.DenseReluDense"
        return {
            "pre_attention_norm": norm(tensors, f"{at}.layer.0.layer_norm"),
            "attention": split_heads(
                config,
                **{ours: linear(tensors, f"{path}.{theirs}") for ours, theirs in names.items()},
            ),
            "pre_feed_forward_norm": norm(tensors, f"{at}.layer.2.layer_norm"),
            "feed_forward": {
                "gate": linear(tensors, f"{dense}.wi_0"),
                "up": linear(tensors, f"{dense}.wi_1"),
                "down": linear(tensors, f"{dense}.wo"),
            },
        }

    layers = [layer(f"stack.block.{i}") for i in range(config.num_layers)]
    table = "stack.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return config, {
        "embedding": {"tokens": {"embedding": tensors["stack.embed_tokens.weight"]}},
        "decoder": stack_layers(config, layers)
        | {
            "relative_bias": {"embedding": tensors[table]},
            "final_norm": norm(tensors, "stack.final_layer_norm"),
        },
        "head": linear(tensors, "lm_head"),
    }


def gopher(hf_config, tensors):
    """RMSNorm, ReLU, and the relative attention of Transformer-XL."""
    d, n = hf_config["d"], hf_config["heads"]
    config = c.TransformerConfig(
        vocab_size=hf_config["vocab_size"],
        model_dim=d,
        num_layers=hf_config["layers"],
        attention=c.MultiHead(
            num_heads=n, num_kv_heads=n, head_dim=d // n, positions=(c.TransformerXL(),)
        ),
        feed_forward=(c.MLP(hidden_dim=hf_config["ff"], activation="relu"),),
        norm=c.RMSNorm(eps=1e-5),
    )

    def layer(at):
        names = {"query": "q", "key": "k", "value": "v", "out": "o"}
        linears = {ours: linear(tensors, f"{at}.{theirs}") for ours, theirs in names.items()}
        relative = tensors[f"{at}.r.weight"].T.reshape(d, n, d // n)
        return {
            "pre_attention_norm": norm(tensors, f"{at}.norm1"),
            "attention": split_heads(config, **linears)
            | {
                "relative": {"kernel": relative},
                "content_bias": {"bias": tensors[f"{at}.u_bias"]},
                "position_bias": {"bias": tensors[f"{at}.v_bias"]},
            },
            "pre_feed_forward_norm": norm(tensors, f"{at}.norm2"),
            "feed_forward": {
                "up": linear(tensors, f"{at}.up"),
                "down": linear(tensors, f"{at}.down"),
            },
        }

    layers = [layer(f"layers.{i}") for i in range(config.num_layers)]
    return config, {
        "embedding": {"tokens": {"embedding": tensors["embed.weight"]}},
        "decoder": stack_layers(config, layers) | {"final_norm": norm(tensors, "final_norm")},
        "head": linear(tensors, "head"),
    }


def xlnet(hf_config, tensors):
    """XLNet reading left to right: post-norm, projections stored with heads as an axis."""
    d, n = hf_config["d_model"], hf_config["n_head"]
    config = c.TransformerConfig(
        vocab_size=hf_config["vocab_size"],
        model_dim=d,
        num_layers=hf_config["n_layer"],
        attention=c.MultiHead(
            num_heads=n, num_kv_heads=n, head_dim=d // n, positions=(c.TransformerXL(),)
        ),
        feed_forward=(c.MLP(hidden_dim=hf_config["d_inner"], activation="relu", bias=True),),
        norm=c.LayerNorm(eps=hf_config["layer_norm_eps"]),
        norm_placement="post",
        final_norm=False,
        head=c.LMHead(tied=True, bias=True),
    )

    def layer(at):
        attention = f"{at}.rel_attn"
        names = {"query": "q", "key": "k", "value": "v", "relative": "r"}
        kernels = {
            ours: {"kernel": tensors[f"{attention}.{theirs}"]} for ours, theirs in names.items()
        }
        return {
            "attention": kernels
            | {
                "out": {"kernel": tensors[f"{attention}.o"].transpose(1, 2, 0)},
                "content_bias": {"bias": tensors[f"{attention}.r_w_bias"]},
                "position_bias": {"bias": tensors[f"{attention}.r_r_bias"]},
            },
            "post_attention_norm": norm(tensors, f"{attention}.layer_norm"),
            "feed_forward": {
                "up": linear(tensors, f"{at}.ff.layer_1"),
                "down": linear(tensors, f"{at}.ff.layer_2"),
            },
            "post_feed_forward_norm": norm(tensors, f"{at}.ff.layer_norm"),
        }

    layers = [layer(f"transformer.layer.{i}") for i in range(config.num_layers)]
    table = tensors["transformer.word_embedding.weight"]
    return config, {
        "embedding": {"tokens": {"embedding": table}},
        "decoder": stack_layers(config, layers),
        "head": {"bias": tensors["lm_loss.bias"]},
    }
