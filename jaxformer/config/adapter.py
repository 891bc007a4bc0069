"""Low-rank adapters of linear maps, for fine-tuning a part of a model."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.checks import NOT_EMPTY, Checked, Positive, Rate, Size


@dataclass(frozen=True, kw_only=True)
class LoRA(Checked):
    """Low-rank adapters: each targeted kernel W gets a trained update of rank r, and stays frozen.

        y = x W + scale * (x A) B;    scale = alpha / rank, or alpha / sqrt(rank) with rslora

    A is drawn as in PEFT, uniformly within ``1 / sqrt(inputs)`` of 0, and B begins at 0, so that
    training begins with the model as it is.

    Attributes:
        rank: Width r between A and B.
        alpha: Numerator of the scale.
        targets: Names of the linear maps, as in the parameters' paths: "query", "key", "value",
            "out", "gate", "up", "down", "router" and others. "experts" are the maps of all experts,
            "layer_embedding" the maps of `LayerEmbedding`, "layer_table" its table,
            "ngram_embedding" the maps of `NgramEmbedding`, "embedding" the token table and "head"
            the LM head. "all-linear" is every linear map of attention, mixers, dense feed-forwards,
            layer and n-gram embeddings whose inputs and outputs are at least as many as the rank.
        rslora: Whether the scale follows rsLoRA.
        dora: Whether the columns of the adapted kernel have trained lengths (DoRA). Not for
            "experts", "embedding", "positions" and "head".
        dropout: Dropout rate of an adapter's inputs; "embedding" and "head" have none.
        trained: Parameters that are trained as well, by a part of their path, such as "final_norm";
            PEFT's modules_to_save.
        base_dtype: Dtype in which training keeps the frozen parameters.

    Example:
        >>> from dataclasses import replace
        >>> from jaxformer import config as c
        >>> from jaxformer import costs, zoo
        >>> config = zoo.get("llama-2-7b").tiny()
        >>> adapted = replace(config, adapter=c.LoRA(rank=2, targets=("query", "value")))
        >>> costs.num_parameters(adapted) - costs.num_parameters(config)  # 2 * 2 * 2 * (64 + 64)
        1024

    References:
        Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. arXiv:2106.09685
        Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023.
        arXiv:2312.03732
        Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024. arXiv:2402.09353
    """

    rank: Size = 16
    alpha: Positive = 32.0
    targets: Annotated[tuple[str, ...] | Literal["all-linear"], NOT_EMPTY] = "all-linear"
    rslora: bool = False
    dora: bool = False
    dropout: Rate = 0.0
    trained: tuple[str, ...] = ()
    base_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        super().__post_init__()
        wholes = {"experts", "embedding", "positions", "head"} & set(self.targets)
        if self.dora and self.targets != "all-linear" and wholes:
            raise ValueError(f"dora is not supported for the targets {sorted(wholes)}.")

    def fits(self, inputs: int, outputs: int) -> bool:
        """Whether a target may have these sizes; "all-linear" leaves out the other targets."""
        return self.targets != "all-linear" or self.rank <= min(inputs, outputs)

    @property
    def scale(self) -> float:
        """Factor of the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
