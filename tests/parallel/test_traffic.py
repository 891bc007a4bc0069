import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxformer.parallel.traffic import Collective, traffic
from jaxformer.training.optimizers import OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from tests.models import LLAMA, model
from tests.steps import LENGTH, ROWS, foretold, step_on, totals

OPTIMIZER = make_optimizer(OptimizerConfig(schedule=Constant(peak=1e-3)), 1)


SAID = re.compile(
    r'"stablehlo\.(all_gather|reduce_scatter|all_reduce|collective_permute|all_to_all)"'
    r".*?-> tensor<(?:[\dx]*x)?(\w+)>",
    re.S,
)


@pytest.mark.parametrize(
    "name, sizes, narrow",
    [
        ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), ["all_gather", "all_to_all"]),
        ("llama-2-70b", dict(fsdp=2, context=2, tensor=2), ["all_gather", "collective_permute"]),
        ("llama-2-70b", dict(data=2, tensor=4), []),
    ],
    ids=["experts", "context", "tensor"],
)
@pytest.mark.slow(but=["experts"])
def test_kernels_keys_and_tokens_travel_as_bfloat16_and_sums_as_float32(name, sizes, narrow):
    """From the program before a CPU, which has no bfloat16, widens what it says."""
    step = step_on(model(name), sizes, OPTIMIZER, dtype=jnp.bfloat16)
    said = SAID.findall(step.lowered.as_text())
    kinds = {kind for kind, dtype in said if dtype == "bf16"}
    assert kinds == {*narrow, "all_reduce"}
    # Rows of the embedding: of the devices only one has a row that is not zero.
    assert sum(dtype == "bf16" for kind, dtype in said if kind == "all_reduce") == 1
    assert not any(dtype == "bf16" for kind, dtype in said if kind == "reduce_scatter")
    half, whole = (
        totals(foretold(model(name), sizes, dtype=dtype), "bytes")
        for dtype in ("bfloat16", "float32")
    )
    assert half.keys() == whole.keys()
    assert (half != whole) and all(half[place] <= whole[place] for place in half)


def by_purpose(collectives):
    return {(one.kind, one.axis, one.what): (one.times, one.bytes) for one in collectives}


def test_the_docstrings_equations_worked_by_hand():
    """LLAMA on fsdp 2 x context 2 x tensor 2, in two parts: 32 tokens a device and part."""
    L, D, N, K, H, F, V, A, t, w = 2, 64, 4, 2, 16, 88, 128, 2, 16, 2
    found = by_purpose(
        foretold(
            LLAMA, dict(fsdp=2, context=2, tensor=2), accumulation=A, dtype="bfloat16", remat="dots"
        )
    )
    kernels = L * (D * (N + 2 * K) * H + N * H * D + 3 * D * F) // 2
    ends = 2 * V * D // 2
    assert found == {
        ("all_gather", "fsdp", "kernels of layers"): (A * 2 * L * 7, A * 2 * kernels * w),
        ("all_gather", "fsdp", "embedding and head"): (2, ends * w),
        ("reduce_scatter", "fsdp", "gradients of kernels of layers"): (A * L * 7, A * kernels * 4),
        ("reduce_scatter", "fsdp", "gradients of embedding and head"): (A * 2, A * ends * 4),
        ("all_reduce", "tensor", "sums of layers"): (A * L * 4, A * L * 4 * t * D * 4),
        ("all_reduce", "tensor", "rows of the embedding"): (A, A * t * D * w),
        ("all_reduce", "tensor", "gradient of the head's input"): (A, A * t * D * 4),
        ("all_reduce", "tensor", "loss of each token"): (A * 3, A * 3 * t * 4),
        ("all_reduce", "fsdp+tensor", "norm of the gradient"): (1, 4),
        ("all_reduce", "fsdp+context", "loss"): (A, A * 4),
        ("all_reduce", "fsdp+context", "number of tokens"): (1, 4),
        ("all_reduce", "context", "gradients of copies"): (9, (kernels + ends) // 2 * 4),
        ("all_reduce", "fsdp+context", "gradients of copies"): (3, (2 * L + 1) * D * 4),
        ("all_gather", "context", "positions and segments"): (A * 2, A * 2 * 2 * LENGTH * 4),
        ("permute", "context", "keys and values"): (A * L * 2 * 3, A * L * 2 * 3 * t * H * w),
    }


@pytest.mark.parametrize(
    "block, placement, sums, again",
    [
        ("serial", "pre", 4, 1),
        ("serial", "post", 4, 2),
        ("parallel", "pre", 2, 0),
        ("parallel", "sandwich", 4, 2),
        ("parallel_shared_norm", "pre", 2, 0),
        ("parallel_shared_norm", "sandwich", 2, 1),
    ],
)
def test_parallel_branches_are_added_up_once(block, placement, sums, again):
    """Forwards and backwards, unless each is normalised after; "full" repeats what is needed."""
    config = replace(LLAMA, block=block, placement=placement)
    for remat, more in (("none", 0), ("dots", 0), ("full", again)):
        found = by_purpose(foretold(config, dict(tensor=2), remat=remat))
        times, size = found["all_reduce", "tensor", "sums of layers"]
        assert times == 2 * (sums + more) and size == times * ROWS * LENGTH * 64 * 4


def test_what_has_no_other_side_is_not_said():
    assert foretold(LLAMA, dict(data=1)) == ()
    assert {one.axis for one in foretold(LLAMA, dict(data=4))} == {"data"}


def test_what_a_device_sends():
    def sent(kind, devices=4):
        return Collective(kind, "data", devices, "", 1, 1000).sent

    assert sent("all_reduce") == 1500 and sent("permute") == 1000
    assert sent("all_gather") == sent("reduce_scatter") == sent("all_to_all") == 750
    assert sent("all_gather", 2) == 500


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by tensor 3"):
        foretold(LLAMA, dict(tensor=3))
    with pytest.raises(ValueError, match=r"source_length|length 3 must be a multiple of 2 x cont"):
        traffic(model("t5-small"), dict(context=2), batch_size=8, length=16, source_length=3)
