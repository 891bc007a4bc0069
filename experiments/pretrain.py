"""Pretrain a decoder on text.

    python -m experiments.pretrain                                  # minutes on a laptop's CPU
    python -m experiments.pretrain --steps 200 --model.num-layers 2 # any field is a flag
    python -m experiments.pretrain small --corpus "TextFiles(path='my.txt')"
    python -m experiments.pretrain --resume --steps 2000            # go on where it stopped

Trains on the source code of Python's standard library unless told otherwise, reports bits per byte
on held-out text beside gzip, and ends with a sample. Everything is written under --output.
"""

import contextlib
import json
import pprint
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.command_line import INTERRUPTED, fail, parse, readable_errors
from experiments.pretrain_runs import RUNS, Pretrain
from experiments.resuming import command_line, last_checkpoint, refuse_changes, sha256
from jaxformer import costs, data
from jaxformer import functional as F
from jaxformer.config import to_json
from jaxformer.generation import Sample, generate
from jaxformer.layers import Transformer
from jaxformer.training import loop, step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.hardware import machine_peak_flops
from jaxformer.training.metrics import JsonLines, Metrics, TensorBoard, WeightsAndBiases, Writer
from jaxformer.training.optimizers import learning_rate, make_optimizer
from jaxformer.training.progress import Progress, format_count, printable

# What a resumed run may not change, for its result would be another one. Devices, remat and scan
# may change; they round differently, and devices draw other dropout.
FIXED = (
    "model", "tokenizer", "held_out", "length", "batch_size", "accumulation", "schedule_steps",
    "optimizer", "objective", "dtype", "seed",
)  # fmt: skip


class Text(NamedTuple):
    """The corpus, ready to train on."""

    tokenizer: data.Tokenizer
    train: data.PackedRows
    held_out: data.PackedRows
    gzip: float  # bits per byte of the held-out text


class Session(NamedTuple):
    """A run with everything it needs."""

    run: Pretrain
    output: Path
    text: Text
    mesh: Mesh
    model: Transformer
    optimizer: optax.GradientTransformation


def main(run: Pretrain) -> Path:
    """Train, evaluate, sample; returns the output folder."""
    if run.devices is not None:
        simulate_devices(run.devices)
    output = output_folder(run)
    print(pprint.pformat(run, width=100), flush=True)
    text = prepare(run)
    check_vocabulary(run, text)
    mesh = step.data_mesh(run.devices)
    step.check_batch_size(run.batch_size, mesh, run.accumulation)
    model = Transformer(run.model, dtype=run.dtype, remat=run.remat, scan=run.scan)
    optimizer = make_optimizer(run.optimizer, run.schedule_steps)
    session = Session(run, output, text, mesh, model, optimizer)
    print_estimate(run, mesh)
    with Checkpoints(output / "checkpoints", keep=run.keep) as checkpoints:
        try:
            state = train(session, checkpoints)
        except loop.NonFiniteLossError as error:
            checkpoints.wait()
            fail(
                f"{error} {last_checkpoint(checkpoints, output)} "
                "A lower peak of the learning rate usually helps."
            )
        except KeyboardInterrupt:
            checkpoints.wait()
            print(f"\nInterrupted. {last_checkpoint(checkpoints, output)}", file=sys.stderr)
            if checkpoints.latest() is not None:
                again = command_line("--resume", "--output", str(output))
                print(f"To go on from there:\n  {again}", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
    print_sample(session, state.params)
    print(f"\nEverything is in {output}. To repeat the run:\n  {command_line()}")
    return output


def simulate_devices(count: int) -> None:
    """On a CPU, one device per simulated core; elsewhere devices are what they are."""
    with contextlib.suppress(RuntimeError):  # JAX runs already; data_mesh says what is missing
        jax.config.update("jax_num_cpu_devices", count)


def output_folder(run: Pretrain) -> Path:
    """The folder asked for, or runs/pretrain-N: the next one, or the newest to resume."""
    folder = run.output
    if folder is None:
        # A run that ended before its first checkpoint is nothing to resume.
        earlier = Path("runs").glob("pretrain-*/checkpoints" if run.resume else "pretrain-*")
        names = [f.parts[1].removeprefix("pretrain-") for f in earlier]
        newest = max((int(name) for name in names if name.isdigit()), default=0)
        if run.resume and not newest:
            raise ValueError("There is no runs/pretrain-N to resume; pass --output FOLDER.")
        folder = Path("runs") / f"pretrain-{newest if run.resume else newest + 1}"
    elif not run.resume:
        ours = ("checkpoints", "metrics.jsonl", "tokenizer.json", "tensorboard")
        found = [name for name in ours if (folder / name).exists()]
        if found:
            raise ValueError(
                f"{folder} holds {', '.join(found)} of an earlier run. Pass --resume to go on "
                "with it, or another --output."
            )
    return folder


def prepare(run: Pretrain) -> Text:
    """Read the text, split it, tokenise it; packed rows are opened again where they exist."""
    print(f"Corpus: {run.corpus}", flush=True)
    parts = data.split(data.documents(run.corpus), held_out=run.held_out)
    tokenizer = data.build_tokenizer(run.tokenizer, [d.text for d in parts.train])
    train, held_out = (
        data.pack(documents, tokenizer, row_length=run.length, folder=run.cache)
        for documents in parts
    )
    for name, rows in (("to train on", train), ("held out", held_out)):
        print(
            f"  {name}: {rows.num_documents} documents, {format_count(rows.num_bytes)} bytes, "
            f"{format_count(rows.num_targets)} tokens",
            flush=True,
        )
    return Text(tokenizer, train, held_out, data.gzip_bits_per_byte(parts.held_out))


def check_vocabulary(run: Pretrain, text: Text) -> None:
    """Refuse a tokenizer whose last tokens would have no row in the model's table."""
    have, need = run.model.vocab_size, text.tokenizer.vocab_size
    if have < need:
        raise ValueError(
            f"The tokenizer has {need} tokens, the model {have}; pass --model.vocab-size {need}."
        )


def print_estimate(run: Pretrain, mesh: Mesh) -> None:
    """Say what memory a device will need, before anything is allocated."""
    parameters = costs.parameters(run.model)
    kept = costs.activation_bytes(
        run.model,
        run.batch_size // mesh.size // run.accumulation,
        run.length,
        remat=run.remat,
        bytes_per_number=jnp.dtype(run.dtype).itemsize,
    )
    print(
        f"Estimate per device: {format_count(parameters)} parameters take "
        f"{4 * parameters / 2**20:.0f} MiB, their gradients as much, the optimizer's state up to "
        f"twice as much; activations about {kept / 2**20:.0f} MiB."
    )
    if run.steps > run.schedule_steps:
        print(
            f"The schedule ends after {run.schedule_steps} updates; the learning rate then stays "
            "where it is. To train longer at a higher one, start with larger --schedule-steps."
        )


def train(session: Session, checkpoints: Checkpoints) -> step.TrainState:
    """Bring the state to `run.steps` updates, reporting on the way."""
    run, text, mesh = session.run, session.text, session.mesh
    description = describe(session)
    state = begin(session, checkpoints, description)
    start = int(state.step)
    batches = data.Batches(text.train, batch_size=run.batch_size, seed=run.seed)

    def fetch(at: int) -> data.Batch:
        return step.put_batch(batches[at], mesh)

    def due(at: int) -> bool:
        return at % run.evaluate_every == 0 or at % run.save_every == 0

    update = compile_update(session, state, fetch(start))
    tally = step.make_tally(session.model, mesh)
    meter = Meter(run, mesh)
    title = f"{format_count(costs.parameters(run.model))} parameters, {mesh.size} device(s)"
    with (
        Metrics(writers(session, start)) as metrics,
        Progress(run.steps, start_step=start, title=title) as progress,
    ):
        updates = loop.train(state, update, fetch, start=start, stop=run.steps, settle=due)
        for at, state, finished in updates:
            for done, numbers in meter.read(finished):
                progress.update(done.step, **numbers)
                if done.step % run.log_every == 0 or done.step == run.steps:
                    metrics.write(done.step, {**numbers, "gradient_norm": done.gradient_norm})
            if at % run.save_every == 0 or at == run.steps:
                checkpoints.save(at, state, description)
            if at % run.evaluate_every == 0 and at < run.steps:
                bits = held_out_bits(session, tally, state.params, rows=run.evaluate_rows)
                progress.update(at, bits_per_byte=bits)
                metrics.write(at, {"held_out_bits_per_byte": bits})
            if due(at):
                meter.restart()
        bits = held_out_bits(session, tally, state.params)
        progress.update(run.steps, bits_per_byte=bits)
        metrics.write(run.steps, {"final_held_out_bits_per_byte": bits})
    print(f"\nHeld-out text: {bits:.3f} bits per byte; gzip -9 needs {text.gzip:.3f}.")
    return state


def begin(
    session: Session, checkpoints: Checkpoints, description: dict[str, Any]
) -> step.TrainState:
    """A fresh state beside its tokenizer, or the newest checkpoint's."""
    run, output, text, mesh, model, optimizer = session
    if not run.resume:
        text.tokenizer.save(output)
        return step.init_state(model, optimizer, jax.random.key(run.seed), mesh)
    refuse_changes(checkpoints.describe(), description)
    state = checkpoints.restore(None, step.abstract_state(model, optimizer, mesh))
    done = int(state.step)
    if done >= run.steps:
        raise ValueError(f"The checkpoint has {done} steps already; pass --steps N with N above.")
    print(f"Resuming after step {done}.")
    return state


def describe(session: Session) -> dict[str, Any]:
    """What a checkpoint says of itself: everything that the result depends on."""
    run, text = session.run, session.text
    chosen = json.loads(to_json(run))
    return {
        "config": chosen["model"],
        "run": {name: chosen[name] for name in FIXED},
        "tokenizer": sha256(text.tokenizer.to_json().encode()),
        "data": {
            "train": sha256(np.ascontiguousarray(text.train.tokens).data),
            "held_out": sha256(np.ascontiguousarray(text.held_out.tokens).data),
        },
    }


def compile_update(session: Session, state: step.TrainState, batch: data.Batch):
    """Compile the update for exactly these shapes, and say what memory it will take."""
    run = session.run
    update = step.make_update(
        session.model,
        session.optimizer,
        session.mesh,
        objective=run.objective,
        accumulation=run.accumulation,
        seed=run.seed,
    )
    since = time.monotonic()
    compiled = update.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    print(
        f"Compiled in {time.monotonic() - since:.1f} s. Memory per device: "
        f"{memory.argument_size_in_bytes / 2**20:.0f} MiB of parameters, optimizer state and "
        f"batch, {memory.temp_size_in_bytes / 2**20:.0f} MiB of working space.",
        flush=True,
    )
    return compiled


class Meter:
    """Turns finished updates into the numbers that are shown."""

    def __init__(self, run: Pretrain, mesh: Mesh):
        self.tokens = run.batch_size * run.length
        self.work = costs.training_flops_per_token(run.model, run.length)
        self.peak = machine_peak_flops(list(mesh.devices.flat))
        # All at once: computed one by one they would wait in line behind the updates.
        rate = learning_rate(run.optimizer, run.schedule_steps)
        self.rates = jax.device_get(jax.jit(jax.vmap(rate))(jnp.arange(run.steps)))
        self.restart()

    def restart(self) -> None:
        """Leave out the time until now, which went into something else."""
        self.since = time.monotonic()

    def read(self, finished: list[loop.Finished]) -> list[tuple[loop.Finished, dict[str, float]]]:
        """Each finished update with its loss, learning rate, and the speed since the last."""
        if not finished:
            return []
        now = time.monotonic()
        speed = self.tokens * len(finished) / (now - self.since)
        self.since = now
        shared = {"tokens_per_second": speed, "utilisation": speed * self.work / self.peak}
        return [
            (done, {"loss": done.loss, "learning_rate": float(self.rates[done.step - 1]), **shared})
            for done in finished
        ]


def held_out_bits(session: Session, tally: Any, params: Any, *, rows: int | None = None) -> float:
    """Bits per byte of held-out text: of all of it, or of some rows evenly spread."""
    run, held_out, mesh = session.run, session.text.held_out, session.mesh
    if rows is not None and rows < len(held_out):
        some = held_out[np.linspace(0, len(held_out) - 1, rows).astype(int)]
        held_out = replace(held_out, **some._asdict())
    batches = data.evaluation_batches(held_out, batch_size=run.batch_size)
    nats, tokens = loop.evaluate(tally, params, (step.put_batch(b, mesh) for b in batches))
    whole = session.text.held_out
    return float(F.bits_per_byte(nats * whole.num_targets / tokens, whole.num_bytes))


def writers(session: Session, start: int) -> list[Writer]:
    """Where the numbers go; what an earlier attempt wrote after `start` is dropped."""
    run, output = session.run, session.output
    earlier = start if run.resume else None
    chosen: list[Writer] = [JsonLines(output / "metrics.jsonl", resume_from=earlier)]
    if run.tensorboard:
        chosen.append(TensorBoard(output / "tensorboard", resume_from=earlier))
    if run.wandb is not None:
        chosen.append(WeightsAndBiases(run.wandb, output.name, describe(session)))
    return chosen


def print_sample(session: Session, params: Any) -> None:
    """Print how the model goes on from the prompt."""
    run, tokenizer = session.run, session.text.tokenizer
    prompt = [tokenizer.end_of_text, *tokenizer.encode(run.prompt)]
    longest = run.model.max_length or run.length
    new = min(run.sample_tokens, longest - len(prompt))
    if new < 1:
        print(f"No sample: the prompt's {len(prompt)} tokens fill the length of {longest}.")
        return
    tokens = generate(
        run.model,
        jax.device_put(params, jax.devices()[0]),
        jnp.asarray(prompt, jnp.int32),
        max_new_tokens=new,
        vocab_size=tokenizer.vocab_size,
        sampler=Sample(temperature=0.8, top_p=0.95),
        key=jax.random.key(run.seed),
        dtype=run.dtype,
    )
    print(f"\nSample:\n{printable(tokenizer.decode(np.asarray(tokens)[1:]), sys.stdout)}")


if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__))
