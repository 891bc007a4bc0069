"""The template: its model has the library's numbers, and a copy of its files trains anywhere."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer
from experiments.template.model import Transformer
from jaxformer.config import GLU, LMHead, MultiHead, TransformerConfig
from tests.run.processes import CORPUS_LINES, ROOT, TIMEOUT_SECONDS
from tests.small_models import random_tree

GUIDE = (ROOT / "experiments/guides/one_page.md").read_text()
COMMANDS = re.search(r"^```\n(.*?)^```$", GUIDE, re.M | re.S)[1].splitlines()
MODEL = Transformer(vocab_size=11, model_dim=12, hidden_dim=7, num_layers=2, num_heads=3)
CONFIG = TransformerConfig(
    vocab_size=11,
    model_dim=12,
    num_layers=2,
    attention=MultiHead(num_heads=3, num_kv_heads=3, head_dim=4),
    feed_forward=(GLU(hidden_dim=7),),
    head=LMHead(tied=True),
)
TOKENS = np.random.default_rng(0).integers(11, size=(2, 5), dtype=np.int32)
SEGMENTS = np.int32([[1, 1, 1, 2, 2], [1, 2, 2, 2, 2]])
POSITIONS = np.int32([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
TINY = "--text ../texts.txt --vocab-size 300 --length 16 --batch-size 8 --model-dim 16"
TINY += " --hidden-dim 24 --num-layers 1 --num-heads 2 --print-every 1 --save-every 3 --steps 6"


def library_params(params):
    """The same numbers, as the library's model names and stacks them."""

    def stacked(block):
        heads = {
            name: block[name]["kernel"].reshape(12, 3, 4) for name in ("query", "key", "value")
        }
        heads["out"] = block["out"]["kernel"].reshape(3, 4, 12)
        return {
            "pre_attention_norm": block["attention_norm"],
            "attention": {name: {"kernel": x} for name, x in heads.items()},
            "pre_feed_forward_norm": block["feed_forward_norm"],
            "feed_forward": {name: block[name] for name in ("gate", "up", "down")},
        }

    layers = [stacked(params[f"block_{i}"]) for i in range(2)]
    layer = jax.tree.map(lambda *x: np.stack(x), *layers)
    decoder = {"layers": {"layer_0": layer}, "final_norm": params["final_norm"]}
    return {"embedding": {"tokens": params["embed"]}, "decoder": decoder}


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)["params"]
    return jax.tree.map(np.asarray, random_tree(shapes))


@pytest.mark.slow
def test_the_model_is_the_librarys_of_the_same_sizes(params):
    inputs = {"positions": POSITIONS, "segments": SEGMENTS}
    apply = partial(jaxformer.Transformer(CONFIG).apply, contiguous_positions=True)
    expected = jax.jit(apply)({"params": library_params(params)}, TOKENS, **inputs)
    logits = jax.jit(MODEL.apply)({"params": params}, TOKENS, **inputs)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_targets_give_the_losses_of_the_logits(params):
    """Of positions 0, 1, 2, ... and one document, which are the defaults."""
    targets = np.roll(TOKENS, -1, axis=1)
    logits = np.float64(jax.jit(MODEL.apply)({"params": params}, TOKENS))
    losses = jax.jit(MODEL.apply)({"params": params}, TOKENS, targets=targets)
    target_logits = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    expected = np.log(np.exp(logits).sum(-1)) - target_logits
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_gives_losses_in_float32(params):
    model = MODEL.clone(dtype="bfloat16")
    losses = jax.eval_shape(model.apply, {"params": params}, TOKENS, targets=TOKENS)
    assert losses.dtype == jnp.float32


def test_the_guide_names_what_there_is():
    table = GUIDE[GUIDE.index("|---|") : GUIDE.index("\n\nParts")]
    names = re.findall(r"`((?:training\.)?\w+\.\w+)`", table.replace("model.py", ""))
    assert len(names) > 15
    for name in names:
        module, _, attribute = f"jaxformer.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def run(command, folder):
    """What a command prints, and the loss of each of its steps."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # they compile more than they run
    }
    environment.pop("XLA_FLAGS", None)  # of the tests
    ran = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
    losses = re.findall(r"^step (\d+): loss ([\d.]+)$", ran.stdout, re.M)
    return ran.stdout, {int(step): float(loss) for step, loss in losses}


@pytest.mark.slow
def test_a_copy_trains_and_resumes_and_the_number_of_devices_changes_nothing(tmp_path):
    """By the guide's commands, with a tiny model."""
    shutil.copytree(ROOT / "experiments/template", tmp_path / "experiments/template")
    (tmp_path / "texts.txt").write_text("".join(CORPUS_LINES))
    copy, show_flags, train, resume, on_eight_devices = COMMANDS
    run(copy, tmp_path)
    folder = tmp_path / "my-model"
    assert "--save-every" in run(show_flags, folder)[0]

    printed, losses = run(f"{train} {TINY}", folder)
    assert printed.startswith("1 devices, ") and list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1] - 0.3
    assert len(re.findall(r"^held-out loss [\d.]+, [\d.]+ bits per byte$", printed, re.M)) == 2
    assert "\ndef " in printed  # the sample

    shutil.rmtree(folder / "run/checkpoints/6")
    printed, resumed = run(f"{resume} {TINY}", folder)
    assert "\nresumed after step 3\n" in printed
    assert resumed == {step: losses[step] for step in (4, 5, 6)}

    printed, parallel_losses = run(f"{on_eight_devices} {TINY}", folder)
    assert printed.startswith("8 devices, ")
    assert parallel_losses == pytest.approx(losses, abs=2e-4)  # four decimals are printed
