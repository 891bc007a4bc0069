"""Runs training programs with tiny models in subprocesses."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from experiments import pretrain

ROOT = Path(pretrain.__file__).parents[1]
LINES = [f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(60) for w in ("a", "b")]
PATIENCE = 240  # seconds for any one process
ARGUMENTS = [
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


def hosts(port, *, devices=2):
    return [
        *("--devices", str(devices), "--distributed", "--hosts.processes", "2"),
        *("--hosts.coordinator", f"localhost:{port}"),
    ]


def slurm(rank, port):
    """What Slurm tells the tasks of a job."""
    return {
        **{"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": port},
        **{"SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
    }


def start(place, *arguments, **variables):
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


def ended(processes):
    """What they said, when all have ended by themselves or after long enough."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=PATIENCE)[1])
    finally:
        for process in processes:
            process.kill()
    return said
