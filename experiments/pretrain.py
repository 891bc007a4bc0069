"""Pretrain a decoder on text.

    python -m experiments.pretrain                                  # minutes on a laptop's CPU
    python -m experiments.pretrain --steps 200 --model.num-layers 2 # any field is a flag
    python -m experiments.pretrain small --corpus "TextFiles(path='my.txt')"
    python -m experiments.pretrain --resume --steps 2000            # go on where it stopped

Trains on the source code of Python's standard library unless told otherwise, reports bits per byte
on held-out text beside gzip, and ends with a sample. Everything is written under --output.
"""

import contextlib
import hashlib
import json
import pprint
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.command_line import fail, parse, readable_errors
from jaxformer import costs, data
from jaxformer import functional as F
from jaxformer.config import GLU, Decoder, Head, MultiHead, QKNorm, TransformerConfig, to_json
from jaxformer.generation import Sample, generate
from jaxformer.layers import Transformer
from jaxformer.layers.mode import Remat
from jaxformer.training import loop, step
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.hardware import machine_peak_flops
from jaxformer.training.metrics import JsonLines, Metrics, TensorBoard, WeightsAndBiases, Writer
from jaxformer.training.optimizers import Muon, OptimizerConfig, learning_rate, make_optimizer
from jaxformer.training.progress import Progress, format_count, printable
from jaxformer.training.schedules import Cosine

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """What to train, on what, for how long.

    Attributes:
        model: The model.
        corpus: The text.
        tokenizer: How text becomes tokens; trained on the training text where it needs training.
        held_out: Share of the text that is kept for evaluation.
        length: Tokens of a row.
        batch_size: Rows of a batch, over all devices.
        accumulation: In how many parts a batch is worked through, to save memory.
        steps: Stop after this many updates, counted from the start of the run.
        schedule_steps: Updates that the learning-rate schedule is planned for. It does not follow
            --steps, so that a run can stop early and be resumed without another result.
        optimizer: How gradients become updates.
        objective: Terms of the loss beside the cross-entropy.
        dtype: Of the computation; parameters are float32.
        remat: What the backward pass recomputes to save memory.
        scan: Run layers as one compiled loop (compiles fast) or unrolled (runs faster on a CPU).
        devices: How many devices to use; None is all. On a CPU, how many to simulate.
        seed: Of parameters, batches, dropout and the sample.
        output: Folder for checkpoints, metrics and the tokenizer; None is runs/pretrain-N, a new
            one, or with --resume the newest.
        cache: Folder for tokenised text.
        resume: Go on from the newest checkpoint in the output folder.
        log_every: Updates between lines in the metrics.
        evaluate_every: Updates between evaluations.
        evaluate_rows: Held-out rows of an evaluation during the run; the last one reads all.
        save_every: Updates between checkpoints; the last update is always saved.
        keep: How many checkpoints to keep.
        tensorboard: Whether to write TensorBoard files.
        wandb: Project to log to at Weights and Biases.
        prompt: Text that the sample at the end continues.
        sample_tokens: Length of that sample.
    """

    model: TransformerConfig
    corpus: data.Corpus = data.StandardLibrary()
    tokenizer: data.TokenizerConfig = data.BPE(vocab_size=4096)
    held_out: float = 0.05
    length: int = 256
    batch_size: int = 8
    accumulation: int = 1
    steps: int = 600
    schedule_steps: int = 600
    optimizer: OptimizerConfig
    objective: step.Objective = step.Objective()
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "none"
    scan: bool = False
    devices: int | None = None
    seed: int = 0
    output: Path | None = None
    cache: Path = Path("runs/cache")
    resume: bool = False
    log_every: int = 10
    evaluate_every: int = 100
    evaluate_rows: int = 64
    save_every: int = 200
    keep: int = 3
    tensorboard: bool = True
    wandb: str | None = None
    prompt: str = "def "
    sample_tokens: int = 160

    def __post_init__(self):
        for name in ("length", "batch_size", "accumulation", "steps", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("evaluate_every", "evaluate_rows", "save_every", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie between 0 and {2**32 - 1}; got {self.seed}.")
        longest = self.model.max_length
        if longest is not None and self.length > longest:
            raise ValueError(
                f"length {self.length} exceeds the model's {longest} learned positions."
            )
        if not isinstance(self.model.topology, Decoder):
            raise ValueError(f"Pretraining on text takes a Decoder; got {self.model.topology}.")


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


def last_checkpoint(checkpoints: Checkpoints, output: Path) -> str:
    """What is left of a run that ends early."""
    latest = checkpoints.latest()
    if latest is None:
        return "There is no checkpoint yet."
    return f"The last good checkpoint is {latest} in {output}."


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


def sha256(content: bytes | memoryview) -> str:
    """The digest that says whether text or tokenizer are the same."""
    return hashlib.sha256(content).hexdigest()


def refuse_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume what was another run, naming each difference."""
    old, new = flatten(before), flatten(now)
    changed = [
        f"  {name}: {old.get(name)} in the checkpoint, {new.get(name)} now"
        for name in sorted(old.keys() | new.keys())
        if name.startswith(("run.", "data.", "tokenizer")) and old.get(name) != new.get(name)
    ]
    if changed:
        raise ValueError("The checkpoint is of another run:\n" + "\n".join(changed))


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists by their path."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        parts = [flatten(value, f"{path}.{name}" if path else str(name)) for name, value in items]
        return {name: leaf for part in parts for name, leaf in part.items()}
    return {path: tree}


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


def command_line(*more: str) -> str:
    """The command that started this process, without what is said of its folder, with more."""
    kept, arguments = [], iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--output":
            next(arguments, None)
        elif argument not in ("--resume", "--no-resume") and not argument.startswith("--output="):
            kept.append(argument)
    return shlex.join(["python", "-m", "experiments.pretrain", *kept, *more])


def llama(*, model_dim: int, num_layers: int, num_heads: int, vocab_size: int) -> TransformerConfig:
    """A small decoder of today's common design: RoPE, RMSNorm, SwiGLU, QK-norm, tied head."""
    return TransformerConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        attention=MultiHead(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=model_dim // num_heads,
            qk_norm=QKNorm(),
        ),
        feed_forward=(GLU(hidden_dim=8 * model_dim // 3 // 32 * 32),),
        head=Head(tied=True),
    )


def muon(*, warmup_steps: int) -> OptimizerConfig:
    """The recipe of all runs: Muon under a cosine."""
    return OptimizerConfig(
        schedule=Cosine(peak=0.02, warmup_steps=warmup_steps), optimizer=Muon(adamw_rate=0.15)
    )


RUNS = {
    "default": Pretrain(
        model=llama(model_dim=192, num_layers=4, num_heads=4, vocab_size=4096),
        optimizer=muon(warmup_steps=20),
    ),
    "tiny": Pretrain(
        model=llama(model_dim=64, num_layers=2, num_heads=4, vocab_size=512),
        tokenizer=data.BPE(vocab_size=512),
        length=64,
        steps=20,
        schedule_steps=20,
        evaluate_every=10,
        save_every=10,
        optimizer=muon(warmup_steps=2),
    ),
    "small": Pretrain(
        model=llama(model_dim=768, num_layers=12, num_heads=12, vocab_size=32768),
        tokenizer=data.BPE(vocab_size=32768),
        length=1024,
        batch_size=64,
        steps=10_000,
        schedule_steps=10_000,
        evaluate_every=500,
        evaluate_rows=256,
        save_every=1000,
        dtype="bfloat16",
        remat="dots",
        scan=True,
        optimizer=muon(warmup_steps=200),
    ),
}

if __name__ == "__main__":
    with readable_errors():
        main(parse(RUNS, __doc__))
