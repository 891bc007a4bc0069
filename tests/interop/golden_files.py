"""Reads the golden .npz files as folders, tensors and inputs, without torch."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "golden"
STEP = 64
# A norm of what linear attention reads, which is nearly 0 at times: there the logits that
# transformers computes in float32 and in float64 differ by 3e-5 to 1e-4.
NORMED_READS = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "olmo_hybrid_nope"}
NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


class Example(NamedTuple):
    tokens: np.ndarray
    source: np.ndarray | None
    logits: np.ndarray


class GoldenReference(NamedTuple):
    config: dict
    tensors: dict[str, np.ndarray]
    examples: list[Example]


def tolerance(name, logits):
    """Largest difference of logits from the reference's, by the largest of these."""
    return (2e-5 if name in NORMED_READS else 1e-5) * np.abs(logits).max()


def read_golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    layout = json.loads(str(arrays["layout"]))
    ends = np.cumsum([int(np.prod(shape)) for shape in layout.values()])
    parts = np.split(arrays["weights"].astype(np.float32) / STEP, ends[:-1])
    tensors = {
        key: part.reshape(shape) for (key, shape), part in zip(layout.items(), parts, strict=True)
    }
    count = sum(key.startswith("tokens_") for key in arrays)
    examples = [
        Example(
            arrays[f"tokens_{i}"].astype(np.int32),
            arrays[f"source_{i}"].astype(np.int32) if f"source_{i}" in arrays else None,
            arrays[f"logits_{i}"],
        )
        for i in range(count)
    ]
    return GoldenReference(json.loads(str(arrays["config"])), tensors, examples)


def write_folder(golden, folder):
    """The Hugging Face folder that the golden file was made of."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden.config))
    tensors = {key: np.ascontiguousarray(x) for key, x in golden.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
