"""Configuration and named runs of the translation example."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxformer import data
from jaxformer.checks import NOT_EMPTY, Size
from jaxformer.config import (
    MLP,
    Embedding,
    EncoderDecoder,
    FanAverage,
    Initialisation,
    LayerNorm,
    LMHead,
    MultiHead,
    Normal,
    Sinusoid,
    TransformerConfig,
)
from jaxformer.generation import Beam
from jaxformer.run.run_config import RunConfig
from jaxformer.training.gradient import Objective
from jaxformer.training.optimizers import AdamW, OptimizerConfig
from jaxformer.training.schedules import InverseSquareRoot


@dataclass(frozen=True, kw_only=True)
class Translate(RunConfig):
    """Options of the translation run: model, steps and decoding.

    Attributes:
        source_lengths: Padded lengths of the sources in tokens, increasing. A batch has the
            smallest that fits its longest source; the train step is compiled for each.
        group: Number of batches that are sorted by length together.
        beam: Beam search of the final evaluation.
        average: Number of newest checkpoints whose parameters are averaged for the final
            evaluation.
        held_out_texts: Held-out texts of the final evaluation, cycling through the forms.
        evaluate_texts: Held-out texts of an evaluation during training, decoded greedily.
    """

    FIRST_PAGE: ClassVar[tuple[str, ...]] = (
        *(
            "steps",
            "batch_size",
            "learning_rate",
            "beam.num_beams",
            "average",
            "held_out_texts",
            "devices",
        ),
        *("output", "resume"),
    )

    command = "python -m experiments.translate"

    tokenizer: data.TokenizerConfig = data.Characters()
    source_lengths: Annotated[tuple[Size, ...], NOT_EMPTY] = (16, 24, 56)
    batch_size: Size = 64
    group: Size = 16
    steps: Size = 3600
    objective: Objective = Objective(label_smoothing=0.1)
    beam: Beam = Beam(num_beams=4, length_penalty=0.6)
    average: Size = 3
    held_out_texts: Size = 1900
    evaluate_every: Size = 500
    evaluate_texts: Size = 190
    keep: Size = 5

    def __post_init__(self):
        super().__post_init__()
        if self.average > self.keep:
            raise ValueError(
                f"average={self.average} needs as many checkpoints, but only keep={self.keep} are "
                "kept."
            )
        if not isinstance(self.model.topology, EncoderDecoder):
            raise ValueError(
                f"Translation needs the topology EncoderDecoder; got {self.model.topology}."
            )


def first_transformer(
    *, model_dim: int, num_layers: int, num_heads: int, vocab_size: int
) -> TransformerConfig:
    """A small transformer of 2017 without dropout, since no text is repeated.

    Post-norm, sinusoids, scaled embeddings, ReLU, biases in the feed-forward only, one embedding
    for source, target and logits.

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 3. arXiv:1706.03762
    """
    return TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            positions=(None,),
        ),
        feed_forward=(MLP(hidden_dim=4 * model_dim, activation="relu", bias=True),),
        topology=EncoderDecoder(num_encoder_layers=num_layers),
        norm=LayerNorm(),
        norm_placement="post",
        final_norm=False,
        embedding=Embedding(scale=model_dim**0.5, positions=Sinusoid()),
        head=LMHead(tied=True),
        initialisation=Initialisation(
            embedding=Normal(std=model_dim**-0.5), projection=FanAverage(), residual="plain"
        ),
    )


def adam(*, peak: float, warmup_steps: int) -> OptimizerConfig:
    """Adam with the 2017 schedule and gradient clipping."""
    return OptimizerConfig(
        schedule=InverseSquareRoot(peak=peak, warmup_steps=warmup_steps),
        optimizer=AdamW(b2=0.98, eps=1e-9, weight_decay=0.0),
    )


RUNS = {
    "default": Translate(
        model=first_transformer(model_dim=128, num_layers=2, num_heads=4, vocab_size=120),
        optimizer=adam(peak=1e-3, warmup_steps=200),
    ),
    "tiny": Translate(
        model=first_transformer(model_dim=32, num_layers=1, num_heads=2, vocab_size=120),
        source_lengths=(24, 56),
        batch_size=16,
        group=4,
        steps=20,
        held_out_texts=38,
        evaluate_texts=19,
        evaluate_every=10,
        save_every=10,
        average=2,
        optimizer=adam(peak=1e-3, warmup_steps=4),
    ),
}
