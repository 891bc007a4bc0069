"""Fine-tuning of adapters: a folder, a run that is killed, a mesh, and folders that are written."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxformer import Transformer, costs, data, load_pretrained
from jaxformer.config import LoRA
from jaxformer.run import exporting, finetuning
from jaxformer.run.command_line import parse_run
from jaxformer.run.loading import load_run
from jaxformer.training.metrics import read_json_lines
from tests.interop.numpy_folders import LLAMA, llama_shapes, random_tensors, write_folder

LINES = [f"{n}: the {w} fox jumps over {n * n} lazy dogs\n" for n in range(90) for w in ("a", "b")]
SETTINGS = LLAMA | {"vocab_size": 320, "hidden_size": 24, "intermediate_size": 22}
FLAGS = ["--corpus", "TextFiles(path='corpus.txt')", "--length", "16", "--batch-size", "8"]
FLAGS += ["--held-out", "0.1", "--log-every", "1", "--evaluate-rows", "3", "--no-tensorboard"]
FLAGS += ["--cache", "cache", "--sample-tokens", "None", "--epochs", "None", "--steps", "6"]
FLAGS += ["--scan", "--optimizer.schedule", "Cosine(peak=1e-2, warmup_steps=0)"]
ADAPTER = ["--model.adapter", "LoRA(rank=3, targets=('query', 'down'), base_dtype='bfloat16')"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(LINES))
    drawn = random_tensors(llama_shapes(SETTINGS))
    tensors = {name: x if x.ndim == 1 else 0.1 * x for name, x in drawn.items()}
    folder = write_folder(tmp_path / "base", SETTINGS, tensors)
    data.export_tokenizer(data.train_bpe(LINES, vocab_size=300), folder)
    return folder


def tune(*flags):
    finetuning.finetune(parse_run(finetuning.RUNS, "", [*flags]))


def losses(output):
    lines = read_json_lines(Path(output) / "metrics.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_folder_gets_adapters_that_a_folder_of_their_own_holds(folder, capsys):
    tune("--init", str(folder), *FLAGS, *ADAPTER, "--devices", "1", "--output", "run")
    printed = capsys.readouterr().out
    assert "Note: jaxformer export cannot write" not in printed
    assert losses("run")[-1] < losses("run")[0]
    run = load_run(Path("run"))
    sizes = {path: x.size for path, x in flatten_dict(run.params, sep="/").items()}
    num_adapted = sum(size for path, size in sizes.items() if "lora" in path)
    share = num_adapted / costs.num_parameters(run.config)
    assert f" device(s); {num_adapted} are trained ({share:.2%})\n" in printed
    before = load_pretrained(folder, "bfloat16").params
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, np.asarray(y, np.float32)),
        load_run(Path("run"), dtype="float32").params["embedding"],
        before["embedding"],
    )
    exporting.export(exporting.Export(checkpoint=Path("run"), output=Path("adapters")))
    names = {path.name for path in Path("adapters").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    card = Path("adapters/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    assert f"Low-rank adapters of {num_adapted} parameters, trained with jaxformer" in card
    assert 'AutoPeftModelForCausalLM.from_pretrained("adapters")' in card
    settings = json.loads(Path("adapters/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder)
    assert settings["target_modules"] == ["down_proj", "q_proj"]
    exporting.export(exporting.Export(checkpoint=Path("run"), output=Path("whole"), merge=True))

    def logits(name):
        config, params, *_ = load_run(Path(name))
        return Transformer(config).apply({"params": params}, np.arange(24).reshape(2, 12))

    assert run.config.adapter == LoRA(rank=3, targets=("query", "down"), base_dtype="bfloat16")
    np.testing.assert_allclose(logits("whole"), logits("run"), atol=1e-5)
    change = float(np.abs(logits("run") - logits("base")).max())
    # PEFT's adapters are read onto the folder's own numbers, those of the run are in bfloat16.
    assert float(np.abs(logits("adapters") - logits("run")).max()) < change / 20
    with pytest.raises(ValueError, match="Merge them first: jaxformer export"):
        tune("--init", "adapters", *FLAGS)
    with pytest.raises(ValueError, match="--merge is for a model with adapters; .*base has none"):
        exporting.export(exporting.Export(checkpoint=folder, output=Path("x"), merge=True))


@pytest.mark.slow
def test_adapters_resume_bitwise_and_train_on_a_mesh(folder):
    flags = ["--init", str(folder), *FLAGS, *ADAPTER]
    tune(*flags, "--devices", "1", "--output", "one")
    tune(*flags, "--steps", "3", "--schedule-steps", "6", "--devices", "1", "--output", "cut")
    tune("--resume", "--output", "cut", "--steps", "6")
    assert losses("cut") == losses("one")
    pair = (load_run(Path(name)).params for name in ("cut", "one"))
    jax.tree.map(np.testing.assert_array_equal, *pair)
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2", "--devices", "8"]
    tune(*flags, *mesh, "--output", "eight")
    np.testing.assert_allclose(losses("eight"), losses("one"), rtol=1e-5)
