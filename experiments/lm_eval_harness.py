"""Adapter for lm-evaluation-harness (extra ``eval``).

    import lm_eval
    from experiments.lm_eval_harness import LMEvalModel

    lm_eval.simple_evaluate(model=LMEvalModel.from_folder("path/to/folder"), tasks=["hellaswag"])

The harness: Gao et al., The Language Model Evaluation Harness, 2024, doi:10.5281/zenodo.12608602.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from experiments.evaluator import Evaluate, Evaluator, load_evaluator
from jaxformer import data
from jaxformer.generation import Greedy, Sample, generate, rolling_windows
from jaxformer.json_files import read_json

DEFAULT_MAX_NEW_TOKENS = 256  # of an answer, if the task sets none


class LMEvalModel(TemplateLM):
    """lm-evaluation-harness model: log-likelihoods and generated answers."""

    def __init__(self, evaluator: Evaluator):
        """Wrap an Evaluator; `from_folder` loads one."""
        super().__init__()
        self._using, self._model = evaluator, evaluator.model

    @classmethod
    def from_folder(cls, folder: str | Path, **fields: Any) -> "LMEvalModel":
        """Load the model of a folder with these fields of `Evaluate`."""
        return cls(load_evaluator(Evaluate(checkpoint=Path(folder), tasks=("any",), **fields)))

    @property
    def eot_token_id(self) -> int:
        """End-of-text token."""
        return self._model.stop_tokens[0]

    @property
    def prefix_token_id(self) -> int:
        """Token before an empty context: the tokenizer's bos, else its eos."""
        path, tokenizer = self._model.folder / "tokenizer_config.json", self._model.tokenizer
        if isinstance(tokenizer, data.BPETokenizer) and path.is_file():
            tokenizer_config = read_json(path)
            name = tokenizer_config.get("bos_token") or tokenizer_config.get("eos_token") or ""
            ids = tokenizer.encode_rendered_chat(
                [name["content"] if isinstance(name, dict) else name]
            )[0]
            if len(ids) == 1:
                return int(ids[0])
        return self._model.bos_tokens[0]

    @property
    def tokenizer_name(self) -> str:
        """Cache key of the rendered requests."""
        return str(self._using.run.checkpoint)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text, with special tokens unless `add_special_tokens` is False."""
        if add_special_tokens is False or not string:
            return self._model.encode(string, add_special_tokens=False)
        return self._model.encode_prompt(string)[0]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Split as the harness does; without a token to score, score the last one."""
        pair = super()._encode_pair(context, continuation)
        return pair if pair[1] else self._model.encode_continuation(context, continuation)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return [
            (each.log_probability, each.is_greedy) for each in self._using.log_likelihoods(pairs)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list:
        """Log-likelihood of whole texts in windows that overlap by one token."""
        size = self._using.length
        tokens = ([self.prefix_token_id, *self.tok_encode(x.args[0])] for x in requests)
        texts = [list(rolling_windows(ids, max_length=size, stride=size)) for ids in tokens]
        likelihoods = self._using.log_likelihoods(window for text in texts for window in text)
        return [sum(next(likelihoods).log_probability for _ in text) for text in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate each answer up to the first of its stop texts."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, options: dict[str, Any]) -> str:
        requested = options.get("max_gen_toks", options.get("max_new_tokens"))
        max_new_tokens = requested or DEFAULT_MAX_NEW_TOKENS
        num_kept = max(1, self._using.length - max_new_tokens)
        prompt = self._model.encode_prompt(context)[0][-num_kept:]
        temperature = options.get("temperature") or 0.0
        sampler = Sample(temperature=temperature) if temperature > 0 else Greedy()
        text = generate(
            self._model.config,
            self._model.params,
            [prompt],
            max_new_tokens=max_new_tokens,
            stop_tokens=self._model.stop_tokens,
            vocab_size=min(self._model.tokenizer.vocab_size, self._model.config.vocab_size),
            sampler=sampler,
            key=jax.random.key(0),
            dtype=self._using.run.dtype,
            mesh=self._using.mesh,
        )
        answer = self._model.tokenizer.decode(np.asarray(text)[0, len(prompt) :])
        until = options.get("until") or []
        for end in [until] if isinstance(until, str) else until:
            answer = answer.split(end)[0] if end else answer
        return answer

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the tokenizer's chat template."""
        return self._model.load_chat_template().render(
            chat_history, add_generation_prompt=add_generation_prompt
        )


def task_manager(run: Evaluate) -> TaskManager:
    """The harness's tasks and those of --task-folder.

    Raises:
        ValueError: A task of --tasks is not among them, or the folder does not exist.
    """
    if run.task_folder is not None and not run.task_folder.is_dir():
        raise ValueError(f"task_folder {run.task_folder} does not exist.")
    manager = TaskManager(include_path=None if run.task_folder is None else str(run.task_folder))
    unknown = [n for n in run.tasks if n not in manager.all_tasks and not Path(n).is_file()]
    if unknown:
        raise ValueError(
            f"lm-evaluation-harness has no task {', '.join(map(repr, unknown))}. "
            "For custom tasks pass --task-folder."
        )
    return manager


def run_lm_eval_tasks(evaluator: Evaluator, manager: TaskManager) -> dict[str, Any]:
    """Run lm-evaluation-harness tasks and print their table; returns the results."""
    run = evaluator.run
    results = lm_eval.simple_evaluate(
        model=LMEvalModel(evaluator), tasks=list(run.tasks), limit=run.limit, task_manager=manager
    )
    print(make_table(results))
    return results["results"]
