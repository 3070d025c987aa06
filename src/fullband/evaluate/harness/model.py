"""A full-bandwidth model as lm-eval sees models: registered under the name `fullband` when this module is imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from fullband.data.chat_template import Message
from fullband.decode import generate_texts, resolve_mode
from fullband.device import resolve_device, resolve_dtype
from fullband.evaluate.harness.scoring import Continuation, Score, score_continuations
from fullband.evaluate.harness.states import Scoring
from fullband.evaluate.harness.text import HarnessText
from fullband.evaluate.journal import Journal
from fullband.feedback.passes import FeedbackModel
from fullband.feedback_config import FeedbackPasses, parse_feedback_passes

MAX_NEW_TOKENS = 256  # of tasks that do not say, as in lm-eval's own models
BATCH_ROWS = 8


@register_model("fullband")
class FullBandLM(TemplateLM):
    """In lm-eval: --model fullband --model_args pretrained=DIR,mode=fused,feedback_passes=2.

    scoring   how texts are evaluated for their log-likelihoods: the mode's way (standard: 0 feedback passes; fused: its own; soft: the
              context without feedback, the continuation with it). May be changed between calls
    scorings  what is computed whenever `scoring` is asked for: several cost little more than the deepest
    journal   where scores are kept
    watch     makes of the number of requests what counts those that each batch answers; None = a bar of tqdm
    """

    def __init__(
        self,
        pretrained: str | Path | FeedbackModel,
        mode: str = "standard",
        feedback_passes: FeedbackPasses | str | None = None,
        tokenizer: str | Path | HarnessText | None = None,
        device: str | None = None,
        dtype: str | torch.dtype = "float32",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        seed: int = 0,
    ):
        """`pretrained` and `tokenizer` are folders (a plain Hugging Face checkpoint too, standard only), or the things themselves.

        Raises ValueError in one line for what is no model, tokenizer, mode, dtype or batch size.
        """
        super().__init__()
        self.mode = resolve_mode(mode, parse_feedback_passes(feedback_passes) if isinstance(feedback_passes, str) else feedback_passes)
        if tokenizer is None:
            if not isinstance(pretrained, (str, Path)):
                raise ValueError("a model that was given as an object needs its tokenizer: give its folder or a HarnessText")
            tokenizer = small_files(pretrained)
        self.text = tokenizer if isinstance(tokenizer, HarnessText) else HarnessText.of_folder(tokenizer, add_bos_token)
        self.model: FeedbackModel = _load(pretrained, device, dtype) if isinstance(pretrained, (str, Path)) else pretrained
        self.batch_rows = _batch_rows(batch_size)
        self.limit = min(max_length or self.model.trunk.context, self.model.trunk.context)
        self.seed = seed
        self.scoring: Scoring = "soft" if self.mode.name == "soft" else self.mode.feedback_passes
        self.scorings: Sequence[Scoring] = ()
        self.journal = Journal()
        self.watch: Callable[[int], Callable[[int], None]] | None = None
        self._device = self.model.trunk.device

    @property
    def eot_token_id(self) -> int:
        return self.text.stops[0] if self.text.stops else -1

    @property
    def prefix_token_id(self) -> int:
        if self.text.prefix is None:
            raise ValueError("this task scores texts without a context, and the tokenizer has neither a beginning nor an end of text")
        return self.text.prefix

    @property
    def tokenizer_name(self) -> str:
        return self.text.tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.text.template.source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """As lm-eval's own models: without a generation prompt the last turn is a beginning to be continued, so nothing closes it, and
        a template that refuses the conversation gets it without its system message, with a warning.

        Raises ValueError for a conversation that the template refuses without one as well.
        """
        messages = [Message(role=turn["role"], content=turn["content"]) for turn in chat_history]
        render = self.text.template.render if add_generation_prompt else self.text.template.render_open
        try:
            return render(messages)
        except ValueError:
            without = [message for message in messages if message["role"] != "system"]
            if len(without) == len(messages):
                raise
            rendered = render(without)
            warnings.warn("the chat template refuses a system message: tasks' descriptions and instructions are left out", stacklevel=2)
            return rendered

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.text.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Raises ValueError, naming task and document, for an answer without a token to score, after a context without one, or longer
        than the model's context."""
        try:
            for place, (context, continuation) in enumerate(request.args for request in requests):
                if not context and not self.tok_encode(continuation, False):
                    raise _UnscoredError(place, "has no token to score")
            return super().loglikelihood(requests, disable_tqdm)
        except _UnscoredError as error:
            request = requests[error.place]
            whose, answer = f"{request.task_name}, document {request.doc_id}", _short(repr(request.args[1]))
            raise ValueError(f"{whose}: the answer {answer} {error.why}; leave the document or the task out") from None

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        pieces = [
            (number, ("", *make_disjoint_window(window)))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.limit, 1)
        ]
        scores = self._loglikelihood_tokens([window for _, window in pieces], disable_tqdm)
        totals = [0.0] * len(requests)
        for (number, _), (log_likelihood, _) in zip(pieces, scores, strict=True):
            totals[number] += log_likelihood
        return totals

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any) -> list[tuple[float, bool]]:
        wanted = [Continuation(tuple(context), tuple(tokens)) for _, context, tokens in requests]
        for place, continuation in enumerate(wanted):
            if why := self._why_unscored(continuation):
                raise _UnscoredError(place, why)
        scorings = list(dict.fromkeys([*self.scorings, self.scoring]))
        names = {str(scoring) for scoring in scorings}
        missing = list({one.key: one for one in wanted if not names <= (self.journal.get(one.key) or {}).keys()}.values())
        with self._progress(len(missing), "log-likelihoods", disable_tqdm) as count:

            def keep(places: list[int], scores: list[dict[Scoring, Score]]) -> None:
                self.journal.add(
                    (missing[place].key, {str(scoring): [score.log_likelihood, score.greedy] for scoring, score in found.items()})
                    for place, found in zip(places, scores, strict=True)
                )
                count(len(places))

            score_continuations(self.model, missing, scorings, self.batch_rows, self.limit, keep)
        answers: list[tuple[float, bool]] = []
        for continuation, request in zip(wanted, requests, strict=True):
            log_likelihood, greedy = self.journal[continuation.key][str(self.scoring)]
            answers.append((log_likelihood, greedy))
            if request[0]:
                self.cache_hook.add_partial("loglikelihood", request[0], answers[-1])
        return answers

    def _why_unscored(self, request: Continuation) -> str | None:
        if not request.tokens:
            return "has no token to score"
        if not request.context:
            return "follows a context without a token, and the tokenizer adds no beginning of sequence"
        if len(request.tokens) > self.limit:
            return f"has {len(request.tokens)} tokens and does not fit the model's context of {self.limit}"
        return None

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts made in the mode. A prompt that leaves too little room for the new tokens loses its beginning, as in lm-eval's models.

        Raises ValueError for settings of generation that have no meaning here.
        """
        texts: list[str] = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(place)
        with self._progress(len(requests), "texts", disable_tqdm) as count:
            for places in groups.values():
                settings, until = self._settings(requests[places[0]].args[1])
                room = self.limit - settings["max_new_tokens"]
                if room < 1:
                    raise ValueError(f"{settings['max_new_tokens']} new tokens leave no room for a prompt in a context of {self.limit}")
                prompts = {place: self.tok_encode(requests[place].args[0])[-room:] for place in places}
                order = sorted(places, key=lambda place: -len(prompts[place]))
                for first in range(0, len(order), self.batch_rows):
                    batch = order[first : first + self.batch_rows]
                    made = self._generate([prompts[place] for place in batch], batch, until, settings)
                    for place, text in zip(batch, made, strict=True):
                        texts[place] = text
                        self.cache_hook.add_partial("generate_until", requests[place].args, text)
                    count(len(batch))
        return texts

    @contextmanager
    def _progress(self, total: int, what: str, hidden: bool) -> Iterator[Callable[[int], object]]:
        """What counts requests that are answered."""
        if self.watch is not None:
            yield self.watch(total)
        else:
            with tqdm(total=total, disable=hidden or not total, desc=what) as bar:
                yield bar.update

    def _settings(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """(keywords of generation, strings that end a text)."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(asked, MAX_NEW_TOKENS))
        end = self.text.tokenizer.decode(self.text.stops[:1]) if self.text.stops else None
        until = [stop for stop in handle_stop_sequences(kwargs.pop("until", None), end) if stop]
        settings = {"max_new_tokens": kwargs.pop("max_gen_toks"), "temperature": 0.0}
        sampling = ("temperature", "top_k", "top_p", "min_p")
        if unknown := kwargs.keys() - {"do_sample", "repetition_penalty", *sampling}:
            raise ValueError(f"generation has no setting {', '.join(sorted(unknown))} here")
        used = ("repetition_penalty", *(sampling if kwargs.get("do_sample") else ()))  # greedy decoding looks back, too
        return settings | {name: kwargs[name] for name in used if name in kwargs}, until

    def _generate(self, prompts: list[list[int]], keys: list[int], until: list[str], settings: dict[str, Any]) -> list[str]:
        settings = settings | {"stop_ids": self.text.stops, "keys": keys, "seed": self.seed}
        mode, tokenizer = self.mode, self.text.tokenizer
        completions = generate_texts(self.model, tokenizer, prompts, mode.name, mode.feedback_passes, stop=until, **settings)
        texts = [self.text.decode(completion.tokens, prompt) for completion, prompt in zip(completions, prompts, strict=True)]
        return [postprocess_generated_text(text, until, None) for text in texts]


class _UnscoredError(ValueError):
    def __init__(self, place: int, why: str):
        super().__init__(f"request {place}: the answer {why}")
        self.place, self.why = place, why


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:56]} …{text[-1]}"


def _load(name: str | Path, device: str | None, dtype: str | torch.dtype) -> FeedbackModel:
    from fullband.loading import load_model

    precision = dtype if isinstance(dtype, torch.dtype) else resolve_dtype(dtype, "dtype")
    if device and device.startswith("cuda") and not torch.cuda.is_available():
        device = None  # lm-eval asks for a GPU unless told otherwise, and its own models do without where there is none
    return load_model(name, resolve_device(device or "auto", "device"), precision, plain=True)


def small_files(name: str | Path) -> Path:
    """The folder that holds a model's tokenizer: itself, a run's newest checkpoint, or the part of a hub's snapshot that is not weights.

    Raises ValueError in one line if there is no such model.
    """
    from fullband.model import resolve_model_folder

    if Path(name).is_dir():
        return resolve_model_folder(name)
    from fullband.hf.source import find_source

    return find_source(name).folder


def _batch_rows(asked: int | str | None) -> int:
    """`auto`, which lm-eval measures for its own models, is a fixed number here."""
    if asked is None or str(asked).startswith("auto"):
        return BATCH_ROWS
    if not str(asked).isdecimal() or int(asked) < 1:
        raise ValueError(f"batch_size must be a number of sequences or auto, got '{asked}'")
    return int(asked)
