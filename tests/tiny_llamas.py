"""A small Llama 2 with other kinds of attention, which no model of the zoo has."""

from dataclasses import replace

from experiments.rope_placement import SETTINGS
from jaxformer import zoo
from jaxformer.config import Angles, Decay, Head, Latent, QKNorm, Rope, SharedKV

LLAMA = zoo.get("llama-2-70b").tiny()  # 2 layers, width 64, 4 heads of 16, 2 of keys and values
LLAMAS = {
    "norms of heads": replace(LLAMA, attention=replace(LLAMA.attention, qk_norm=QKNorm())),
    "tied": replace(LLAMA, head=Head(tied=True, bias=True)),
    "decay": replace(
        LLAMA,
        attention=Decay(
            num_heads=4, head_dim=16, angles=Angles(learned=True), biases=("value", "out")
        ),
    ),
    "nine placements": replace(
        LLAMA,
        num_layers=9,
        attention=replace(
            LLAMA.attention,
            positions=tuple(Rope(targets=setting.targets) for setting in SETTINGS),
        ),
    ),
    "shared": replace(
        LLAMA,
        num_layers=4,
        attention=SharedKV(
            num_heads=4,
            head_dim=16,
            positions=(Rope(targets=("q", "k", "v", "o")), Rope()),
            qk_norm=QKNorm(),
            biases=("key_value",),
        ),
    ),
    "latent": replace(
        LLAMA,
        attention=Latent(
            num_heads=4,
            latent_dim=24,
            query_latent_dim=20,
            nope_dim=8,
            rope_dim=6,
            value_dim=10,
            biases=("query_latent", "latent", "out"),
        ),
    ),
}
