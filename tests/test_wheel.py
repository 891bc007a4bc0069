"""The wheel alone, without a clone: its command fine-tunes, chats, exports and reads the export."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from packaging.metadata import Metadata

import jaxformer
from jaxformer import Transformer, data, save_pretrained, zoo

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"{n}: the quick brown fox jumps over {n * n} lazy dogs\n" for n in range(300))
OWN = """
from jaxformer import options


@options.activation
def cubed(x):
    return x**3
"""
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


def build(source, folder):
    """The wheel and the source archive of a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the installed wheel, a model's folder, a text and instructions."""
    place = tmp_path_factory.mktemp("wheel")
    wheel, _ = build(ROOT, place)
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
    (place / "mine.py").write_text(OWN)
    sized = ["--model.feed-forward", 'GLU(hidden_dim=8, activation="cubed")', "--steps", "1"]
    own = ["tiny", "--import", "mine", "--corpus", "my.txt", *sized, "--devices", "1"]
    assert "Held-out loss: " in run(place, "pretrain", *own, "--output", "own")
    chat = ["--checkpoint", "tuned", "--chat", "--max-new-tokens", "3"]
    assert "> " in run(place, "generate", *chat, typed="1 times 1?\n\n")
    printed = run(place, "export", "--checkpoint", "tuned", "--output", "exported")
    assert printed == f"Exported checkpoint 4 of tuned as qwen3 to {place / 'exported'}.\n"
    lines = [
        run(place, "evaluate", name, "--text", "my.txt", "--length", "16")
        for name in ("tuned", "exported")
    ]
    figures = [[x for x in printed.splitlines() if "bits per byte" in x] for printed in lines]
    assert len(figures[0]) == 1 and figures[0] == figures[1]
    assert "jaxformer zoo" in run(place, "zoo", "--help")


def files_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(tmp_path):
    wheel, archive = build(ROOT, tmp_path / "first")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("jaxformer-*")
    again, _ = build(source, tmp_path / "second")
    files = files_in(wheel)
    assert files_in(again) == files
    tracked = {x.relative_to(ROOT).as_posix() for x in (ROOT / "jaxformer").rglob("*.[pt][yo]*")}
    tracked = {x for x in tracked if "__pycache__" not in x}
    assert tracked <= files.keys() and "jaxformer/interop/coverage.toml" in tracked
    (described,) = (text for name, text in files.items() if name.endswith("/METADATA"))
    metadata = Metadata.from_email(described)  # checked as the package index checks it
    assert (metadata.name, str(metadata.version)) == ("jaxformer", jaxformer.__version__)
    assert metadata.description == (ROOT / "README.md").read_text()
    for name in ("CITATION.cff", "CHANGELOG.md", "tests/test_wheel.py", ".ci/run"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_citation_says_what_the_package_says():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == jaxformer.__version__
    assert citation["license"] == project["license"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["title"] == project["name"] and citation["authors"]


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
