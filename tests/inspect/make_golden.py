"""Write golden/*.npz: attention weights of transformers; needs the extra parity.

python -m tests.inspect.make_golden [names]

The models and their inputs are those of tests/interop/golden. A file holds `decoder`, `encoder` and
`cross`, as far as there are such attentions ([layers, batch, heads, queries, keys]), and `stream`,
the hidden states of the stack that the head reads ([layers + 1, batch, time, width]; the last one
is after the last norm).
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.interop.golden_files import read_golden, write_folder

GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    *("llama", "llama2_70b", "gpt2", "bloom", "t5", "mt5", "marian", "gemma2", "mistral"),
    *("gpt_neox", "gptj", "falcon_7b", "deepseek_v2", "cohere"),
)
PARTS = {
    "decoder": ("decoder_attentions", "attentions"),
    "encoder": ("encoder_attentions",),
    "cross": ("cross_attentions",),
    "stream": ("decoder_hidden_states", "hidden_states"),
}


def golden(name):
    """The arrays of one file."""
    reference = read_golden(name)
    kind = transformers.AutoModelForCausalLM
    if reference.config.get("is_encoder_decoder"):
        kind = transformers.AutoModelForSeq2SeqLM
    with tempfile.TemporaryDirectory() as path:
        folder = write_folder(reference, Path(path) / name)
        model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    example = reference.examples[0]
    ids = {"input_ids": torch.tensor(example.tokens.astype(np.int64))}
    if example.source is not None:
        source = torch.tensor(example.source.astype(np.int64))
        ids = {"input_ids": source, "decoder_input_ids": ids["input_ids"]}
    with torch.no_grad():
        outputs = model(**ids, output_attentions=True, output_hidden_states=True, use_cache=False)
    if np.abs(outputs.logits.numpy() - example.logits).max() > 1e-5:
        raise ValueError(f"{name}: these are not the logits of the golden file")
    arrays = {}
    for part, names in PARTS.items():
        values = next((outputs[n] for n in names if outputs.get(n)), None)
        if values is not None:
            arrays[part] = np.stack([x.numpy() for x in values]).astype(np.float32)
    return arrays


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or NAMES:
        arrays = golden(name)
        np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
        print(name, {part: x.shape for part, x in arrays.items()})
