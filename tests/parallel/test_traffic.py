import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jaxformer import Transformer, zoo
from jaxformer import functional as F
from jaxformer.config import EncoderDecoder
from jaxformer.data import Batch, PairBatch
from jaxformer.parallel import MeshConfig, batch_spec, make_mesh
from jaxformer.parallel.compiled import collectives_of
from jaxformer.parallel.traffic import Collective, traffic
from jaxformer.training import step
from jaxformer.training.optimizers import AdamW, Muon, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Constant
from tests.tiny_llamas import LLAMA, LLAMAS

ROWS, LENGTH = 8, 16


def model(name):
    return LLAMAS.get(name) or zoo.get(name).tiny()


def update(
    config,
    sizes,
    *,
    accumulation=1,
    remat="none",
    dtype="float32",
    expert_room=None,
    optimizer="adamw",
):
    """The train step on a mesh, lowered, and the sizes of all axes that the mesh has."""
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    kind = {"adamw": AdamW, "muon": Muon}[optimizer]()
    optimizer = make_optimizer(OptimizerConfig(schedule=Constant(peak=1e-3), optimizer=kind), 1)
    spread = Transformer(config, dtype=jnp.dtype(dtype), remat=remat, expert_room=expert_room)
    program = step.make_update(spread, optimizer, mesh, accumulation=accumulation)
    kind = PairBatch if isinstance(config.topology, EncoderDecoder) else Batch
    where = NamedSharding(mesh, batch_spec(mesh.shape))
    batch = kind(
        **{
            name: jax.ShapeDtypeStruct(
                (ROWS, LENGTH), bool if name == "mask" else jnp.int32, sharding=where
            )
            for name in kind._fields
        }
    )
    return program.lower(step.abstract_state(spread, optimizer, mesh), batch), mesh.shape


def formula(config, sizes, **how):
    reads = isinstance(config.topology, EncoderDecoder)
    source = LENGTH if reads else 0
    return traffic(config, sizes, batch_size=ROWS, length=LENGTH, source_length=source, **how)


def totals(collectives, field):
    """By kind and axis."""
    found = {}
    for one in collectives:
        place = one.kind, one.axis
        found[place] = found.get(place, 0) + getattr(one, field)
    return found


CASES = [
    ("llama-2-70b", dict(data=8), {}),
    ("llama-2-70b", dict(fsdp=2, tensor=2, context=2), {}),
    ("llama-2-70b", dict(data=2, tensor=4), dict(remat="full", accumulation=2)),  # shared heads
    ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), {}),
    ("mixtral-8x7b", dict(data=2, expert=2, context=2), dict(remat="dots", accumulation=2)),
    ("mixtral-8x7b", dict(data=2, expert=4), dict(expert_room=1.3)),
    ("transformer-base", dict(fsdp=2, context=2, tensor=2), {}),
    ("t5-small", dict(data=2, fsdp=2, tensor=2), dict(remat="full", accumulation=2)),
    ("gpt-j-6b", dict(fsdp=2, tensor=4), {}),  # parallel branches that share a norm
    ("falcon-40b", dict(fsdp=2, tensor=4), dict(remat="full")),  # with a norm each
    ("olmo-2-7b", dict(data=2, context=2, tensor=2), dict(remat="full")),  # norms over all heads
    ("norms of heads", dict(fsdp=2, tensor=4), dict(remat="dots")),
    ("shared", dict(fsdp=2, context=2, tensor=2), {}),
    ("latent", dict(fsdp=2, context=2, tensor=2), dict(remat="dots")),
    ("decay", dict(data=2, fsdp=2, tensor=2), dict(remat="full", accumulation=2)),
    ("gopher-280b", dict(fsdp=4, tensor=2), {}),  # kernels of distances
    ("llama-2-70b", dict(fsdp=2, tensor=4), dict(optimizer="muon")),  # 8 devices, 2 layers
    ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), dict(optimizer="muon")),
    ("t5-small", dict(data=2, fsdp=2), dict(optimizer="muon")),
    ("latent", dict(fsdp=2, tensor=2), dict(optimizer="muon")),
]


def label(part):
    if isinstance(part, dict):
        return "-".join(f"{name}{value}" for name, value in part.items()) or "plain"
    return part if isinstance(part, str) else "-".join(part) or "none"


@pytest.mark.usefixtures("no_checks_of_annotations")
@pytest.mark.parametrize("name, sizes, how", CASES, ids=label)
@pytest.mark.slow(
    but=[
        "llama-2-70b-data2-tensor4-rematfull-accumulation2",
        "falcon-40b-fsdp2-tensor4-rematfull",
        "llama-2-70b-fsdp2-tensor4-optimizermuon",
    ]
)
def test_the_compiled_program_says_what_the_formula_says(name, sizes, how):
    """Every byte of every kind along every axis. XLA merges sums, and may not have more of them."""
    config = model(name)
    lowered, axes = update(config, sizes, **how)
    found, expected = (
        collectives_of(lowered.compile().as_text(), axes),
        formula(config, sizes, **how),
    )
    assert totals(found, "bytes") == totals(expected, "bytes")
    times, most = totals(found, "times"), totals(expected, "times")
    sums = {place for place in most if place[0] == "all_reduce"}
    assert all(times[place] <= most[place] for place in sums)
    assert {p: n for p, n in times.items() if p not in sums} == {
        p: n for p, n in most.items() if p not in sums
    }


@pytest.fixture
def few_ids_at_a_time(monkeypatch):
    """Of a small vocabulary too."""
    for name, number in dict(WHOLE_UP_TO=0, AT_A_TIME=1, FEWEST_IDS=24).items():
        monkeypatch.setattr(F.linear_losses, name, number)


@pytest.mark.usefixtures("no_checks_of_annotations", "few_ids_at_a_time")
@pytest.mark.parametrize(
    "name, sizes, how",
    [
        ("llama-2-70b", dict(fsdp=2, tensor=2, context=2), dict(accumulation=2)),
        ("tied", dict(fsdp=4, tensor=2), {}),
    ],
    ids=label,
)
@pytest.mark.slow
def test_the_vocabulary_in_chunks_says_no_more(name, sizes, how):
    """64 ids of a device, 24 at a time and 16 left over: the messages of all at once."""
    config = model(name)
    assert F.loss_chunk(32, config.vocab_size // 2) == 24 < config.vocab_size // 2
    lowered, axes = update(config, sizes, **how)
    found, expected = (
        collectives_of(lowered.compile().as_text(), axes),
        formula(config, sizes, **how),
    )
    assert totals(found, "bytes") == totals(expected, "bytes")
    times, most = totals(found, "times"), totals(expected, "times")
    assert times.keys() == most.keys() and all(times[place] <= most[place] for place in times)


TYPES = {"bf16": 2, "f32": 4, "i32": 4}
SAID = re.compile(
    r'"stablehlo\.(all_gather|reduce_scatter|all_reduce|collective_permute|all_to_all)"'
    r".*?-> tensor<(?:[\dx]*x)?(\w+)>",
    re.S,
)


@pytest.mark.usefixtures("no_checks_of_annotations")
@pytest.mark.parametrize(
    "name, sizes, narrow",
    [
        ("mixtral-8x7b", dict(fsdp=2, expert=2, tensor=2), ["all_gather", "all_to_all"]),
        ("llama-2-70b", dict(fsdp=2, context=2, tensor=2), ["all_gather", "collective_permute"]),
        ("llama-2-70b", dict(data=2, tensor=4), []),
    ],
    ids=label,
)
def test_kernels_keys_and_tokens_travel_as_bfloat16_and_sums_as_float32(name, sizes, narrow):
    """From the program before a CPU, which has no bfloat16, widens what it says."""
    said = SAID.findall(update(model(name), sizes, dtype="bfloat16")[0].as_text())
    kinds = {kind for kind, dtype in said if dtype == "bf16"}
    assert kinds == {*narrow, "all_reduce"}
    # Rows of the embedding: of the devices only one has a row that is not zero.
    assert sum(dtype == "bf16" for kind, dtype in said if kind == "all_reduce") == 1
    assert not any(dtype == "bf16" for kind, dtype in said if kind == "reduce_scatter")
    half, whole = (
        totals(formula(model(name), sizes, dtype=dtype), "bytes")
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
        formula(
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
        found = by_purpose(formula(config, dict(tensor=2), remat=remat))
        times, size = found["all_reduce", "tensor", "sums of layers"]
        assert times == 2 * (sums + more) and size == times * ROWS * LENGTH * 64 * 4


def test_what_has_no_other_side_is_not_said():
    assert formula(LLAMA, dict(data=1)) == ()
    assert {one.axis for one in formula(LLAMA, dict(data=4))} == {"data"}


def test_what_a_device_sends():
    def sent(kind, devices=4):
        return Collective(kind, "data", devices, "", 1, 1000).sent

    assert sent("all_reduce") == 1500 and sent("permute") == 1000
    assert sent("all_gather") == sent("reduce_scatter") == sent("all_to_all") == 750
    assert sent("all_gather", 2) == 500


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by tensor 3"):
        formula(LLAMA, dict(tensor=3))
    with pytest.raises(ValueError, match=r"source_length|length 3 must be a multiple of 2 x cont"):
        traffic(model("t5-small"), dict(context=2), batch_size=8, length=16, source_length=3)
