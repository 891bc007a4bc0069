"""Rows 13 to 21 of the survey."""

from jaxformer.config import TransformerXL
from jaxformer.zoo.cells import Cells
from jaxformer.zoo.row import SurveyRow

FILES = "The sizes are the paper's or from memory and were not checked against released files."
LLAMA = Cells(norm="RMSNorm", block="Serial", pre_norm=True, position="RoPE", activation="SwiGLU")

ROWS = (
    SurveyRow(
        number=13,
        name="GPT-NeoX",
        year=2022,
        listed=Cells(
            norm="LayerNorm", block="Parallel", pre_norm=True, position="RoPE", activation="GeLU"
        ),
        release="As listed: a norm for each branch, a quarter of each head rotated, halves paired, "
        "biases on all products but the head.",
        preset="gpt-neox-20b",
        also=(
            *("pythia-70m", "pythia-160m", "pythia-410m", "pythia-1b"),
            *("pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b"),
        ),
        reference="Black et al., GPT-NeoX-20B: An Open-Source Autoregressive Language Model, "
        "2022. arXiv:2204.06745",
    ),
    SurveyRow(
        number=14,
        name="BLOOM (175B)",
        year=2022,
        listed=Cells(
            norm="LayerNorm", block="Parallel", pre_norm=True, position="Alibi", activation="GeLU"
        ),
        release="Serial; a LayerNorm right after the embedding; 112 heads, so that ALiBi needs "
        "slopes beyond a power of two; tied, biases.",
        preset="bloom-176b",
        also=("bloom-560m", "bloom-1b7", "bloom-7b1"),
        differences=(
            "The table says parallel; released code runs attention, then feed-forward.",
            "The norm after the embedding has no column.",
        ),
        reference="BigScience, BLOOM: A 176B-Parameter Open-Access Multilingual Language Model, "
        "2022. arXiv:2211.05100",
    ),
    SurveyRow(
        number=15,
        name="OPT (175B)",
        year=2022,
        listed=Cells(
            norm="LayerNorm", block="Serial", pre_norm=False, position="Absolute", activation="ReLU"
        ),
        release="Pre-norm, with a norm after the last layer; positions start at row 2 of their "
        "table; tied, biases.",
        preset="opt-175b",
        also=("opt-125m", "opt-350m", "opt-1.3b", "opt-6.7b"),
        differences=(
            "The table says not pre-norm; that holds for the 350M model alone, which also has no "
            "last norm and token vectors of 512.",
        ),
        assumptions=("The 175B weights went out on request only; the sizes are the paper's.",),
        reference="Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022. "
        "arXiv:2205.01068",
    ),
    SurveyRow(
        number=16,
        name="PaLM (540B)",
        year=2022,
        listed=Cells(
            norm="RMSNorm",
            block="Parallel",
            pre_norm=True,
            position="RoPE",
            activation="SwiGLU",
            tricks=("Z-loss",),
        ),
        release="Branches under one norm, one key-value head, tied, logits divided by "
        "sqrt(model_dim), no biases; z-loss 1e-4.",
        preset="palm-540b",
        also=("palm-8b", "palm-62b"),
        differences=("The table says RMSNorm; the paper writes LayerNorm, without biases.",),
        assumptions=(
            "No weights were released; the sizes and the division of the logits are the paper's.",
            "Which features are rotated together and the norm's eps are not published: neighbours "
            "and 1e-5.",
        ),
        reference="Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022. "
        "arXiv:2204.02311",
        z_loss=1e-4,
    ),
    SurveyRow(
        number=17,
        name="Chinchilla",
        year=2022,
        listed=Cells(
            norm="RMSNorm", block="Serial", pre_norm=True, position="Relative", activation="ReLU"
        ),
        release="Gopher's design with half its width.",
        preset="chinchilla-70b",
        assumptions=(
            "No weights were released; the sizes are the paper's.",
            "Activation, sharing of u and v, biases and tying are not published: as in Gopher.",
        ),
        reference="Hoffmann et al., Training Compute-Optimal Large Language Models, 2022. "
        "arXiv:2203.15556",
        relative=TransformerXL(),
    ),
    SurveyRow(
        number=18,
        name="Mistral (7B)",
        year=2023,
        listed=LLAMA,
        release="As listed, with 8 key-value heads and, in version 0.1, a window of 4096 tokens in "
        "every layer.",
        preset="mistral-7b",
        differences=("The table has no column for the window.",),
        assumptions=(
            "From version 0.2 on there is no window and the rotation's base is 1e6; this is not "
            "checked against released files.",
        ),
        reference="Jiang et al., Mistral 7B, 2023. arXiv:2310.06825",
    ),
    SurveyRow(
        number=19,
        name="LLaMA2 (70B)",
        year=2023,
        listed=LLAMA,
        release="As listed, with 8 key-value heads for 64 query heads.",
        preset="llama-2-70b",
        also=("llama-2-7b",),
        reference="Touvron et al., Llama 2: Open Foundation and Fine-Tuned Chat Models, 2023. "
        "arXiv:2307.09288",
    ),
    SurveyRow(
        number=20,
        name="LLaMA (65B)",
        year=2023,
        listed=LLAMA,
        release="As listed, with as many key-value heads as query heads.",
        preset="llama-65b",
        also=("llama-7b", "llama-13b"),
        assumptions=(FILES,),
        reference="Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023. "
        "arXiv:2302.13971",
    ),
    SurveyRow(
        number=21,
        name="GPT4",
        year=2023,
        listed=Cells(pre_norm=False),
        release="Nothing about the architecture was published.",
        differences=("The one cell, not pre-norm, stands on no publication; there is no preset.",),
        reference="OpenAI, GPT-4 Technical Report, 2023. arXiv:2303.08774",
    ),
)
