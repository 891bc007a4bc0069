"""A run that does not fit says what it needs and which flags would help."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer.parallel import MeshConfig, make_mesh
from jaxformer.run import memory_advice as advice
from jaxformer.run import memory_checks as memory
from jaxformer.run import pretraining
from jaxformer.run.pretraining import RUNS
from jaxformer.run.trainer import explained_early_end
from jaxformer.training.checkpoints import Checkpoints

RUN = replace(RUNS["tiny"], gradient_accumulation_steps=2, devices=1)
HELP = """To reduce memory:
  --remat full --scan: recompute activations in the backward pass (now dots);
  --gradient-accumulation-steps 4: smaller microbatches (now 2 accumulation steps);
  --batch-size 4: smaller batch (now 8)."""


def compiled():
    return jax.jit(lambda x: jnp.sort(x) @ x).lower(jnp.zeros((256, 256))).compile()


def test_an_update_that_needs_more_than_a_device_has_is_refused_with_the_numbers(monkeypatch):
    program = compiled()
    analysis = program.memory_analysis()
    need = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    monkeypatch.setattr(memory, "device_memory_limit", lambda: need - 1)
    monkeypatch.setattr(memory, "format_bytes", lambda size: f"{size} bytes")
    with pytest.raises(advice.TooLargeError) as refused:
        memory.check_compiled_memory(program, lambda: advice.memory_advice(RUN))
    assert str(refused.value) == (
        f"The train step needs {need} bytes per device ({analysis.argument_size_in_bytes} bytes "
        f"for parameters, optimizer state and batch, {analysis.temp_size_in_bytes} bytes "
        f"temporary), but a device has {need - 1} bytes.\n{HELP}"
    )
    monkeypatch.setattr(memory, "device_memory_limit", lambda: need)
    assert memory.check_compiled_memory(program, lambda: advice.memory_advice(RUN)) is None


def test_rows_that_no_host_holds_are_refused_before_text_is_read(tmp_path, monkeypatch, capsys):
    """100,000 rows of 8192 tokens with logits of 4096 ids are 27 TB in 16 bits for these alone."""
    monkeypatch.setattr(memory, "device_memory_limit", lambda: 24 * 10**9)
    monkeypatch.chdir(tmp_path)
    run = replace(RUNS["default"], batch_size=100_000, length=8192, devices=1, output=Path("out"))
    message = (
        r"100000 rows of 8192 tokens needs about \d\d\.\d+ TB per device, .* has 24\.0+ GB\.\n"
    )
    with pytest.raises(advice.TooLargeError, match=message):
        pretraining.pretrain(run)
    assert "Corpus:" not in capsys.readouterr().out
    monkeypatch.setattr(memory, "device_memory_limit", lambda: 60 * 10**6)
    mesh, small = make_mesh(MeshConfig(), jax.devices()[:1]), {"length": 256, "source_length": 0}
    with pytest.raises(advice.TooLargeError, match="8 rows of 256 tokens needs about 2.* MB per"):
        memory.check_memory(RUNS["default"], mesh, **small)
    memory.check_memory(RUNS["default"], mesh, **small, exact=False)  # rows may become fewer


def test_a_cpu_has_its_share_of_the_machines_memory():
    devices = len(jax.local_devices())
    assert 1 << 24 < memory.device_memory_limit() * devices < 1 << 50


@pytest.mark.parametrize(
    "changes, suggestions",
    [
        (
            dict(devices=8, gradient_accumulation_steps=1, mesh=MeshConfig(fsdp=2, data=4)),
            ["--mesh.fsdp 4 --mesh.data 2: shard parameters and optimizer (now over 2);"],
        ),
        (
            dict(devices=8, gradient_accumulation_steps=1, mesh=MeshConfig(fsdp=8)),
            ["more devices."],
        ),
        (
            dict(devices=8, batch_size=16, gradient_accumulation_steps=1, mesh=MeshConfig(fsdp=8)),
            ["--gradient-accumulation-steps 2: smaller microbatches (now 1 accumulation steps);"],
        ),
    ],
    ids=["a free axis", "nothing", "more rows"],
)
def test_what_is_suggested_fits_the_devices(changes, suggestions):
    run = replace(RUN, remat="full", scan=True, **changes)
    lines = [line.strip() for line in advice.memory_advice(run).splitlines()[1:]]
    assert lines[: len(suggestions)] == suggestions and len(lines) <= 3
    fitting = [
        flags
        for flags, _, changed in advice.memory_saving_changes(run)
        if advice.mesh_fits(changed)
    ]
    assert sum(line.startswith("--") for line in lines) == len(fitting[:3])


@pytest.mark.parametrize(
    "error, message",
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nx"),
            "A device is out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 7 "
            f"bytes.\n{HELP}\nNo checkpoint was saved yet.",
        ),
        (
            advice.TooLargeError("The train step needs 9."),
            "The train step needs 9.\nNo checkpoint was saved yet.",
        ),
    ],
    ids=["while running", "before"],
)
def test_the_run_ends_with_a_message(error, message, tmp_path):
    with (
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
        pytest.raises(advice.TooLargeError) as ended,
        explained_early_end(RUN, checkpoints, tmp_path, ""),
    ):
        raise error
    assert "\n".join([str(ended.value), *getattr(ended.value, "__notes__", [])]) == message


def test_other_failures_of_the_runtime_are_not_explained_away(tmp_path):
    with (
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        explained_early_end(RUN, checkpoints, tmp_path, ""),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
