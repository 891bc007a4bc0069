import pytest

from jaxformer.parallel.compiled import collectives_of
from jaxformer.parallel.traffic import Collective

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
PROGRAM = """HloModule jit_update, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%inner (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %there = bf16[4,8]{1,0} collective-permute(%v), channel_id=1, source_target_pairs=PAIRS
  ROOT %t = (s32[], bf16[4,8]) tuple(%i, %there)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %whole = f32[16,2]{1,0} all-gather(%g), channel_id=1, replica_groups=GROUPS, dimensions={0}
  %w = (s32[], bf16[4,8]) while(%start), condition=%less, body=%inner, LOOP
  ROOT %t = (s32[], f32[4]) tuple(%i, %v)
}

%less (p: (s32[], f32[4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[4], b: s32[3]) -> (f32[4]) {
  %both = (f32[4]{0}, /*index=1*/s32[3]{0}) all-reduce(%a, %b), channel_id=2, \
replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add, metadata={op_name="sum of both"}
  %share = f32[2]{0} reduce-scatter(%c), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %w = (s32[], f32[4]) while(%start), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = (f32[4]) tuple(%x)
}
"""
LOOP = 'backend_config={"known_trip_count":{"n":"5"}}'
ALONG_DATA = "{{0,4},{1,5},{2,6},{3,7}}"
TENSOR_RING = "{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"


def read(groups=ALONG_DATA, pairs=TENSOR_RING, loop=LOOP):
    text = PROGRAM.replace("GROUPS", groups).replace("PAIRS", pairs).replace("LOOP", loop)
    return collectives_of(text, SIZES)


def test_kinds_axes_times_and_bytes():
    """Loops inside loops multiply; tuples add up; a scattered array is as large as all shares."""
    assert read() == (
        Collective("all_reduce", "fsdp", 2, "sum of both", 1, 4 * 4 + 3 * 4),
        Collective("reduce_scatter", "data+fsdp+tensor", 8, "", 1, 8 * 2 * 4),
        Collective("all_gather", "data", 2, "", 3, 3 * 16 * 2 * 4),
        Collective("permute", "tensor", 2, "", 15, 15 * 4 * 8 * 2),
    )


@pytest.mark.parametrize(
    "groups, axis",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("{}", "data+fsdp+tensor"),
        ("[2,4]<=[8]", "fsdp+tensor"),
        ("[2,4]<=[4,2]T(1,0)", "data+fsdp"),
        ("[4,2]<=[2,4]T(1,0)", "data"),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", "fsdp"),
        ("mesh['a'=2,'b'=4] {'b'}", "fsdp+tensor"),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([4,2]T(1,0)) {'a'}", "tensor"),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([4,2]T(1,0)) {'a','c'}", "fsdp+tensor"),
    ],
)
def test_every_way_of_writing_groups(groups, axis):
    assert read(groups=groups)[2].axis == axis


def test_a_ring_of_four():
    sizes = {"context": 4, "tensor": 2}
    pairs = "{{0,6},{2,0},{4,2},{6,4},{1,7},{3,1},{5,3},{7,5}}"
    text = PROGRAM.replace("GROUPS", "{{0,1},{2,3},{4,5},{6,7}}").replace("PAIRS", pairs)
    text = text.replace("{{0,2},{1,3},{4,6},{5,7}}", "{}").replace("LOOP", LOOP)
    ring = collectives_of(text, sizes)[3]
    assert (ring.axis, ring.devices, ring.times) == ("context", 4, 15)


def test_groups_of_one_say_nothing():
    assert len(read(groups="{{0},{1},{2},{3},{4},{5},{6},{7}}")) == 3


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="not known how often or what this says: .*permute"):
        read(loop="metadata={}")
    with pytest.raises(ValueError, match=r"Devices \[0, 3\] are no whole axes"):
        read(groups="{{0,3},{1,2},{4,7},{5,6}}")
    with pytest.raises(ValueError, match="not known which devices this is among"):
        read(groups="mesh['a'=8] {'a':(1)4}")


def test_what_only_some_branch_says_is_refused():
    text = PROGRAM.replace("GROUPS", ALONG_DATA).replace("PAIRS", TENSOR_RING)
    branch = "conditional(%i), branch_computations={%less, %inner}"
    text = text.replace("while(%start), condition=%less, body=%inner, LOOP", branch)
    with pytest.raises(ValueError, match="not known how often"):
        collectives_of(text, SIZES)
