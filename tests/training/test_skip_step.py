"""Which updates are left out, by themselves and inside a step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import Transformer, zoo
from jaxformer.data import Batch
from jaxformer.parallel import MeshConfig, make_mesh, parameter_metadata, put_batch
from jaxformer.training import train_step as step
from jaxformer.training.optimizers import OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from jaxformer.training.skip_step import SkipStepConfig, init_skip_state, should_apply_update

RULE = SkipStepConfig(max_norm_ratio=4.0, warmup_updates=3, max_consecutive_skips=2)
JUDGE = jax.jit(should_apply_update, static_argnums=0)


def judged(norms, losses=None, rule=RULE):
    """Whether each update was made, and the last guard."""
    guard, made = init_skip_state(), []
    for i, norm in enumerate(norms):
        loss = 1.0 if losses is None else losses[i]
        yes, guard = JUDGE(rule, guard, jnp.float32(loss), jnp.float32(norm))
        made.append(bool(yes))
    return made, guard


def test_gradients_that_are_not_finite_are_left_out_from_the_first_on():
    made, guard = judged([math.nan, 1.0, math.inf, 1.0], rule=SkipStepConfig(max_norm_ratio=None))
    assert made == [False, True, False, True]
    assert (int(guard.num_updates), int(guard.num_skipped), int(guard.num_consecutive_skips)) == (
        2,
        2,
        0,
    )
    made, guard = judged([1.0, 1.0], losses=[1.0, math.nan])
    assert made == [True, False] and int(guard.num_consecutive_skips) == 1


def test_a_spike_is_left_out_once_there_is_a_usual_norm_and_does_not_change_it():
    made, guard = judged([1.0, 100.0, 1.0, 137.0, 136.0, 1.0])
    assert made == [True, True, True, False, True, True]  # four times the mean of 1, 100, 1 is 136
    np.testing.assert_allclose(guard.norm_ema, np.mean([1, 100, 1, 136, 1]), rtol=1e-6)
    assert judged([1.0] * 5 + [1e9], rule=SkipStepConfig(max_norm_ratio=None))[0][-1]


def test_old_norms_are_forgotten():
    _, guard = judged([1.0] * 100 + [2.0] * 500)
    assert 1.98 < float(guard.norm_ema) < 2.0


def test_batches_in_which_nothing_counts_do_not_lower_what_is_usual():
    made, guard = judged([0.0] * 5 + [12.0] * 4 + [49.0])
    assert made == [True] * 9 + [False]
    assert (int(guard.num_updates), float(guard.norm_ema)) == (4, 12.0)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_norm_ratio": 1.0}, "max_norm_ratio must be above 1; got 1.0"),
        (
            {"max_norm_ratio": math.nan},
            "max_norm_ratio must be a finite float32 number or None; got nan",
        ),
        ({"warmup_updates": 0}, "warmup_updates must be positive; got 0"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips must be positive; got 0"),
    ],
    ids=["ratio 1", "ratio nan", "warmup 0", "skips 0"],
)
def test_an_impossible_rule_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SkipStepConfig(**fields)


@pytest.mark.slow
def test_an_update_left_out_leaves_parameters_and_optimizer_as_they_were():
    """On a mesh, whose devices must all judge alike: one device's gradient is not finite."""
    config = zoo.get("llama-2-70b").tiny()
    mesh, model = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), Transformer(config)
    rates = OptimizerConfig(schedule=Constant(peak=1e-3))
    optimizer = make_optimizer(rates, 10, parameter_metadata(config))
    state = step.init_train_state(model, optimizer, jax.random.key(0), mesh)
    table = state.params["embedding"]["tokens"]["embedding"]
    table = jax.jit(lambda x: x.at[7, 0].set(jnp.inf), out_shardings=table.sharding)(table)
    bad = jax.tree.map(jnp.copy, state)
    bad.params["embedding"]["tokens"]["embedding"] = table
    tokens = np.full((8, 4), 3, np.int32)
    ones = np.ones((8, 4), np.int32)
    fine = Batch(tokens, tokens, np.tile(np.arange(4, dtype=np.int32), (8, 1)), ones, ones > 0)
    poisoned = fine._replace(tokens=np.where(np.arange(8)[:, None] == 5, 7, tokens))
    update = step.make_train_step(model, optimizer, mesh)
    before = jax.device_get(bad)
    after, metrics = update(bad, put_batch(poisoned, mesh, 8))
    assert not np.isfinite(metrics.loss) and int(metrics.num_consecutive_skips) == 1
    result = jax.device_get((after.params, after.opt_state))
    jax.tree.map(np.testing.assert_array_equal, result, (before.params, before.opt_state))
    assert int(after.step) == 1 and int(after.skip_state.num_skipped) == 1
    after, metrics = update(after, put_batch(fine, mesh, 8))
    assert (
        np.isfinite(metrics.loss)
        and int(metrics.num_consecutive_skips) == 0
        and int(after.step) == 2
    )
    kernel, old = (
        jax.device_get(x.params["decoder"]["layers"]["layer_0"]["feed_forward"]["up"]["kernel"])
        for x in (after, before)
    )
    assert np.all(np.isfinite(kernel)) and np.any(kernel != old)
