"""Adapter for lm-evaluation-harness (extra ``eval``).

    import lm_eval
    from jaxformer.run.lm_eval_harness import LMEvalModel

    lm_eval.simple_evaluate(model=LMEvalModel.from_folder("path/to/folder"), tasks=["hellaswag"])

The harness: Gao et al., The Language Model Evaluation Harness, 2024, doi:10.5281/zenodo.12608602.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from jaxformer import data
from jaxformer.generation import generate, rolling_windows
from jaxformer.json_files import read_json
from jaxformer.run.evaluator import Evaluate, Evaluator, load_evaluator
from jaxformer.run.task_options import max_new_tokens, stated_length, task_sampler
from jaxformer.run.text_generation import truncate_at_stop

CONTINUED = "CONTINUED-HERE "  # its space is gone where a template trims


class LMEvalModel(TemplateLM):
    """lm-evaluation-harness model: log-likelihoods and generated answers."""

    def __init__(self, evaluator: Evaluator):
        """Wrap an Evaluator with the model's own length; `from_folder` loads one."""
        super().__init__()
        run, self._model = evaluator.run, evaluator.model
        length = run.length or self._model.row_length or stated_length(self._model.folder)
        self._using = evaluator._replace(run=replace(run, length=length))
        self._num_answers = 0

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
        tokenizer = self._model.tokenizer
        path = self._model.tokenizer_folder / "tokenizer_config.json"
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
    def max_length(self) -> int:
        """Tokens of the longest context with its answer."""
        return self._using.length

    @property
    def tokenizer_name(self) -> str:
        """Cache key of the rendered requests."""
        return f"{self._using.run.checkpoint} {self._using.run.chat_template or ''}".strip()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text, with special tokens unless `add_special_tokens` is False.

        A rendered conversation that opens with the bos token gets no second one.
        """
        adds = add_special_tokens is not False
        if not adds or (self._model.adds_special_tokens and not string):
            return self._model.encode(string, add_special_tokens=adds)
        ids, first = self._model.encode_prompt(string)[0], self._model.bos_tokens[0]
        return ids[1:] if ids[:2] == [first, first] else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Split as the harness does; without a token to score, score the last one."""
        pair = super()._encode_pair(context, continuation)
        return pair if pair[1] else self._model.encode_continuation(context, continuation)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self._print_cut([len(x) + len(y) - 1 - self.max_length for x, y in pairs])
        return [
            (each.log_probability, each.is_greedy) for each in self._using.log_likelihoods(pairs)
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list:
        """Log-likelihood of whole texts in windows that overlap by one token."""
        size = self.max_length
        tokens = ([self.prefix_token_id, *self.tok_encode(x.args[0])] for x in requests)
        texts = [list(rolling_windows(ids, max_length=size, stride=size)) for ids in tokens]
        likelihoods = self._using.log_likelihoods(window for text in texts for window in text)
        return [sum(next(likelihoods).log_probability for _ in text) for text in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate each answer up to the first of its stop texts.

        A context is cut from the left to what the answer leaves of the model's length.

        Raises:
            ValueError: An option of the task is not supported, or the answer leaves no context.
        """
        asked = [request.args for request in requests]
        for _, options in asked:
            task_sampler(options, self._model.folder)
            self._room(options)
        self._print_cut([len(self.tok_encode(x)) - self._room(options) for x, options in asked])
        return [self._answer(*each) for each in asked]

    def _room(self, options: dict[str, Any]) -> int:
        """Tokens of a context that an answer leaves."""
        count, length = max_new_tokens(options), self.max_length
        if count >= length:
            raise ValueError(
                f"The task's max_gen_toks {count} leave no context of the {length} tokens of the "
                "model: lower them, or pass --length for a model that reads longer texts."
            )
        return length - count

    def _print_cut(self, excess: Sequence[int]) -> None:
        """Print how many contexts are longer than what the model reads, by tokens too many."""
        if num_cut := sum(each > 0 for each in excess):
            print(
                f"{num_cut:,} of {len(excess):,} contexts are cut from the left, by up to "
                f"{max(excess):,} tokens, as the model reads {self.max_length:,}."
            )

    def _answer(self, context: str, options: dict[str, Any]) -> str:
        prompt = self.tok_encode(context)[-self._room(options) :]
        self._num_answers += 1
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        stop = [*self._model.stop_tokens, *self._special_tokens(until)]
        rows = generate(
            self._model.config,
            self._model.params,
            [prompt],
            max_new_tokens=max_new_tokens(options),
            stop_tokens=stop,
            vocab_size=min(self._model.tokenizer.vocab_size, self._model.config.vocab_size),
            sampler=task_sampler(options, self._model.folder),
            key=jax.random.key(self._num_answers),
            dtype=self._using.run.dtype,
            mesh=self._using.mesh,
        )
        new = truncate_at_stop(np.asarray(rows)[0, len(prompt) :].tolist(), stop)
        answer = data.decode_continuation(self._model.tokenizer, prompt, new)
        for end in filter(None, until):
            answer = answer.split(end)[0]
        return answer

    def _special_tokens(self, texts: Sequence[str]) -> list[int]:
        """The texts that are special tokens, which decoded text does not have."""
        if not isinstance(tokenizer := self._model.tokenizer, data.BPETokenizer):
            return []
        encoded = tokenizer.encode_rendered_chat([text for text in texts if text])
        return [int(ids[0]) for ids in encoded if len(ids) == 1 and ids[0] in tokenizer.special_ids]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Source of the chat template, for the harness's record; empty if it applies none."""
        return self._model.load_chat_template().source if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the model's chat template.

        Without the generation prompt, the text ends with the last message, to continue it. A
        template that refuses the system message gets the others, as in the harness.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except ValueError:
            without_system = [message for message in chat_history if message["role"] != "system"]
            if len(without_system) == len(chat_history):
                raise
        return self._render(without_system, add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        template = self._model.load_chat_template()
        if add_generation_prompt:
            return template.render(messages, add_generation_prompt=True)
        *before, last = messages
        text = template.render([*before, {**last, "content": last["content"] + CONTINUED}])
        rendered, mark, rest = text.rpartition(CONTINUED.strip())
        if not mark:
            raise ValueError("The chat template leaves out the last message, to be continued.")
        return rendered if rest.startswith(" ") else rendered.rstrip()


def task_manager(run: Evaluate) -> TaskManager:
    """The harness's tasks and the tasks of --task-folder.

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
        model=LMEvalModel(evaluator),
        tasks=list(run.tasks),
        limit=run.limit,
        task_manager=manager,
        apply_chat_template=run.apply_chat_template or run.chat_template is not None,
        system_instruction=run.system_instruction,
    )
    print(make_table(results))
    return results["results"]
