"""The commands of README and of each guide's first block run as they are written."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer import Transformer, data, save_pretrained, zoo
from tests.run.processes import ROOT, TIMEOUT_SECONDS

HUB_NAME = "Qwen/Qwen3-0.6B"  # the one word that is replaced, by a folder
INSTALLED = "jaxformer zoo", "python -m jaxformer zoo"  # the command: tests/test_wheel.py
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
INSTRUCTIONS = "".join(
    f'{{"prompt": "What is {n} plus {n}?", "answer": "It is {2 * n}."}}\n' for n in range(40)
)
PAIRS = "".join(
    f'{{"prompt": "{n} plus {n}?", "chosen": "{2 * n}", "rejected": "{n}"}}\n' for n in range(1, 40)
)
WORDS = "".join(f"{n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(700))


def commands(page, *, blocks):
    """The lines of some blocks of a page that start a program; `pip` is for `.ci/run`."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    programs = re.compile("^(python -m|jaxformer zoo) ", re.M)
    shell = [block for language, block in fenced if not language and programs.search(block)]
    return [line for b in shell[blocks] for line in b.splitlines() if programs.match(line)]


@functools.cache  # two pages have the same line
def run(line, place, *, whole=False):
    """A line in a shell: its status and what it printed.

    One that trains long is interrupted before its first step; `.ci/run` interrupts README's later.
    """
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # they compile more than they run
    }
    log = place / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", line.replace(HUB_NAME, "path/to/folder").replace(*INSTALLED)],
            cwd=place,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process.stdin.write(b"What is 1 plus 1?\n")
    process.stdin.close()
    until = time.monotonic() + TIMEOUT_SECONDS
    trains_long = not whole and re.search("experiments.pretrain |--epochs 2", line)
    try:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
            if trains_long and re.search("^Compiled in ", log.read_text(), re.M):
                os.killpg(process.pid, signal.SIGINT)
                trains_long = False
        status = process.poll()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands name: a run, a model's folder, texts and instructions."""
    place = tmp_path_factory.mktemp("commands")
    (place / "my/texts").mkdir(parents=True)
    for name in ("my.txt", "my/texts/1.txt", "my/texts/2.txt"):
        (place / name).write_text(WORDS)
    for name in ("mine.jsonl", "held_out.jsonl"):
        (place / name).write_text(INSTRUCTIONS)
    (place / "pairs.jsonl").write_text(PAIRS)
    config = replace(zoo.get("qwen-3-0.6b").tiny(), vocab_size=300)
    params = jax.jit(Transformer(config).init)(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
    save_pretrained(place / "path/to/folder", config, params)
    data.export_tokenizer(data.train_bpe([WORDS], vocab_size=300), place / "path/to/folder")
    settings = place / "path/to/folder/tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    line = "python -m experiments.pretrain tiny --corpus my.txt --tokenizer path/to/folder"
    line += " --model.vocab-size 300 --length 64 --steps 2 --devices 1"
    status, printed = run(line, place, whole=True)
    assert status == 0, printed
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, blocks",
    [
        ("README.md", slice(None, 2)),
        *((f"experiments/guides/{name}.md", slice(1)) for name in ("train", "finetune", "models")),
        ("experiments/guides/devices.md", slice(1)),
        ("experiments/guides/finetune.md", slice(3, 4)),
    ],
    ids=["README", "train", "finetune", "models", "devices", "dpo"],
)
def test_commands_of_pages_run_as_they_are_written(page, blocks, place):
    lines = commands(page, blocks=blocks)
    assert len(lines) >= 2
    for line in lines:
        status, printed = run(line, place)
        if "on eight GPUs" in line:  # which are not here
            assert status == 1 and re.search("error: .*8 devices", printed), f"{line}\n{printed}"
        elif status != 0:
            interrupted = status == 130 and "\nInterrupted. " in printed
            assert interrupted, f"{line}\nended with {status}:\n{printed}"
