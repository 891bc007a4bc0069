"""What is read from the text of compiled programs: as XLA writes it for TPUs, GPUs and CPUs."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer.parallel.plan import Workload
from jaxformer.training import aot_compile as compiled
from jaxformer.training.aot_compile import HloModule, compile_update
from tests.compiled_steps import train_step_on
from tests.small_models import model

PROGRAM = """HloModule jit_update, is_scheduled=true

%on_sparse_cores (p: bf16[4,8]) -> bf16[16,8] {
  ROOT %all-gather.1 = bf16[16,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}
}, execution_thread="sparsecore"

%start (p: bf16[2,4]) -> bf16[8,4] {
  %all-gather.2 = bf16[8,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}
  ROOT %s = (bf16[8,4]) custom-call(%all-gather.2), custom_call_target="AsyncCollectiveStart"
}

%done (p: bf16[2,4]) -> bf16[8,4] {
  %all-gather.3 = bf16[8,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}
  ROOT %s = bf16[8,4] custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%scattered (p: f32[32]) -> f32[8] {
  %all-reduce.1 = f32[32]{0} all-reduce(%p), replica_groups={{0,1,2,3}}
  ROOT %own = f32[8]{0} dynamic-slice(%all-reduce.1, %i)
}

%inner (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %turn = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%v)
  %gmm.2 = bf16[4,8] custom-call(%turn), custom_call_target="tpu_custom_call", metadata={}
}

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %g = ((bf16[4,8], token[]), bf16[16,8]) call-start(%v), to_apply=%on_sparse_cores
  %f = f32[8]{0} fusion(%c), kind=kLoop, calls=%scattered, backend_config={"estimated_cycles":"10"}
  %a = (bf16[2,4], bf16[8,4]) fusion(%c), kind=kCustom, calls=%start
  %z = bf16[8,4]{1,0} fusion(%a), kind=kCustom, calls=%done
  %w = (s32[], bf16[4,8]) while(%t), condition=%less, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
}

%less (p: (s32[], bf16[4,8])) -> pred[] {
  %n = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[4], b: s32[3]) -> (f32[4]) {
  %both = (f32[4]{0}, /*index=1*/s32[3]{0}) all-reduce(%a, %b), to_apply=%add
  %s = ((f32[32]{0}), (f32[8]{0})) reduce-scatter-start(%a), dimensions={0}
  %alone = f32[4]{0} all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add
  %each = f32[4]{0} all-gather(%a), replica_groups=[8,1]<=[8], dimensions={0}
  %m = f32[4]{0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  %w = (s32[], bf16[4,8]) while(%t), condition=%less, body=%body
  ROOT %r = f32[4]{0} add(%x, %x), backend_config={"estimated_cycles":"7"}
}
"""


def test_messages_are_counted_as_often_as_they_come_and_by_whether_they_are_waited_for():
    waiting, meanwhile = HloModule(PROGRAM).collective_bytes()
    assert waiting == {"all-reduce": 4 * 4 + 3 * 4 + 3 * 32 * 4}
    assert meanwhile == {
        "all-gather": 3 * (16 * 8 * 2 + 8 * 4 * 2),
        "reduce-scatter": 8 * 4,
        "collective-permute": 3 * 5 * 4 * 8 * 2,
    }


def test_cycles_in_loops_and_kernels_by_name():
    program = HloModule(PROGRAM)
    assert program.estimated_cycles() == 3 * 10 + 7
    assert program.count_custom_kernels() == {"gmm": 1, "cudnn$fmhaSoftmax": 1}


def test_a_program_of_xla_is_read():
    """A kernel gathered in each turn of a loop, and one sum; on a CPU all is waited for."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("fsdp",))

    def inside(w, x):
        def turn(x, w):
            return x @ jax.lax.all_gather(w, "fsdp", tiled=True), None

        return jax.lax.psum(jnp.sum(jax.lax.scan(turn, x, w)[0]), "fsdp")

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P())
    text = jax.jit(mapped).lower(jnp.ones((6, 8, 8)), jnp.ones((4, 8))).compile().as_text()
    assert HloModule(text).collective_bytes() == (
        {"all-gather": 6 * 8 * 8 * 4, "all-reduce": 4},
        {},
    )


@pytest.mark.slow
def test_an_update_is_the_one_that_is_trained():
    config, sizes = model("llama-2-7b"), dict(data=2, fsdp=2)
    work = Workload(batch_size=8, length=16, remat="full", dtype="float32")
    made = compile_update(config, sizes, tuple(jax.devices()[:4]), work)
    options = dict(rows=8, length=16, dtype=jnp.float32, remat="full")
    trained = HloModule(train_step_on(config, sizes, optax.sgd(1.0), **options).compiled.as_text())
    assert (
        made.sync_collective_bytes["all-gather"] == trained.collective_bytes()[0]["all-gather"] > 0
    )
    assert made.peak_bytes > 0 and made.custom_kernels == {} and made.estimated_seconds is None


def test_a_slice_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="Cannot compile for 'v5p:nonsense'.*pip install"):
        compiled.topology_devices("v5p:nonsense")
