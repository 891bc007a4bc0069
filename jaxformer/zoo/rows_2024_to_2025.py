"""Rows 22 to 38 of the survey."""

from jaxformer.zoo.cells import Cells
from jaxformer.zoo.row import SurveyRow
from jaxformer.zoo.rows_2022_to_2023 import FILES, LLAMA

ROWS = (
    SurveyRow(
        number=22,
        name="Olmo 2",
        year=2024,
        listed=Cells(
            norm="RMSNorm",
            block="Serial",
            pre_norm=False,
            position="RoPE",
            activation="SwiGLU",
            tricks=("Z-loss", "QK-norm"),
        ),
        release="Norms on what a branch gives, before it is added; queries and keys normalised "
        "over all heads together, before rotation; not tied; z-loss 1e-5.",
        preset="olmo-2-7b",
        also=("olmo-2-13b",),
        differences=(
            "Not pre-norm is right, and it is no post-norm of 2017 either: the norm stands inside "
            "the branch, and the residual stream itself is never normalised. As listed it is read "
            "as post-norm.",
        ),
        assumptions=(
            "The weight of the z-loss is the paper's, not checked against released files.",
        ),
        reference="OLMo team, 2 OLMo 2 Furious, 2024. arXiv:2501.00656",
        z_loss=1e-5,
    ),
    SurveyRow(
        number=23,
        name="Gemma 2 (27B)",
        year=2024,
        listed=Cells(
            norm="RMSNorm",
            block="Serial",
            pre_norm=True,
            position="RoPE",
            activation="GeGLU",
            tricks=("Logit soft capping", "Pre+post norm"),
        ),
        release="As listed; also a window of 4096 in every other layer, token vectors times "
        "sqrt(model_dim), scores scaled by 144 ** -0.5 though heads have 128, norms that store "
        "their scale - 1, tied. Scores are capped at 50, logits at 30.",
        preset="gemma-2-27b",
        also=("gemma-2-2b", "gemma-2-9b"),
        differences=("The table has no columns for windows and scales.",),
        reference="Gemma team, Gemma 2: Improving Open Language Models at a Practical Size, 2024. "
        "arXiv:2408.00118",
    ),
    SurveyRow(
        number=24,
        name="Nemotron-4 (340B)",
        year=2024,
        listed=Cells(
            norm="LayerNorm", block="Serial", pre_norm=True, position="RoPE", activation="SqReLu"
        ),
        release="As listed; half of each head is rotated, the norm stores its scale - 1, 8 "
        "key-value heads, no gate, no biases, not tied.",
        preset="nemotron-4-340b",
        assumptions=(FILES,),
        reference="NVIDIA, Nemotron-4 340B Technical Report, 2024. arXiv:2406.11704",
    ),
    SurveyRow(
        number=25,
        name="Qwen 2 (72B) - same for 2.5",
        year=2024,
        listed=LLAMA,
        release="As listed, with biases on queries, keys and values; 2.5 has the same design.",
        preset="qwen-2-72b",
        also=("qwen-2-7b", "qwen-2.5-72b"),
        differences=("The table has no column for biases.",),
        assumptions=(
            "The norms' eps is 1e-5 in the base models of 72B and 1e-6 in the others; from memory, "
            "not checked against released files.",
        ),
        reference="Yang et al., Qwen2 Technical Report, 2024. arXiv:2407.10671",
    ),
    SurveyRow(
        number=26,
        name="Falcon 2 11B",
        year=2024,
        listed=Cells(
            norm="LayerNorm",
            block="Parallel",
            pre_norm=True,
            position="RoPE",
            activation="GeLU",
            tricks=("Z-loss",),
        ),
        release="As listed: one norm for both branches, exact GeLU, 8 key-value heads, not tied; "
        "z-loss 1e-4.",
        preset="falcon-2-11b",
        also=("falcon-7b", "falcon-40b"),
        assumptions=(
            "Key-value heads, the rotation's base of 500042 and the untied head are not checked "
            "against released files.",
        ),
        reference="Malartic et al., Falcon2-11B Technical Report, 2024. arXiv:2407.14885",
        z_loss=1e-4,
    ),
    SurveyRow(
        number=27,
        name="Ph3 (small) - same for ph4",
        year=2024,
        listed=LLAMA,
        release="Phi-3-small: LayerNorm with biases, GeGLU whose gate and value are clamped (and "
        "1 added to the value), biases on all products but the head, block-sparse attention in "
        "every other layer, and three scales from muP: embedding x 10, scores / head_dim, logits "
        "/ 8. 91 ids of its padded vocabulary are never given.",
        preset="phi-3-small",
        also=("phi-3-mini", "phi-3-medium", "phi-4"),
        differences=(
            "Norm and activation are not those of Phi-3-small; the cells fit Phi-3-mini, "
            "Phi-3-medium and Phi-4.",
            "So Phi-4 is not the same: it is a Llama, Phi-3-small is not.",
        ),
        assumptions=(
            "The unused ids are those of the released tokenizer; config.json does not hold them.",
        ),
        reference="Abdin et al., Phi-3 Technical Report, 2024. arXiv:2404.14219",
    ),
    SurveyRow(
        number=28,
        name="Llama 3 (70B)",
        year=2024,
        listed=LLAMA,
        release="As listed, with 8 key-value heads and a base of 5e5; version 3.1 stretches the "
        "rotations eightfold.",
        preset="llama-3-70b",
        also=("llama-3-8b", "llama-3.1-8b", "llama-3.1-70b"),
        reference="Grattafiori et al., The Llama 3 Herd of Models, 2024. arXiv:2407.21783",
    ),
    SurveyRow(
        number=29,
        name="Reka Flash",
        year=2024,
        listed=LLAMA,
        release="The model of 2024 runs behind an interface only. Reka Flash 3 of 2025, 21B, was "
        "released in Llama's format, with 8 key-value heads.",
        preset="reka-flash-3",
        differences=("The preset is the later model, the one with weights.",),
        assumptions=(
            "Heads, widths, eps and the rotation's base of 8e6 are from memory and were not "
            "checked against released files.",
        ),
        reference="Reka team, Reka Core, Flash, and Edge: A Series of Powerful Multimodal "
        "Language Models, 2024. arXiv:2404.12387",
    ),
    SurveyRow(
        number=30,
        name="Command R+",
        year=2024,
        listed=Cells(
            norm="LayerNorm", block="Parallel", pre_norm=True, position="RoPE", activation="SwiGLU"
        ),
        release="As listed; queries and keys pass a LayerNorm with a scale for each head; norms "
        "have no biases, neighbouring features are rotated together, tied, logits times 0.833.",
        preset="command-r-plus",
        also=("command-r",),
        differences=("The table leaves out the norm of queries and keys; Command R has none.",),
        assumptions=(FILES,),
        reference="Cohere, Introducing Command R+: A Scalable LLM Built for Business, 2024",
    ),
    SurveyRow(
        number=31,
        name="OLMo",
        year=2024,
        listed=LLAMA,
        release="LayerNorm with neither scale nor bias.",
        preset="olmo-7b",
        also=("olmo-1b",),
        differences=("The table says RMSNorm; the model has a LayerNorm that learns nothing.",),
        assumptions=(
            "That the 1B model ties its head, and that later versions clip queries, keys and "
            "values at 8, is not checked against released files.",
        ),
        reference="Groeneveld et al., OLMo: Accelerating the Science of Language Models, 2024. "
        "arXiv:2402.00838",
    ),
    SurveyRow(
        number=32,
        name="Qwen (14B)",
        year=2024,
        listed=LLAMA,
        release="As listed, with biases on queries, keys and values; beyond 2048 tokens it "
        "stretches rotations and scores. Released in September 2023.",
        preset="qwen-14b",
        differences=("The year is 2023.", "The table has no column for biases."),
        assumptions=(FILES,),
        reference="Bai et al., Qwen Technical Report, 2023. arXiv:2309.16609",
    ),
    SurveyRow(
        number=33,
        name="DeepSeek (67B)",
        year=2024,
        listed=LLAMA,
        release="As listed: a Llama of 95 layers with 8 key-value heads.",
        preset="deepseek-67b",
        assumptions=(FILES,),
        reference="DeepSeek-AI, DeepSeek LLM: Scaling Open-Source Language Models with "
        "Longtermism, 2024. arXiv:2401.02954",
    ),
    SurveyRow(
        number=34,
        name="Yi (34B)",
        year=2024,
        listed=LLAMA,
        release="As listed: a Llama with 8 key-value heads for 56 query heads and a base of 5e6.",
        preset="yi-34b",
        reference="01.AI, Yi: Open Foundation Models by 01.AI, 2024. arXiv:2403.04652",
    ),
    SurveyRow(
        number=35,
        name="Mixtral of Experts",
        year=2024,
        listed=Cells(pre_norm=False),
        release="RMSNorm, serial, pre-norm, RoPE with a base of 1e6; in each layer 8 SwiGLU "
        "experts, of which a token meets 2, their weights divided by their sum; 8 key-value "
        "heads, no window.",
        preset="mixtral-8x7b",
        differences=(
            "The table says not pre-norm; the model is.",
            "Cells that are blank are those of Mistral 7B, and the feed-forward is a mixture of "
            "experts.",
        ),
        reference="Jiang et al., Mixtral of Experts, 2024. arXiv:2401.04088",
    ),
    SurveyRow(
        number=36,
        name="Command A",
        year=2025,
        listed=Cells(
            norm="LayerNorm",
            block="Parallel",
            pre_norm=True,
            position="Hybrid (RoPE+NoPE)",
            activation="SwiGLU",
        ),
        release="As listed: three layers with RoPE and a window of 4096, then one without "
        "positions that sees all; norms without biases, tied, logits divided by 4.",
        preset="command-a",
        differences=("The table has no column for the windows.",),
        assumptions=(FILES,),
        reference="Cohere, Command A: An Enterprise-Ready Large Language Model, 2025. "
        "arXiv:2504.00698",
    ),
    SurveyRow(
        number=37,
        name="Gemma 3",
        year=2025,
        listed=Cells(
            norm="RMSNorm",
            block="Serial",
            pre_norm=True,
            position="RoPE",
            activation="GeGLU",
            tricks=("Pre+post norm", "QK-norm"),
        ),
        release="As listed; also five layers with a window to one without, which rotates by base "
        "1e6 (stretched eightfold) instead of 1e4; soft caps are gone.",
        preset="gemma-3-27b",
        also=("gemma-3-1b",),
        differences=("The table has no columns for windows and the two bases.",),
        assumptions=(
            "That the 1B model has windows of 512 and stretches nothing is not checked against "
            "released files.",
        ),
        reference="Gemma team, Gemma 3 Technical Report, 2025. arXiv:2503.19786",
    ),
    SurveyRow(
        number=38,
        name="SmolLM2 (1.7B)",
        year=2025,
        listed=LLAMA,
        release="As listed: a Llama with as many key-value heads as query heads, tied.",
        preset="smollm2-1.7b",
        assumptions=("That the head is tied is not checked against released files.",),
        reference="Ben Allal et al., SmolLM2: When Smol Goes Big, 2025. arXiv:2502.02737",
    ),
)
