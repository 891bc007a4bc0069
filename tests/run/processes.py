"""Runs training programs with tiny models in subprocesses."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from jaxformer.run import pretraining

ROOT = Path(pretraining.__file__).parents[2]
CORPUS_LINES = [
    f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(60) for w in ("a", "b")
]
TIMEOUT_SECONDS = 240  # seconds for any one process
TINY_RUN_FLAGS = [
    *("tiny", "--corpus", "TextFiles(path='texts')", "--tokenizer", "ByteLevel()"),
    *("--model.vocab-size", "260", "--model.model-dim", "16", "--model.num-layers", "1"),
    *("--length", "16", "--batch-size", "8", "--optimizer.optimizer", "AdamW()"),
    *("--evaluate-rows", "5", "--log-every", "1", "--held-out", "0.1"),
    *("--scan", "--no-tensorboard", "--cache", "cache"),
    *("--sample-tokens", "None"),
]


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        return str(chosen.getsockname()[1])


def distributed_flags(port, *, devices=2):
    return [
        *("--devices", str(devices), "--distributed", "--hosts.num-processes", "2"),
        *("--hosts.coordinator-address", f"localhost:{port}"),
    ]


def slurm_environment(rank, port):
    """What Slurm tells the tasks of a job."""
    return {
        **{"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": port},
        **{"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
    }


def start_python(place, *arguments, **variables):
    """Python in a folder; programs that were compiled are kept beside it for the next one."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(place.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        **variables,
    }
    environment.pop("JAXFORMER_TRACEBACK", None)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_output(processes):
    """What they said, when all have ended by themselves or after long enough."""
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=TIMEOUT_SECONDS)[1])
    finally:
        for process in processes:
            process.kill()
    return outputs
