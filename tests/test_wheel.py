"""The wheel alone, without a clone: its command fine-tunes, chats, exports and reads the export."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxformer import Transformer, data, save_pretrained, zoo

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"{n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(300))
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the installed wheel, a model's folder, a text and instructions."""
    place = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("*.whl")
    install = [*PIP, "install", "--no-deps", "--no-index", "--target", place / "installed", wheel]
    subprocess.run(install, check=True)
    (place / "my.txt").write_text(TEXT)
    lines = [{"prompt": f"{n} times {n}?", "answer": f"{n * n}."} for n in range(40)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = replace(zoo.get("qwen-3-0.6b").tiny(), vocab_size=300)
    params = jax.jit(Transformer(config).init)(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
    save_pretrained(place / "base", config, params)
    data.export_tokenizer(data.train_bpe([TEXT], vocab_size=300), place / "base")
    return place


def run(place, *arguments, typed="", command=("installed/bin/jaxformer",)):
    environment = {
        **os.environ,
        "PYTHONPATH": str(place / "installed"),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=place,
        env=environment,
        input=typed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_command_of_a_wheel_trains_chats_and_exports(place):
    where = run(place, command=("-c", "import jaxformer; print(jaxformer.__file__)"))
    assert Path(where.strip()).is_relative_to(place / "installed")
    assert "\njaxformer finetune " in run(place)
    tuned = ["--init", "base", "--corpus", 'Instructions(path="mine.jsonl")', "--steps", "4"]
    tuned += ["--chat-template", "chatml", "--output", "tuned", "--devices", "1"]
    printed = run(place, "finetune", *tuned)
    assert "Held-out loss: " in printed and "\n  jaxformer finetune --init base --" in printed
    chat = ["--checkpoint", "tuned", "--chat", "--max-new-tokens", "3"]
    assert "> " in run(place, "generate", *chat, typed="1 times 1?\n\n")
    printed = run(place, "export", "--checkpoint", "tuned", "--output", "exported")
    assert printed == f"Exported checkpoint 4 of tuned as qwen3 to {place / 'exported'}.\n"
    lines = [run(place, "evaluate", name, "--text", "my.txt") for name in ("tuned", "exported")]
    figures = [[x for x in printed.splitlines() if "bits per byte" in x] for printed in lines]
    assert len(figures[0]) == 1 and figures[0] == figures[1]
    assert "jaxformer zoo" in run(place, "zoo", "--help")


@pytest.mark.slow
def test_a_notebook_does_the_same_in_three_lines(place):
    lines = (
        "from jaxformer import data, run",
        "text = data.TextFiles(path='my.txt')",
        "folder = run.finetune(run.Finetune(init='base', corpus=text, steps=2, output='again'))",
        "run.evaluate(run.Evaluate(checkpoint=folder, text=text))",
        "print(run.load_run(folder).step)",
    )
    printed = run(place, command=("-c", "\n".join(lines)))
    assert "  bits per byte: " in printed and printed.endswith("\n2\n")
