"""What was compiled once is not compiled again by the next process."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformer.run import run_config
from jaxformer.run.pretraining import RUNS
from jaxformer.run.run_config import enable_compilation_cache, select_devices, setup_devices

ROOT = Path(__file__).parents[2]
COUNTING = """
import collections, runpy, sys
import jax
found = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: found.update([name.split("/")[-1]]))
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
print("counted", found["cache_hits"], found["cache_misses"])
"""


def start(folder, *arguments):
    """Programs taken from the disk, and programs compiled, of a run in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", COUNTING, "experiments.pretrain", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    hits, misses = process.stdout.split("counted ")[1].split()
    return int(hits), int(misses)


@pytest.fixture
def train(tmp_path):
    """Train a tiny model in `tmp_path`, on so many devices."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.txt").write_text("the quick brown fox\n" * 200)
    arguments = (
        *("--corpus", "TextFiles(path='texts')", "--tokenizer", "ByteLevel()"),
        *("--model.vocab-size", "257", "--model.model-dim", "16", "--model.num-layers", "1"),
        *("--model.attention.num-heads", "2", "--model.attention.num-kv-heads", "2"),
        *("--model.attention.head-dim", "8", "--length", "16", "--batch-size", "4"),
        *("--steps", "1", "--sample-tokens", "2", "--optimizer.optimizer", "AdamW()"),
    )
    return lambda devices: start(tmp_path, *arguments, "--devices", str(devices))


@pytest.mark.slow
def test_the_second_start_compiles_nothing(tmp_path, train):
    hits, misses = train(devices=1)
    assert misses > 0
    assert (tmp_path / "runs" / "cache" / "programs").is_dir()
    again, compiled = train(devices=1)
    assert compiled == 0 and again >= misses


@pytest.mark.slow
def test_programs_for_several_devices_of_a_cpu_are_not_kept(tmp_path, train, monkeypatch):
    """Those that come from the disk may wait for each other for ever; no setting keeps them."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    assert train(devices=2) == (0, 0)
    assert not (tmp_path / "mine").exists()


def test_a_run_leaves_the_settings_of_jax_as_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(run_config, "enable_compilation_cache", enable_compilation_cache)
    chosen = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        before = {k: x for k, x in jax.config.values.items() if "cache" in k or "devices" in k}
        with pytest.raises(ValueError, match="of the block"), setup_devices(RUNS["tiny"]):
            folder = jax.config.jax_compilation_cache_dir
            assert folder == str(Path("runs/cache/programs").resolve())
            assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
            raise ValueError("of the block")
        assert before == {k: jax.config.values[k] for k in before}
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)


def test_more_devices_than_jax_has_started_with_are_explained():
    with pytest.raises(ValueError, match=r"between 1 and 8 on this machine; got 9\. JAX has start"):
        select_devices(9)
    with pytest.raises(ValueError, match=r'update\("jax_num_cpu_devices", 9\) before all else'):
        select_devices(9)


def test_a_folder_that_was_chosen_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
        enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
