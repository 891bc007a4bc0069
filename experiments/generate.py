"""Continue a prompt with a trained checkpoint.

python -m experiments.generate --checkpoint runs/pretrain-1 --prompt "def main("
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command_line import parse, readable_errors
from experiments.resuming import sha256
from jaxformer import data
from jaxformer.config import TransformerConfig, from_json
from jaxformer.generation import Sample, Sampler, generate
from jaxformer.layers import Transformer
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.progress import printable


@dataclass(frozen=True, kw_only=True)
class Generate:
    """What to continue, and how.

    Attributes:
        checkpoint: Output folder of a pretraining run.
        prompt: The text to continue; empty starts a document.
        step: Which checkpoint of the run; None is the newest.
        max_new_tokens: Tokens to add.
        sampler: How each token is chosen.
        seed: Of the random choices.
    """

    checkpoint: Path
    prompt: str = ""
    step: int | None = None
    max_new_tokens: int = 160
    sampler: Sampler = Sample(temperature=0.8, top_p=0.95)
    seed: int = 0


def main(run: Generate) -> str:
    """Print the prompt and its continuation; returns them."""
    config, params, tokenizer = load(run.checkpoint, run.step)
    prompt = np.asarray([tokenizer.end_of_text, *tokenizer.encode(run.prompt)], np.int32)
    tokens = generate(
        config,
        params,
        jnp.asarray(prompt),
        max_new_tokens=run.max_new_tokens,
        vocab_size=tokenizer.vocab_size,
        sampler=run.sampler,
        key=jax.random.key(run.seed),
    )
    text = tokenizer.decode(np.asarray(tokens)[1:])
    print(printable(text, sys.stdout))
    return text


def load(folder: Path, step: int | None) -> tuple[TransformerConfig, dict, data.Tokenizer]:
    """Configuration, parameters and tokenizer of a pretraining run."""
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"{folder} has no checkpoints; give the output folder of a run.")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        saved = checkpoints.describe(step)
        config = from_json(TransformerConfig, json.dumps(saved["config"]))
        model = Transformer(config)
        blank = jnp.zeros((1, 2), jnp.int32)
        shapes = jax.eval_shape(lambda key: model.init(key, blank), jax.random.key(0))
        state = checkpoints.restore(step, shapes, partial=True)
    tokenizer = data.load_tokenizer(folder)
    if sha256(tokenizer.to_json().encode()) != saved["tokenizer"]:
        raise ValueError(
            f"The tokenizer in {folder} is not the one the checkpoint was trained with."
        )
    return config, state["params"], tokenizer


RUNS = {"default": Generate(checkpoint=Path("runs/pretrain-1"))}

if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__))
