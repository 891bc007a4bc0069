"""Train the model of model.py: text, mesh, train step, checkpoints, and a sample at the end.

python train.py --steps 300        # the same command again resumes from the last checkpoint
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from model import Transformer

from jaxformer import data, parallel
from jaxformer import functional as F
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.loop import evaluate
from jaxformer.training.optimizers import Muon, OptimizerConfig, make_optimizer
from jaxformer.training.schedules import Cosine
from jaxformer.training.skip_step import SkipStepConfig, init_skip_state
from jaxformer.training.train_step import EvalSums, StepMetrics, TrainState, apply_gradients


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run; each is a flag."""

    text: str | None = None  # file or folder; None is Python's standard library
    prompt: str = "def "  # start of the sample
    output: str = "run"  # folder of the packed rows and the checkpoints
    vocab_size: int = 2048
    length: int = 128  # tokens of a row
    batch_size: int = 16  # rows of a batch, of all devices together
    model_dim: int = 128
    hidden_dim: int = 384
    num_layers: int = 4
    num_heads: int = 4
    dtype: str = "float32"  # of the computation; use bfloat16 on GPUs
    learning_rate: float = 0.02
    steps: int = 300
    print_every: int = 10
    save_every: int = 100
    seed: int = 0


def prepare_text(settings: Settings) -> tuple[data.Tokenizer, data.PackedRows, data.PackedRows]:
    """Tokenizer, training rows and held-out rows; packed once, then read from the folder."""
    corpus = data.TextFiles(path=settings.text) if settings.text else data.StandardLibrary()
    train, held_out = data.split(data.documents(corpus), held_out=0.01)
    bpe = data.BPE(vocab_size=settings.vocab_size)
    tokenizer = data.build_tokenizer(bpe, (document.text for document in train))
    pack = partial(data.pack, row_length=settings.length, folder=f"{settings.output}/rows")
    return tokenizer, pack(train, tokenizer), pack(held_out, tokenizer)


def describe(path: tuple[Any, ...], x: jax.Array) -> parallel.ParameterMetadata:
    """What the optimizer knows of a parameter: Muon updates kernels, AdamW all others."""
    match path[-1].key:
        case "kernel":
            return parallel.ParameterMetadata(x.shape, ("inputs", "outputs"), 1)
        case "embedding":
            return parallel.ParameterMetadata(x.shape, ("vocabulary", "features"), 1)
    return parallel.ParameterMetadata(x.shape, ("features",) * x.ndim, 0)


def init_state(
    model: Transformer, settings: Settings, mesh: Mesh
) -> tuple[TrainState, optax.GradientTransformation]:
    """State before the first step, the same on every device; and the optimizer."""
    key = jax.random.key(settings.seed)
    params = jax.jit(model.init)(key, np.zeros((1, 2), np.int32))["params"]
    schedule = Cosine(peak=settings.learning_rate, warmup_steps=settings.steps // 20)
    config = OptimizerConfig(schedule=schedule, optimizer=Muon(adamw_rate=0.15))
    metadata = jax.tree_util.tree_map_with_path(describe, params)
    optimizer = make_optimizer(config, settings.steps, metadata)  # or any optax transformation
    state = TrainState(jnp.int32(0), {}, params, optimizer.init(params), init_skip_state())
    return jax.device_put(state, parallel.replicated(mesh)), optimizer


def make_steps(model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh) -> Any:
    """Train step, (state, batch) -> (state, metrics), and eval step, (params, batch) -> sums."""

    def sum_losses(params: Any, batch: data.Batch) -> EvalSums:
        """Sums over the rows of this device, and then over all devices."""
        inputs = batch.tokens, batch.positions, batch.segments, batch.targets
        losses: Any = model.apply({"params": params}, *inputs)
        sums = EvalSums(jnp.sum(losses, where=batch.loss_mask), jnp.sum(batch.loss_mask))
        return jax.lax.psum(sums, parallel.token_axes(mesh.shape))

    def mean_loss(params: Any, batch: data.Batch) -> jax.Array:
        sums = sum_losses(params, batch)
        return sums.nll_sum / sums.num_tokens

    specs = P(), parallel.batch_spec(mesh.shape)  # of parameters and of batches
    shard = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P())

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: data.Batch) -> tuple[TrainState, StepMetrics]:
        loss, gradients = shard(jax.value_and_grad(mean_loss))(state.trained, batch)
        norm = optax.tree.norm(gradients)
        return apply_gradients(optimizer, SkipStepConfig(), state, loss, gradients, norm, mesh)

    return train_step, jax.jit(shard(sum_losses))


@partial(jax.jit, static_argnums=(0, 4))
def sample(model: Transformer, params: Any, tokens: Any, start: int, num_ids: int, key: Any) -> Any:
    """Fill a row from index `start` on with ids below `num_ids`; each computes the whole row."""

    def add_token(i: jax.Array, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens[None])
        logits = F.scale_by_temperature(logits[0, i - 1, :num_ids], 0.8)
        choice = jax.random.categorical(jax.random.fold_in(key, i), F.keep_top_p(logits, 0.95))
        return tokens.at[i].set(choice)

    return jax.lax.fori_loop(start, len(tokens), add_token, tokens)


def main(settings: Settings) -> None:
    """Train, or resume, and print a sample."""
    tokenizer, train, held_out = prepare_text(settings)
    names = "vocab_size", "model_dim", "hidden_dim", "num_layers", "num_heads", "dtype"
    model = Transformer(**{name: getattr(settings, name) for name in names})
    mesh, size = parallel.make_mesh(parallel.MeshConfig()), settings.batch_size
    state, optimizer = init_state(model, settings, mesh)
    train_step, eval_step = make_steps(model, optimizer, mesh)
    put_batch = partial(parallel.put_batch, mesh=mesh, batch_size=size)
    batches = data.Batches(train, batch_size=size, seed=settings.seed)
    num_parameters = sum(x.size for x in jax.tree.leaves(state.params))
    print(f"{mesh.size} devices, {num_parameters:,} parameters, {train.num_targets:,} tokens")

    with Checkpoints(f"{settings.output}/checkpoints") as checkpoints:
        if checkpoints.latest_step() is not None:
            assert checkpoints.read_description()["text"] == settings.text, "new text: new --output"
            state = checkpoints.restore(None, state)
            print(f"resumed after step {state.step}")
        for step in range(int(state.step) + 1, settings.steps + 1):
            state, metrics = train_step(state, put_batch(batches[step - 1]))
            if step % settings.print_every == 0:
                print(f"step {step}: loss {metrics.loss:.4f}", flush=True)
            if step % settings.save_every == 0 or step == settings.steps:
                rows = data.evaluation_batches(held_out, batch_size=size)
                nats, num_tokens = evaluate(eval_step, state.params, map(put_batch, rows))
                bits = F.bits_per_byte(nats, held_out.num_bytes)
                print(f"held-out loss {nats / num_tokens:.4f}, {bits:.3f} bits per byte")
                checkpoints.save(step, state, asdict(settings), loss=nats / num_tokens)

    prompt = [data.bos_token_id(tokenizer), *tokenizer.encode(settings.prompt).tolist()]
    row = np.pad(np.array(prompt, np.int32), (0, settings.length - len(prompt)))
    params, key = jax.device_get(state.params), jax.random.key(settings.seed)
    print(tokenizer.decode(sample(model, params, row, len(prompt), tokenizer.vocab_size, key)))


if __name__ == "__main__":
    main(tyro.cli(Settings))
