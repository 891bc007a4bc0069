"""Kernel times by module, on a program whose executions are counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxformer.training.profiling import (
    UNNAMED,
    KernelTime,
    Profile,
    module_and_pass,
    profile,
    profile_tables,
)


@pytest.mark.parametrize(
    "op_name, module, pass_name",
    [
        ("jit(f)/jvp(Transformer)/head/dot_general", "Transformer/head", "forward"),
        (
            "jit(f)/transpose(jvp(Transformer))/decoder/decoder.run_group/while/body/closed_call"
            "/layers/layers/checkpoint/layer_0/layer_0.serial/attention/query/dot_general",
            "Transformer/decoder/layers/layer_*/attention/query",
            "backward",
        ),
        (
            "jit(f)/transpose(jvp(Transformer))/checkpoint/rematted_computation/layer_1/mul",
            "Transformer/layer_*",
            "recomputation",
        ),
        ("jit(f)/optimizer/jit(_where)/select_n", "optimizer", "other"),
        ("jit(f)/jvp()/exp", UNNAMED, "forward"),
        ("", UNNAMED, "other"),
    ],
)
def test_module_and_pass_of_an_operation(op_name, module, pass_name):
    assert module_and_pass(op_name) == (module, pass_name)


def other_step():
    """An earlier program of the same name, whose kernels have the same names."""

    @jax.jit
    def step(x):
        with jax.named_scope("other"):
            y = jax.lax.fori_loop(0, 5, lambda _, y: x @ y, x)
            return y @ x.T

    return step, step(jnp.ones((256, 256))).block_until_ready()


@pytest.mark.slow
def test_kernels_are_counted_and_summed_by_module(tmp_path):
    """Five products of one kind in a loop and one of another, in each of three steps."""

    other = other_step()

    @jax.jit
    def step(x):
        with jax.named_scope("loop"):
            y = jax.lax.fori_loop(0, 5, lambda _, y: x @ y, x)
        with jax.named_scope("last"):
            return y @ x.T

    x = step(jnp.full((256, 256), 1 / 256))
    x.block_until_ready()
    with profile(tmp_path) as profiles:
        for _ in range(3):
            x = step(x)
        x.block_until_ready()
    (one,) = profiles
    longest = {k.module: k for k in reversed(one.kernels)}
    assert longest["loop"].num_executions == 15 and longest["last"].num_executions == 3
    assert longest["last"].seconds < longest["loop"].seconds < 8 * one.seconds
    assert list(tmp_path.rglob("*.trace.json.gz")) and other


def test_few_rows_end_in_the_sum_of_the_others():
    times = [
        ("a", "m", "forward", 3.0, 1),
        ("b", "n", "backward", 2.0, 4),
        ("c", "n", "other", 1.5, 2),
    ]
    tables = profile_tables(Profile(8.0, tuple(KernelTime(*x) for x in times)), 2, max_rows=1)
    assert "A step took 4,000.0 ms; its kernels 3,250.0 ms on each device" in tables
    lines = (line for line in tables.splitlines() if "%" in line)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows == [
        ["n", "", "", "1,000.00", "750.00", "1,750.00", "53.8%"],
        ["1 more", "", "", "", "", "1,500.00", "46.2%"],
        ["a", "0.5", "1,500.00", "46.2%"],
        ["2 more", "", "1,750.00", "53.8%"],
    ]


@pytest.mark.slow
def test_a_block_that_raises_ends_its_trace(tmp_path):
    with pytest.raises(ZeroDivisionError), profile(tmp_path):
        raise ZeroDivisionError
    with profile(tmp_path) as profiles:
        pass
    assert profiles[0].kernels == ()
