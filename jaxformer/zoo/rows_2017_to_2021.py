"""Rows 1 to 12 of the survey."""

from jaxformer.config import EncoderDecoder, TransformerXL
from jaxformer.zoo.cells import Cells
from jaxformer.zoo.row import SurveyRow

PAPER = "The sizes are the paper's and were not checked against released files."
BOTH = EncoderDecoder(num_encoder_layers=2)
GPT_1 = Cells(
    norm="LayerNorm", block="Serial", pre_norm=False, position="Absolute", activation="GeLU"
)
T5_V1_1 = Cells(
    norm="RMSNorm", block="Serial", pre_norm=True, position="Relative", activation="GeGLU"
)

ROWS = (
    SurveyRow(
        number=1,
        name="Original transformer",
        year=2017,
        listed=Cells(
            norm="LayerNorm", block="Serial", pre_norm=False, position="Sine", activation="ReLU"
        ),
        release="An encoder-decoder for translation: token vectors times sqrt(model_dim), one "
        "table for source, target and logits, no norm after the last layers.",
        preset="transformer-big",
        also=("transformer-base",),
        assumptions=(
            "The paper counts about 37000 tokens for English-German; its totals of 65M and 213M "
            "parameters fit about 41000 and 36000.",
            "Biases stand on every projection; queries, keys and values of tensor2tensor, the "
            "authors' code, had none.",
        ),
        reference="Vaswani et al., Attention Is All You Need, 2017. arXiv:1706.03762",
        topology=BOTH,
    ),
    SurveyRow(
        number=2,
        name="GPT",
        year=2018,
        listed=GPT_1,
        release="As listed; GeLU in its tanh form, no norm after the last layer, tied, biases.",
        preset="gpt-1",
        reference="Radford et al., Improving Language Understanding by Generative Pre-Training, "
        "2018",
    ),
    SurveyRow(
        number=3,
        name="T5 (11B)",
        year=2019,
        listed=Cells(
            norm="RMSNorm", block="Serial", pre_norm=True, position="Relative", activation="ReLU"
        ),
        release="An encoder-decoder; biases by bucket of distance, one table a stack, none in "
        "cross-attention; scores without a scale; a tied head, divided by sqrt(model_dim).",
        preset="t5-11b",
        also=("t5-small", "t5-base", "t5-large", "t5-3b"),
        assumptions=(PAPER,),
        reference="Raffel et al., Exploring the Limits of Transfer Learning with a Unified "
        "Text-to-Text Transformer, 2019. arXiv:1910.10683",
        topology=BOTH,
    ),
    SurveyRow(
        number=4,
        name="GPT2",
        year=2019,
        listed=GPT_1,
        release="Pre-norm, with a norm after the last layer; GeLU in its tanh form, tied, biases.",
        preset="gpt-2-xl",
        also=("gpt-2-small", "gpt-2-medium", "gpt-2-large"),
        differences=(
            "The table says not pre-norm; the released model is, and that was its main change "
            "from GPT.",
        ),
        reference="Radford et al., Language Models are Unsupervised Multitask Learners, 2019",
    ),
    SurveyRow(
        number=5,
        name="GPT2",
        year=2020,
        listed=T5_V1_1,
        release="There is no such model. The cells are those of T5 v1.1, the next row, under a "
        "wrong name; the preset is that model.",
        preset="t5-v1.1-xxl",
        differences=(
            "No GPT-2 of 2020 exists: the row repeats T5 v1.1, an encoder-decoder. As listed it is "
            "read as its name says, as a decoder.",
        ),
        reference="Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202",
    ),
    SurveyRow(
        number=6,
        name="T5 (XXL 11B) v1.1",
        year=2020,
        listed=T5_V1_1,
        release="As T5, with GeGLU (tanh form) and a head of its own that divides nothing.",
        preset="t5-v1.1-xxl",
        also=("t5-v1.1-small", "t5-v1.1-base", "t5-v1.1-large", "t5-v1.1-xl"),
        assumptions=(PAPER,),
        reference="Shazeer, GLU Variants Improve Transformer, 2020. arXiv:2002.05202",
        topology=BOTH,
    ),
    SurveyRow(
        number=7,
        name="mT5",
        year=2020,
        listed=T5_V1_1,
        release="T5 v1.1 with a vocabulary of 250,112.",
        preset="mt5-xxl",
        also=("mt5-small", "mt5-base", "mt5-large", "mt5-xl"),
        assumptions=(PAPER,),
        reference="Xue et al., mT5: A Massively Multilingual Pre-trained Text-to-Text "
        "Transformer, 2020. arXiv:2010.11934",
        topology=BOTH,
    ),
    SurveyRow(
        number=8,
        name="GPT3 (175B)",
        year=2020,
        listed=Cells(
            norm="LayerNorm", block="Serial", pre_norm=True, position="Absolute", activation="GeLU"
        ),
        release="GPT-2 with dense and locally banded layers in turn. GPT-Neo is a released model "
        "with that alternation (and without a scale of the scores).",
        preset="gpt-3-175b",
        also=("gpt-neo-1.3b", "gpt-neo-2.7b"),
        differences=("The table has no column for it: every other layer sees only a band.",),
        assumptions=(
            "No weights were released; the sizes are the paper's.",
            "How wide the band is, and which layers have it, are not published: here odd layers "
            "see 256 tokens, as in GPT-Neo.",
        ),
        reference="Brown et al., Language Models are Few-Shot Learners, 2020. arXiv:2005.14165",
    ),
    SurveyRow(
        number=9,
        name="GPTJ",
        year=2021,
        listed=Cells(
            norm="LayerNorm", block="Parallel", pre_norm=True, position="RoPE", activation="GeLU"
        ),
        release="As listed: one norm for both branches, 64 of 256 features rotated in neighbouring "
        "pairs, biases on the feed-forward and the head, none in attention.",
        preset="gpt-j-6b",
        reference="Wang and Komatsuzaki, GPT-J-6B: A 6 Billion Parameter Autoregressive Language "
        "Model, 2021",
    ),
    SurveyRow(
        number=10,
        name="LaMDA",
        year=2021,
        listed=Cells(position="Relative", activation="GeGLU"),
        release="A decoder with relative attention as in T5 and gated GeLU; sizes published.",
        preset="lamda-137b",
        assumptions=(
            "No weights were released; the sizes are the paper's.",
            "Norm, its place, the scale of the scores, the head and tying are not published: as in "
            "T5 v1.1 (RMSNorm, pre-norm, serial, no scale, a head of its own).",
        ),
        reference="Thoppilan et al., LaMDA: Language Models for Dialog Applications, 2022. "
        "arXiv:2201.08239",
    ),
    SurveyRow(
        number=11,
        name="Anthropic LM (not claude)",
        year=2021,
        listed=Cells(),
        release="Nothing to build was published: a decoder of 52B parameters, 64 layers and width "
        "8192, and no weights.",
        differences=("All cells are blank, and no paper fills them; there is no preset.",),
        assumptions=("The sizes are the paper's.",),
        reference="Askell et al., A General Language Assistant as a Laboratory for Alignment, "
        "2021. arXiv:2112.00861",
    ),
    SurveyRow(
        number=12,
        name="Gopher (280B)",
        year=2021,
        listed=Cells(
            norm="RMSNorm", block="Serial", pre_norm=True, position="Relative", activation="ReLU"
        ),
        release="GPT-2 with RMSNorm and the relative attention of Transformer-XL.",
        preset="gopher-280b",
        assumptions=(
            "No weights were released; the sizes are the paper's.",
            "The paper does not name the activation; ReLU is the lecture's, GPT-2 has GeLU.",
            "Whether u and v are shared by the layers, biases and tying are not published: here "
            "every layer has its own u, v and W, products have no biases, and the head is tied. "
            "The published total needs a W in every layer.",
        ),
        reference="Rae et al., Scaling Language Models: Methods, Analysis & Insights from "
        "Training Gopher, 2021. arXiv:2112.11446",
        relative=TransformerXL(),
    ),
)
