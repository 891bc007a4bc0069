"""Reference models without a transformers class, built from torch layers."""

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as tf

from tests.interop.references.specs_of_small_options import MUSE_GLIMMER
from tests.interop.references.specs_to_2022 import T5, V

torch.backends.mha.set_fastpath_enabled(False)


class TorchReference(nn.Module):
    """A model written here; `config` holds its sizes under `model_type`."""


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def band(window):
    """A hook that lets the attention of transformers see the last `window` keys only."""

    def hook(module, args, kwargs):
        length = (args[0] if args else kwargs["hidden_states"]).shape[1]
        seen = causal(length) & ~causal(length).tril(-window)
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None, None]}

    return hook


class Transformer2017(TorchReference):
    """Attention Is All You Need: norms after the sums, none at the end, one table for all."""

    def __init__(self, d=16, heads=4, ff=22, layers=2, vocab_size=V):
        super().__init__()
        self.config = SimpleNamespace(
            model_type="ref_transformer2017",
            is_encoder_decoder=True,
            vocab_size=vocab_size,
            d_model=d,
            heads=heads,
            ff=ff,
            layers=layers,
        )
        sizes = {"d_model": d, "nhead": heads, "dim_feedforward": ff, "dropout": 0.0}
        self.embed = nn.Embedding(vocab_size, d)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(**sizes, batch_first=True) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(**sizes, batch_first=True) for _ in range(layers)
        )

    def vectors(self, ids):
        d = self.config.d_model
        phase = torch.outer(torch.arange(ids.shape[1]), 1e4 ** (-torch.arange(0, d, 2) / d))
        waves = torch.stack([phase.sin(), phase.cos()], -1).flatten(-2)
        return self.embed(ids) * math.sqrt(d) + waves

    def forward(self, input_ids, decoder_input_ids):
        x, y = self.vectors(input_ids), self.vectors(decoder_input_ids)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x, tgt_mask=~causal(y.shape[1]))
        return y @ self.embed.weight.T


class MuseGlimmer(TorchReference):
    """The text of Muse Glimmer, of which transformers has the class of the whole model alone."""

    def __init__(self, **changes):
        from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

        super().__init__()
        vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        vision |= {"num_attention_heads": 2, "patch_size": 4}
        sizes = {"out_hidden_size": 64, "projector_hidden_size": 20}
        config = MuseGlimmerConfig(
            text_config=MUSE_GLIMMER | changes, vision_config=vision, **sizes
        )
        config._attn_implementation = "eager"
        whole = MuseGlimmerForConditionalGeneration(config).float()
        self.config, self.whole = whole.config.text_config, (whole,)  # no part of this module
        self.model, self.lm_head = whole.model.language_model, whole.lm_head

    def forward(self, input_ids):
        return self.whole[0](input_ids=input_ids, use_cache=False).logits


class LamdaLike(TorchReference):
    """T5's decoder without its cross-attention, and a head of its own."""

    def __init__(self, **changes):
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Stack

        super().__init__()
        decoder_fields = {
            "is_decoder": True,
            "is_encoder_decoder": False,
            "feed_forward_proj": "gated-gelu",
        }
        self.config = T5Config(**(T5 | decoder_fields | {"num_layers": 2} | changes))
        self.config._attn_implementation = "eager"
        self.stack = T5Stack(self.config)
        for block in self.stack.block:
            block.layer[1] = nn.Identity()
        self.lm_head = nn.Linear(self.config.d_model, self.config.vocab_size, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.stack(input_ids=input_ids, use_cache=False).last_hidden_state)


class Gopher(TorchReference):
    """Pre-norm blocks with RMSNorm, ReLU and the relative attention of Transformer-XL."""

    def __init__(self, d=16, heads=4, ff=22, layers=2, vocab_size=V):
        super().__init__()
        self.config = SimpleNamespace(
            model_type="ref_gopher", vocab_size=vocab_size, d=d, heads=heads, ff=ff, layers=layers
        )
        self.embed = nn.Embedding(vocab_size, d)
        self.head = nn.Linear(d, vocab_size, bias=False)
        self.final_norm = nn.RMSNorm(d, eps=1e-5)
        shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "r": (d, d)}
        shapes |= {"up": (d, ff), "down": (ff, d)}
        self.layers = nn.ModuleList()
        for _ in range(layers):
            parts = {name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
            norms = {name: nn.RMSNorm(d, eps=1e-5) for name in ("norm1", "norm2")}
            layer = nn.ModuleDict(parts | norms)
            for name in ("u_bias", "v_bias"):
                layer.register_parameter(name, nn.Parameter(torch.zeros(heads, d // heads)))
            self.layers.append(layer)

    def forward(self, input_ids):
        d, heads = self.config.d, self.config.heads
        x = self.embed(input_ids)
        batch, length, _ = x.shape
        distance = torch.arange(length)[:, None] - torch.arange(length)
        phase = distance[..., None] * 1e4 ** (-torch.arange(0, d, 2) / d)
        waves = torch.cat([phase.sin(), phase.cos()], -1)
        for layer in self.layers:
            y = layer["norm1"](x)
            q, k, v = (layer[name](y).view(batch, length, heads, -1) for name in "qkv")
            r = layer["r"](waves).view(length, length, heads, -1)
            scores = torch.einsum("bihd,bjhd->bhij", q + layer.u_bias, k)
            scores = scores + torch.einsum("bihd,ijhd->bhij", q + layer.v_bias, r)
            scores = scores / math.sqrt(d // heads)
            weights = scores.masked_fill(~causal(length), -torch.inf).softmax(-1)
            x = x + layer["o"](torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))
            x = x + layer["down"](tf.relu(layer["up"](layer["norm2"](x))))
        return self.head(self.final_norm(x))


PHI3_SMALL = {
    "model_type": "phi3small",
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ff_intermediate_size": 14,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-5,
    "rope_embedding_base": 1e6,
    "rope_position_scale": 1.0,
    "gegelu_limit": 1.5,
    "hidden_act": "gegelu",
    "mup_use_scaling": True,
    "mup_attn_multiplier": 1.0,
    "mup_embedding_multiplier": 10.0,
    "mup_width_multiplier": 8.0,
    "dense_attention_every_n_layers": 2,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_block_size": 3,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "tie_word_embeddings": True,
}


class Phi3Small(TorchReference):
    """Phi-3-small in its released names, from what its released code does."""

    def __init__(self, **changes):
        super().__init__()
        self.config = c = SimpleNamespace(**(PHI3_SMALL | changes))
        d, eps = c.hidden_size, c.layer_norm_epsilon
        fused = d + 2 * c.num_key_value_heads * (d // c.num_attention_heads)

        def layer():
            qkv, out = nn.Linear(d, fused), nn.Linear(d, d)
            up, down = (
                nn.Linear(d, 2 * c.ff_intermediate_size),
                nn.Linear(c.ff_intermediate_size, d),
            )
            return nn.ModuleDict(
                {
                    "self_attn": nn.ModuleDict({"query_key_value": qkv, "dense": out}),
                    "mlp": nn.ModuleDict({"up_proj": up, "down_proj": down}),
                    "input_layernorm": nn.LayerNorm(d, eps=eps),
                    "post_attention_layernorm": nn.LayerNorm(d, eps=eps),
                }
            )

        layers = nn.ModuleList(layer() for _ in range(c.num_hidden_layers))
        embed, norm = nn.Embedding(c.vocab_size, d), nn.LayerNorm(d, eps=eps)
        self.model = nn.ModuleDict(
            {"embed_tokens": embed, "layers": layers, "final_layernorm": norm}
        )

    def sparse(self, length):
        """What each head sees where attention is sparse: near blocks, and every few of the far."""
        c = self.config
        heads, stride = c.num_attention_heads, c.blocksparse_vert_stride
        block = torch.arange(length) // c.blocksparse_block_size
        near = block[:, None] - block < c.blocksparse_num_local_blocks
        shift = torch.arange(heads)[:, None, None] * max(1, stride // heads)
        return causal(length) & (near | ((block + shift + 1) % stride == 0))

    def attend(self, layer, x, seen):
        c = self.config
        batch, length, d = x.shape
        heads, groups = c.num_attention_heads, c.num_key_value_heads
        width, queries = d // heads, heads // groups
        qkv = layer["query_key_value"](x).view(batch, length, groups, queries + 2, width)
        q, k, v = qkv.split([queries, 1, 1], 3)
        phase = torch.outer(
            torch.arange(length), c.rope_embedding_base ** (-torch.arange(0, width, 2) / width)
        )
        turn = torch.polar(torch.ones_like(phase), phase)[:, None, None]

        def rotate(z):
            first, second = z.chunk(2, -1)
            turned = torch.complex(first, second) * turn
            return torch.cat([turned.real, turned.imag], -1)

        q, k = rotate(q), rotate(k).expand_as(q)
        q, k, v = (z.flatten(2, 3).transpose(1, 2) for z in (q, k, v.expand_as(q)))
        scores = q @ k.mT * (c.mup_attn_multiplier / width)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return layer["dense"]((weights @ v).transpose(1, 2).flatten(-2))

    def forward(self, input_ids):
        c, limit = self.config, self.config.gegelu_limit
        x = self.model["embed_tokens"](input_ids) * c.mup_embedding_multiplier
        length = input_ids.shape[1]
        for i, layer in enumerate(self.model["layers"]):
            dense = (i + 1) % c.dense_attention_every_n_layers == 0
            seen = causal(length) if dense else self.sparse(length)
            x = x + self.attend(layer["self_attn"], layer["input_layernorm"](x), seen)
            hidden = layer["mlp"]["up_proj"](layer["post_attention_layernorm"](x))
            gate, value = hidden[..., 0::2].clamp(max=limit), hidden[..., 1::2].clamp(-limit, limit)
            gate = gate * torch.sigmoid(1.702 * gate)
            x = x + layer["mlp"]["down_proj"](gate * (value + 1))
        x = self.model["final_layernorm"](x)
        return x @ self.model["embed_tokens"].weight.T / c.mup_width_multiplier


BAICHUAN = {
    "model_type": "baichuan",
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 22,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "model_max_length": 64,
    "z_loss_weight": 0,
}


class Baichuan2(TorchReference):
    """Baichuan 2 in its released names: RoPE if it has `max_position_embeddings`, else ALiBi."""

    def __init__(self, **changes):
        super().__init__()
        self.config = c = SimpleNamespace(**(BAICHUAN | changes))
        d, hidden, eps = c.hidden_size, c.intermediate_size, c.rms_norm_eps

        def linear(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=False)

        def layer():
            return nn.ModuleDict(
                {
                    "self_attn": nn.ModuleDict(
                        {"W_pack": linear(d, 3 * d), "o_proj": linear(d, d)}
                    ),
                    "mlp": nn.ModuleDict(
                        {
                            "gate_proj": linear(d, hidden),
                            "up_proj": linear(d, hidden),
                            "down_proj": linear(hidden, d),
                        }
                    ),
                    "input_layernorm": nn.RMSNorm(d, eps=eps),
                    "post_attention_layernorm": nn.RMSNorm(d, eps=eps),
                }
            )

        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(c.vocab_size, d),
                "layers": nn.ModuleList(layer() for _ in range(c.num_hidden_layers)),
                "norm": nn.RMSNorm(d, eps=eps),
            }
        )
        self.lm_head = linear(d, c.vocab_size)

    def attend(self, layer, x):
        heads, length = self.config.num_attention_heads, x.shape[1]
        width, at = x.shape[-1] // heads, torch.arange(length)
        q, k, v = (
            part.unflatten(-1, (heads, width)).transpose(1, 2)
            for part in layer["W_pack"](x).chunk(3, -1)
        )
        bias = torch.zeros(heads, length, length)
        if hasattr(self.config, "max_position_embeddings"):
            phase = torch.outer(at, 10_000.0 ** (-torch.arange(0, width, 2) / width))
            turn = torch.polar(torch.ones_like(phase), phase)
            q, k = (
                torch.cat([z.real, z.imag], -1)
                for z in (torch.complex(*y.chunk(2, -1)) * turn for y in (q, k))
            )
        else:
            power = 2 ** math.floor(math.log2(heads))
            slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
            slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
            bias = torch.tensor(slopes)[:, None, None] * (at - at[:, None])
        scores = q @ k.mT * width**-0.5 + bias
        weights = scores.masked_fill(~causal(length), -torch.inf).softmax(-1)
        return layer["o_proj"]((weights @ v).transpose(1, 2).flatten(-2))

    def forward(self, input_ids):
        x = self.model["embed_tokens"](input_ids)
        for layer in self.model["layers"]:
            x = x + self.attend(layer["self_attn"], layer["input_layernorm"](x))
            y, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
            x = x + mlp["down_proj"](tf.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
        return self.model["norm"](x) @ tf.normalize(self.lm_head.weight).mT
