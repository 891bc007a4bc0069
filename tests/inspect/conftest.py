from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_pretrained
from jaxformer.config import EncoderDecoder
from tests.interop.golden_files import read_golden, write_folder
from tests.small_models import BASE, random_params

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """By name: what transformers says, our configuration and parameters, and the inputs."""
    references = {}

    def load(name):
        if name not in references:
            golden = read_golden(name)
            folder = write_folder(golden, tmp_path_factory.mktemp("golden") / name)
            example = golden.examples[0]
            inputs = {} if example.source is None else {"source": jnp.asarray(example.source)}
            with np.load(GOLDEN / f"{name}.npz") as file:
                outputs = {part: file[part] for part in file.files} | {"logits": example.logits}
            config, params = load_pretrained(folder)
            references[name] = outputs, config, params, jnp.asarray(example.tokens), inputs
        return references[name]

    return load


@pytest.fixture
def build():
    """A configuration changed from `BASE`, random parameters, tokens and inputs."""

    def make(length=7, attention=None, **fields):
        changed = attention if not isinstance(attention, dict) else None
        changed = changed or replace(BASE.attention, **(attention or {}))
        config = replace(BASE, attention=changed, **fields)
        rng = np.random.default_rng(3)
        tokens = jnp.asarray(rng.integers(0, config.vocab_size, (2, length)), jnp.int32)
        inputs = {}
        if isinstance(config.topology, EncoderDecoder):
            inputs["source"] = jnp.asarray(rng.integers(0, config.vocab_size, (2, 5)), jnp.int32)
        return config, random_params(config), tokens, inputs

    return make
