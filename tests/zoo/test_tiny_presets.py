"""Every preset, made tiny: forward, one train step, generation.

By default one of each topology is trained and generates; the mark `slow` takes one of each kind of
positions, `exhaustive` all.
"""

from dataclasses import fields, is_dataclass, replace

import jax
import numpy as np
import pytest

from jaxformer import Transformer, costs, generate, zoo
from jaxformer import config as c
from jaxformer import functional as F
from tests.small_models import random_params

TEXT = np.int32([[5, 93, 17, 61, 2, 29, 44]])
SOURCE = np.int32([[8, 71, 30, 12, 99]])
QUICK = {"xla_cpu_use_fusion_emitters": False}  # compiles twice as fast, runs more slowly
QUICK = QUICK if jax.__version_info__ < (0, 11) else {}  # where there is the option


def design(choice):
    """A configuration without its numbers, nor what merely multiplies frequencies by numbers."""
    if isinstance(choice, c.LinearScaling | c.Llama3Scaling):
        return repr(None)
    if isinstance(choice, tuple):
        return tuple(map(design, choice))
    if is_dataclass(choice):
        return type(choice), *(design(getattr(choice, field.name)) for field in fields(choice))
    return None if type(choice) in (int, float) else repr(choice)


EVERY = {name: zoo.get(name).tiny() for name in zoo.names()}
EVERY |= {f"row-{row.number}": row.as_listed() for row in zoo.survey()}


def firsts(kind):
    """The first of each kind."""
    return {kind(config): name for name, config in reversed(EVERY.items())}


DESIGNS = firsts(design)


def prepare(config):
    """One whole pattern of layers, since more only take longer; its parameters and its source."""
    first, period, *_ = config.segments(next(iter(config.stacks)))
    config = replace(config, num_layers=first + period)
    reads = isinstance(config.topology, c.EncoderDecoder)
    source = {"source": SOURCE} if reads else {}
    return config, random_params(config), source


def train(config):
    """The loss before and after a small step against the gradient; all on the way is finite."""
    config, params, source = prepare(config)
    assert sum(x.size for x in jax.tree.leaves(params)) == costs.num_parameters(config)
    model = Transformer(config, scan=False)

    def loss(params):
        logits = model.apply({"params": params}, TEXT[:, :-1], **source)
        return F.cross_entropy(logits, TEXT[:, 1:]), logits

    slope = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    (before, logits), gradient = slope(params)
    masked = list(config.head.masked_ids)
    assert logits.shape == (1, 6, config.vocab_size)
    assert np.isfinite(np.delete(logits, masked, axis=-1)).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    size = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
    assert size > 0
    moved = jax.tree.map(
        lambda x, dx: x - np.float32(0.002 / size) * np.asarray(dx), params, gradient
    )
    (after, _), _ = slope(moved)
    return before, after


def continue_text(config):
    """Two tokens behind the prompt, which stays."""
    config, params, source = prepare(config)
    out = generate(config, params, TEXT[:, :4], max_new_tokens=2, **source)
    assert out.shape == (1, 6) and (out[:, :4] == TEXT[:, :4]).all()
    return set(np.asarray(out[0, 4:]).tolist())


def attending(config):
    """What generation depends on beside the forward pass: its kinds of positions."""
    positions = frozenset(type(layer.positions) for layer in config.layers)
    return type(config.topology), type(config.embedding.positions), positions


def every():
    by_default = firsts(lambda config: type(config.topology)).values()
    slow = firsts(attending).values()
    for name in EVERY:
        mark = pytest.mark.slow if name in slow else pytest.mark.exhaustive
        yield pytest.param(name, marks=() if name in by_default else mark, id=name)


@pytest.mark.parametrize("name", [*every()])
@pytest.mark.slow(but=["gpt-1"])
def test_trains_and_generates(name):
    before, after = train(EVERY[name])
    assert after < before
    assert not continue_text(EVERY[name]) & set(EVERY[name].head.masked_ids)
