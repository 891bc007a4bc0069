import math
import subprocess
import sys
from dataclasses import replace

import pytest

from jaxformer import costs, zoo
from jaxformer.parallel import plan_report as tables
from jaxformer.parallel.chips import CHIPS, chip_from_device_kind, get_chip
from jaxformer.parallel.plan import (
    ADAPTER_FLAGS,
    USABLE_MEMORY_FRACTION,
    Workload,
    memory_saving_changes,
    plan,
    smallest_fitting_mesh,
    with_largest_batch,
)
from jaxformer.run import planning as command

LLAMA = zoo.get("llama-2-70b")
H100 = get_chip("h100")


def run(capsys, *arguments):
    command.main(list(arguments))
    return capsys.readouterr().out


# Chips


def test_names_of_chips_are_one_each_and_figures_have_their_units():
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
    for chip in CHIPS:
        assert 50e12 < chip.peak_flops < 1e15 and 10e9 < chip.memory < 200e9
        assert 100e9 < chip.bandwidth < 10e12
        assert 1 <= chip.link_domain_size < 10_000


KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA L4": "l4",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-PCIE-32GB": "v100-pcie",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v5p": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
}
UNKNOWN = "cpu", "", "NVIDIA L40S", "NVIDIA GH200 480GB", "TPU v4 lite", "TPU v3"


def test_chips_by_the_kind_of_a_device():
    """Of parts of a GPU (MIG) and of neighbours in name nothing is known."""
    for kind, name in KINDS.items():
        assert chip_from_device_kind(kind) is get_chip(name), kind
    for kind in (*UNKNOWN, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert chip_from_device_kind(kind) is None, kind


def test_an_unknown_chip_is_refused():
    message = r"no chip 'H100 SXM'\. Similar: .*h100.* Chips: h200-nvl, h200, h100-pcie"
    with pytest.raises(ValueError, match=message):
        get_chip("H100 SXM")


# The roofline


@pytest.mark.slow
def test_time_by_hand():
    """Llama 2 70B on 2 x 8 x 4 chips of which everything is worked out here."""
    chip = H100._replace(peak_flops=1e15, bandwidth=1e12)
    work = Workload(batch_size=32, length=2048, remat="full")
    result = plan(LLAMA, dict(data=2, fsdp=8, tensor=4), chip, work)
    forward = 32 * costs.forward_flops(LLAMA, 2048)
    assert result.num_devices == 64 and result.batch_size == 32
    assert result.model_flops == 3 * forward and result.hardware_flops == 4 * forward
    assert result.compute_seconds == 4 * forward / 64e15
    m = result.memory
    assert result.optimizer_seconds == (2 * (m.parameters + m.optimizer) + m.gradients) / 1e12
    assert result.step_seconds == result.compute_seconds + result.optimizer_seconds
    assert result.mfu == result.model_flops / (result.step_seconds * 64e15)


@pytest.mark.parametrize("name, ids", [("tpu-v5e", 2**25 // 4096), ("h100", 2**27 // 4096)])
def test_logits_are_those_of_the_chips_platform(name, ids):
    work = Workload(batch_size=2, length=2048, remat="dots")
    logits = plan(zoo.get("smollm2-1.7b"), {}, get_chip(name), work).memory.logits
    assert logits == 2 * 4 * 4096 * ids


def test_experts_compute_on_empty_slots():
    """Four devices have four times the room, and no token fewer."""
    mixtral = zoo.get("mixtral-8x7b")
    work = Workload(batch_size=8, remat="none")
    result = plan(mixtral, dict(expert=4), H100, work)
    forward, experts = (8 * of(mixtral, 4096) for of in (costs.forward_flops, costs.expert_flops))
    assert experts == 8 * 32 * 2 * 4096 * 3 * 4096 * 2 * 14_336
    logits = 8 * 2 * 4096 * 4096 * 32_000  # computed again in the backward pass
    assert result.hardware_flops == 3 * (forward + 3 * experts) + logits
    assert plan(mixtral, dict(fsdp=4), H100, work).hardware_flops == (3 * forward + logits)
    few = plan(mixtral, dict(fsdp=4), H100, replace(work, length=512))
    assert few.hardware_flops == 3 * 8 * costs.forward_flops(mixtral, 512)


# Meshes that are looked for


def test_the_smallest_mesh_with_room():
    sizes = smallest_fitting_mesh(LLAMA, H100, Workload())
    devices = math.prod(sizes.values())
    assert plan(LLAMA, sizes, H100, Workload()).fits
    half = smallest_fitting_mesh(LLAMA, H100, Workload(), devices=devices // 2)
    assert math.prod(half.values()) == devices // 2
    assert not plan(LLAMA, half, H100, Workload()).fits


def test_the_smallest_mesh_prefers_fsdp_to_tensor():
    assert smallest_fitting_mesh(LLAMA, H100, Workload(), devices=64) == dict(
        data=1, fsdp=64, tensor=1
    )
    few_rows = Workload(batch_size=16)
    assert smallest_fitting_mesh(LLAMA, H100, few_rows, devices=64) == dict(
        data=1, fsdp=16, tensor=4
    )


def test_no_mesh():
    with pytest.raises(ValueError, match="No mesh of 3 devices .* a batch of 7 rows of 4096 tok"):
        smallest_fitting_mesh(LLAMA, H100, Workload(batch_size=7), devices=3)


def test_a_batch_is_filled_up_to_the_memory():
    sizes = dict(data=1, fsdp=32, tensor=1)
    work = with_largest_batch(LLAMA, sizes, H100, Workload())
    assert work.batch_size % 32 == 0 and plan(LLAMA, sizes, H100, work).fits
    more = replace(work, batch_size=2 * work.batch_size)
    assert not plan(LLAMA, sizes, H100, more).fits
    small = zoo.get("gpt-2-small")
    assert (
        with_largest_batch(small, dict(data=4096), H100, Workload(length=1024)).batch_size is None
    )


def test_what_would_make_it_fit():
    before = plan(LLAMA, dict(fsdp=32), H100, Workload(batch_size=64, remat="none"))
    assert not before.fits
    changes = dict(memory_saving_changes(LLAMA, before))
    assert {
        "--remat full",
        "--gradient-accumulation-steps 2",
        "--mesh.fsdp 64",
        "--mesh.tensor 2",
        ADAPTER_FLAGS,
    } < set(changes)
    assert "--mesh.fsdp 128" not in changes, "64 rows are not a multiple of 128"
    assert changes["--remat full"].memory.total < before.memory.total
    assert changes["--mesh.tensor 2"].num_devices == 64
    text = tables.format_plan("llama-2-70b", LLAMA, before)
    listed = text.split("It fits with one of\n")[1].split("\nWith --adapter")[0].splitlines()
    assert all(changes[line[2:54].strip()].fits for line in listed)


@pytest.mark.slow
def test_adapters_are_named_where_they_fit_alone_or_with_fewer_devices():
    """8B parameters in 16 bits are 16 GB, 70B are 141 GB: on one and on two or more of 80 GB."""
    for name, words in (("llama-3-8b", " 1 device,"), ("llama-3-70b", " 4 devices,")):
        config = zoo.get(name)
        text = tables.format_plan(name, config, plan(config, dict(data=1), H100, Workload()))
        assert words in text.split(ADAPTER_FLAGS)[1]


@pytest.mark.slow
def test_several_changes_are_proposed_where_one_does_not_suffice():
    result = plan(LLAMA, dict(fsdp=16), H100, Workload(batch_size=64, remat="none"))
    text = tables.format_plan("llama-2-70b", LLAMA, result)
    assert "does not fit into 90% of it" in text and USABLE_MEMORY_FRACTION == 0.9
    last = text.split("No single change is enough. It fits with\n")[1]
    assert "--mesh.fsdp" in last and "--remat full" in last
    palm, small = zoo.get("palm-540b"), get_chip("tpu-v5e")
    text = tables.format_plan("palm-540b", palm, plan(palm, dict(data=1), small, Workload()))
    assert "No single change is enough. The mesh with the least memory is\n  --mesh.fsdp " in text


# The command


PLANNED = ("llama-2-70b", "mixtral-8x7b", "t5-small", "gemma-3-1b")
SELDOM = (name for name in zoo.names() if name not in PLANNED)


@pytest.mark.parametrize(
    "name", [*PLANNED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SELDOM)]
)
@pytest.mark.slow(but=["llama-2-70b", "mixtral-8x7b", "t5-small"])
def test_every_preset_has_a_plan(name, capsys):
    """On H100 as they are, and on a TPU; the largest need at most a few thousand devices."""
    out = run(capsys, name)
    assert out.startswith(f"{name} on ") and f"{costs.num_parameters(zoo.get(name)):,} param" in out
    assert "GB; fits" in out and "MFU" in out and "at most" in out
    assert max(map(len, out.splitlines())) <= tables.LINE_WIDTH
    shares = [line for line in out.splitlines() if line.startswith(("parameters  ", "total  "))]
    parameters, total = (float(line[40:48].replace(",", "")) for line in shares[:2])
    assert 0 < parameters < total < 80


def test_a_mesh_on_the_command_line(capsys):
    out = run(
        capsys,
        *("llama-3-70b", "--mesh.data", "8", "--mesh.fsdp", "16", "--mesh.tensor", "8"),
        *("--batch-size", "512", "--length", "8192", "--gradient-accumulation-steps", "2"),
    )
    assert out.startswith("llama-3-70b on 1,024 x h100: data 8 x fsdp 16 x tensor 8\n")
    assert "512 rows of 8,192 tokens in 2 accumulation steps, 4,194,304 tokens;" in out


@pytest.mark.slow
def test_other_chips_kinds_and_sources(capsys):
    out = run(capsys, "t5-11b", "--chip", "tpu-v5p", "--optimizer", "adafactor", "--devices", "8")
    assert out.startswith("t5-11b on 8 x tpu-v5p: ") and "and sources of 4,096" in out
    assert "bfloat16, remat full, adafactor" in out
    out = run(capsys, "gpt-2-xl", "--dtype", "float32", "--remat", "none", "--mesh.data", "1")
    assert "one device" in out and "rows of 1,024 tokens" in out and "float32, remat none" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["lama-3-70b"], "There is no preset 'lama-3-70b'. Similar: llama-3-70b"),
        (["gpt-2-xl", "--mesh.tensor", "8"], "num_heads 25 is not divisible by tensor 8"),
        (["llama-3-8b", "--chip", "h10"], "There is no chip 'h10'. Similar: h100"),
        (
            ["llama-3-8b", "--mesh.fsdp", "8", "--devices", "12"],
            "The mesh fsdp 8 needs a multiple of 8 devices; there are 12.",
        ),
        (["llama-3-8b", "--devices", "0"], "devices must be positive; got 0."),
        (["llama-3-8b", "--devices", "-4"], "devices must be positive; got -4."),
        (["t5-11b", "--source-length", "0"], "source_length must be positive; got 0."),
        (["gpt-2", "--import", "../mine"], "--import needs the name of a module in "),
        (["gpt-2-xl", "--compile", "h100:8", "--devices", "4"], "h100:8 sets the number of devi"),
        (
            ["mixtral-8x7b", "--expert-capacity-factor", "-1"],
            "expert_capacity_factor must be at least 1; got",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags_are_refused_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(list(arguments))
    out, err = capsys.readouterr()
    assert out == "" and ended.value.code not in (0, None)
    assert message in f"{ended.value.code} {' '.join(err.replace('│', ' ').split())}"


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        run(capsys, "--help")
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert command.SUMMARY in out and "Attributes" not in out
    for flag in ("--chip", "--batch-size", "--gradient-accumulation-steps", "--optimizer"):
        assert flag in out
    with pytest.raises(SystemExit):
        run(capsys, "--help", "mesh")
    out = capsys.readouterr().out
    assert "--mesh.fsdp" in out and "smallest mesh that fits" in " ".join(out.split())


@pytest.mark.slow
def test_no_device_is_asked_for():
    code = (
        "import jax; from jaxformer.run.planning import main; main(['palm-540b']); "
        "from jax._src import xla_bridge; print(dict(xla_bridge._backends))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("palm-540b on ") and done.stdout.endswith("\n{}\n")
