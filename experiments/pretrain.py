"""Pretrain a decoder on text.

    python -m experiments.pretrain                                  # minutes on a laptop's CPU
    python -m experiments.pretrain --steps 200 --model.num-layers 2 # any field is a flag
    python -m experiments.pretrain small --corpus "TextFiles(path='my.txt')"
    python -m experiments.pretrain --resume --steps 2000            # go on where it stopped
    python -m experiments.pretrain --output X --resume-or-begin     # the same, however often given

Trains on the source code of Python's standard library unless told otherwise, reports bits per byte
on held-out text beside gzip, and ends with a sample. Everything is written under --output.

SIGINT (Ctrl-C), SIGTERM and SIGHUP end a run once the update it is in is made and saved; the exit
status is 130, 143 or 129, and --resume goes on from there. The third such signal ends it at once.
One folder is one run's at a time. Where nobody reads what is printed any more, training goes on.
"""

import pprint
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.before_training import check_before_text, check_before_training
from experiments.beginning import begin, find_start
from experiments.command_line import parse, readable_errors
from experiments.corpus import encode_prompt, read_corpus
from experiments.devices import prepare_devices
from experiments.meter import Meter
from experiments.pretrain_runs import RUNS, Pretrain
from experiments.resuming import ending_with_others, sha256
from experiments.running import (
    Machinery,
    compile_update,
    explained_end,
    machinery,
    make_updates,
    print_end,
)
from experiments.study_plots import plot_run
from experiments.training_run import describe, output_folder
from jaxformer import data
from jaxformer import functional as F
from jaxformer.generation import Sample, generate
from jaxformer.parallel import is_first, local_rows, put_batch
from jaxformer.training import loop, step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.progress import Progress, format_count, printable

# What a resumed run may not change, for its result would be another one. Devices, remat and scan
# may change; they round differently, and devices draw other dropout.
FIXED = (
    "model", "tokenizer", "held_out", "length", "batch_size", "accumulation", "schedule_steps",
    "optimizer", "objective", "expert_room", "dtype", "seed",
)  # fmt: skip


class Text(NamedTuple):
    """The corpus, ready to train on."""

    tokenizer: data.Tokenizer
    train: data.PackedRows
    held_out: data.PackedRows
    gzip: float  # bits per byte of the held-out text


def main(run: Pretrain) -> Path:
    """Train, evaluate, sample; returns the output folder."""
    prepare_devices(run)
    with output_folder(run) as output:
        print(pprint.pformat(run, width=100), flush=True)
        using = machinery(run, output, lengths=[run.length])
        check_before_text(run, using.mesh, length=run.length)
        text = prepare(run)
        check_before_training(run, text.tokenizer)
        if run.sample_tokens is not None:
            encode_prompt(run, text.tokenizer)
        work(run, text, using)
    return output


def work(run: Pretrain, text: Text, using: Machinery) -> None:
    """Train, sample, and draw what came of it."""
    output = using.output
    with (
        Checkpoints(output / "checkpoints", keep=run.keep) as checkpoints,
        ending_with_others(run, checkpoints, output),
        explained_end(run, checkpoints, output),
    ):
        state = train(run, text, using, checkpoints)
    if state is not None and run.sample_tokens is not None:
        print_sample(run, text, state.params, using.mesh, new=run.sample_tokens)
    print_end(run, output)
    if is_first():
        plot_run(output / "run.png", read_json_lines(output / "metrics.jsonl"), gzip=text.gzip)


def prepare(run: Pretrain) -> Text:
    """Read the text, split it, tokenise it; packed rows are opened again where they exist."""
    tokenizer, train, held_out, documents = read_corpus(run, run.cache)
    for name, rows in (("to train on", train), ("held out", held_out)):
        print(
            f"  {name}: {rows.num_documents} documents, {format_count(rows.num_bytes)} bytes, "
            f"{format_count(rows.num_targets)} tokens",
            flush=True,
        )
    return Text(tokenizer, train, held_out, data.gzip_bits_per_byte(documents))


def train(
    run: Pretrain, text: Text, using: Machinery, checkpoints: Checkpoints
) -> step.TrainState | None:
    """Bring the state to `run.steps` updates, reporting on the way; None if it was there before."""
    mesh = using.mesh
    description = describe(
        run,
        FIXED,
        tokenizer=sha256(text.tokenizer.to_json().encode()),
        data={
            "train": text.train.digest(),
            "held_out": text.held_out.digest(),
        },
    )
    start = find_start(run, using, checkpoints, description)
    if start is None:
        return None
    rows = local_rows(mesh, run.batch_size)
    batches = data.Batches(text.train, batch_size=run.batch_size, seed=run.seed, local=rows)
    tally = step.make_tally(using.model, mesh)

    def fetch(at: int) -> data.Batch:
        return put_batch(batches[at], mesh, run.batch_size)

    update = compile_update(run, using, fetch(start))
    state = begin(run, using, text.tokenizer, checkpoints, start)

    def evaluate(at: int, params: Any, progress: Progress) -> dict[str, float]:
        last = at == run.steps
        bits = held_out_bits(
            run, text, mesh, tally, params, rows=None if last else run.evaluate_rows
        )
        progress.update(at, bits_per_byte=bits)
        if not last:
            return {"held_out_bits_per_byte": bits}
        return {
            "final_held_out_bits_per_byte": bits,
            "gzip_bits_per_byte": text.gzip,
            "tokens_per_byte": text.train.num_targets / text.train.num_bytes,
        }

    state, numbers = make_updates(
        run,
        using,
        state,
        update,
        fetch,
        meter=Meter(run, mesh, length=run.length),
        checkpoints=checkpoints,
        description=description,
        evaluate=evaluate,
        loss=lambda numbers: numbers["held_out_bits_per_byte"],
    )
    bits = numbers["final_held_out_bits_per_byte"]
    print(f"\nHeld-out text: {bits:.3f} bits per byte; gzip -9 needs {text.gzip:.3f}.")
    return state


def held_out_bits(
    run: Pretrain, text: Text, mesh: Mesh, tally: Any, params: Any, *, rows: int | None = None
) -> float:
    """Bits per byte of held-out text: of all of it, or of some rows evenly spread."""
    held_out = whole = text.held_out
    if rows is not None and rows < len(held_out):
        some = held_out[np.linspace(0, len(held_out) - 1, rows).astype(int)]
        held_out = replace(held_out, **some._asdict())
    size = run.batch_size
    batches = data.evaluation_batches(held_out, batch_size=size, local=local_rows(mesh, size))
    nats, tokens = loop.evaluate(tally, params, (put_batch(b, mesh, size) for b in batches))
    return float(F.bits_per_byte(nats * whole.num_targets / tokens, whole.num_bytes))


def print_sample(run: Pretrain, text: Text, params: Any, mesh: Mesh, *, new: int) -> None:
    """Print how the model goes on from the prompt."""
    tokenizer = text.tokenizer
    prompt = encode_prompt(run, tokenizer)
    longest = run.model.max_length or run.length
    tokens = generate(
        run.model,
        params,
        np.asarray(prompt, np.int32),
        max_new_tokens=min(new, longest - len(prompt)),
        vocab_size=tokenizer.vocab_size,
        sampler=Sample(temperature=0.8, top_p=0.95),
        key=jax.random.key(run.seed),
        dtype=run.dtype,
        mesh=mesh,
    )
    print(f"\nSample:\n{printable(tokenizer.decode(np.asarray(tokens)[1:]), sys.stdout)}")


if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__))
