"""Two settings of a model over the same text: how far apart the distributions are that they predict.

Nothing is estimated: both models run here, straight on their back ends, window by window side by side, and all logits
of a row are compared. An engine would compute the same bits: a row depends on its own sequence alone.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.system import EngineConfig, choose_device, choose_kv_dtype, make_ops
from cuda.kv_cache import blocks_for, kv_groups
from cuda.model import Transformer
from cuda.ops import Batch
from tools.eval_perplexity import Perplexity, scored_positions
from weights.hub import resolve
from weights.load import open_model
from weights.vocab import Vocab

STEP_TOKENS = 512                           # of a window in one pass
LOGITS_ROWS = 64                            # in memory at a time, as float64

Floats = NDArray[np.float32]


class WindowModel:
    """A model under one setting, and a KV cache for one window."""

    def __init__(self, config: EngineConfig, window_size: int, progress: Callable[[str], None]) -> None:
        """Raises: ValueError for a model or setting that cannot be used."""
        # Its batches and logits are the host's own arrays.
        if config.device == "cuda":
            raise ValueError("--device cuda: compare runs on cpu; perplexity runs on cuda too")
        device, _ = choose_device("cpu" if config.device == "auto" else config.device)
        model = open_model(resolve(config.model, progress).path)
        spec = model.spec
        if window_size > spec.max_position:
            raise ValueError(f"--ctx-size: {window_size} is more than the {spec.max_position} positions that "
                             f"{config.model} was trained for")
        self.vocab, self.vocab_size = Vocab.load(model), spec.vocab_size
        self._ops = make_ops(device, config)
        groups = kv_groups(spec)
        weights = self._ops.prepare(spec, model.weights(), STEP_TOKENS, window_size)
        self._model = Transformer(spec, weights, self._ops, groups)
        self._caches = [self._ops.allocate_kv(group, blocks_for(window_size), choose_kv_dtype(config, self._ops))
                        for group in groups]

    def close(self) -> None:
        self._ops.close()

    def hidden(self, token_ids: Sequence[int]) -> Floats:
        """Of the rows that predict a window's scored tokens. [window] -> [R, C]"""
        first, last = scored_positions(len(token_ids))[0] - 1, len(token_ids) - 1
        parts = []
        for start in range(0, len(token_ids), STEP_TOKENS):
            end = min(len(token_ids), start + STEP_TOKENS)
            batch = _one_sequence(token_ids, start, end, len(self._caches))
            rows = np.arange(max(first, start), min(last, end), dtype=np.int32) - start
            self._ops.begin(batch)
            hidden = self._model.forward(batch, self._caches, rows)
            self._ops.finish()
            parts.append(np.array(hidden))
        return np.concatenate(parts)

    def logprobs(self, hidden: Floats) -> NDArray[np.float64]:
        """[R, C] -> [R, V]. Raises: RuntimeError where a logit is not finite."""
        logits = self._model.logits(hidden)
        self._ops.finish()
        if not np.isfinite(logits).all():
            raise RuntimeError("the logits are not finite")
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _one_sequence(token_ids: Sequence[int], start: int, end: int, num_groups: int) -> Batch:
    """Tokens start .. end - 1 of a sequence whose blocks are those of the whole cache, in order."""
    positions = np.arange(start, end, dtype=np.int32)
    return Batch(
        token_ids=np.array(token_ids[start:end], np.int32), positions=positions,
        query_start_loc=np.array([0, end - start], np.int32), seq_lens=np.array([end], np.int32),
        block_tables=(np.arange(blocks_for(end), dtype=np.int32)[None],) * num_groups,
        slot_mapping=(positions,) * num_groups)


@dataclass(slots=True)
class Comparison:
    """Figures of the rows so far; of `this` setting, `against` another that is taken for the truth."""
    this: Perplexity = field(default_factory=Perplexity)
    against: Perplexity = field(default_factory=Perplexity)
    divergences: list[float] = field(default_factory=list)      # KL(against || this) of each row, in nats
    num_same_top: int = 0                                       # rows whose likeliest token is the same
    errors: list[float] = field(default_factory=list)           # |difference| of the next token's log-probability

    def add(self, this: NDArray[np.float64], against: NDArray[np.float64], next_ids: NDArray[np.int64]) -> None:
        """Log-probabilities [R, V] of both, and the tokens that did come next [R]."""
        rows = np.arange(len(next_ids))
        of_next, against_of_next = this[rows, next_ids], against[rows, next_ids]
        self.this.add((-of_next).tolist())
        self.against.add((-against_of_next).tolist())
        self.divergences += (np.exp(against) * (against - this)).sum(axis=1).tolist()
        self.num_same_top += int((this.argmax(axis=1) == against.argmax(axis=1)).sum())
        self.errors += np.abs(of_next - against_of_next).tolist()


def compare(this: WindowModel, against: WindowModel, windows: Sequence[Sequence[int]]) -> Iterator[Comparison]:
    """The same object again and again, after each window."""
    comparison = Comparison()
    for window in windows:
        next_ids = np.array(window)[scored_positions(len(window))]
        hidden, hidden_against = this.hidden(window), against.hidden(window)
        for start in range(0, len(next_ids), LOGITS_ROWS):
            part = slice(start, start + LOGITS_ROWS)
            comparison.add(this.logprobs(hidden[part]), against.logprobs(hidden_against[part]), next_ids[part])
        yield comparison
