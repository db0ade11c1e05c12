"""Penalties for tokens that a sequence has already."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sequence import SamplingParams
from engine.sequence import Sequence as EngineSequence

_GROWTH = 8  # rows that the cache grows by


@dataclass(slots=True)
class _Entry:
    """A row of the cache: it counts the first `num_tokens` of `token_ids`."""

    row: int
    token_ids: list[int]
    num_tokens: int


class Penalties:
    """Repetition, frequency and presence penalties, from a cache of counts per sequence.

    A row is only used for the very list that it counted, as far as that has only grown; else it is
    counted again. So nothing depends on what is cached, as long as a sequence whose tokens are
    replaced, such as a beam, gets another list. There are as many rows, 5 bytes per token of the
    vocabulary each, as one step ever needed; the least recently used one goes.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first

    def apply(self, logits: Tensor, seqs: Sequence[EngineSequence]) -> None:
        """Change logits [len(seqs), vocab_size] in place.

        Repetition counts prompt and output and scales, as in CTRL (Keskar et al. 2019): positive
        logits are divided, negative ones multiplied. The others count the output and subtract, as
        OpenAI documents them.
        """
        rows = [i for i, seq in enumerate(seqs) if _is_penalized(seq.params)]
        if not rows:
            return
        penalized = [seqs[i] for i in rows]
        index = torch.tensor([rows, self._catch_up(penalized)], device=logits.device)
        # Only tokens that a sequence has are touched: finding them reads a byte per token.
        places, token_ids = self._seen[index[1]].nonzero(as_tuple=True)
        logit_rows, cache_rows = index[:, places]
        repetition, frequency, presence = torch.tensor(
            [
                [seq.params.repetition_penalty for seq in penalized],
                [seq.params.frequency_penalty for seq in penalized],
                [seq.params.presence_penalty for seq in penalized],
            ],
            dtype=torch.float32,
            device=logits.device,
        )[:, places]
        found = logits[logit_rows, token_ids]
        found = torch.where(found > 0, found / repetition, found * repetition)
        counts = self._counts[cache_rows, token_ids]
        logits[logit_rows, token_ids] = found - counts * frequency - (counts > 0) * presence

    def _catch_up(self, seqs: Sequence[EngineSequence]) -> list[int]:
        """The cache's row of each sequence, with all of its tokens counted."""
        self._make_room(seqs)
        entries = [self._entry(seq) for seq in seqs]
        seen: tuple[list[int], list[int]] = ([], [])  # rows and token ids
        counted: tuple[list[int], list[int]] = ([], [])
        for seq, entry in zip(seqs, entries, strict=True):
            new = seq.token_ids[entry.num_tokens :]
            output = seq.token_ids[max(entry.num_tokens, seq.num_prompt_tokens) :]
            for (rows, token_ids), found in ((seen, new), (counted, output)):
                rows += [entry.row] * len(found)
                token_ids += found
            entry.num_tokens = seq.num_tokens
        if seen[0]:
            self._seen[self._index(*seen)] = True
        if counted[0]:
            one = torch.ones((), dtype=torch.int32, device=self._counts.device)
            self._counts.index_put_(self._index(*counted), one, accumulate=True)
        return [entry.row for entry in entries]

    def _make_room(self, seqs: Sequence[EngineSequence]) -> None:
        """Let the entries of these sequences be the last to go, and no row be needed twice."""
        for seq in seqs:
            if seq.id in self._entries:
                self._entries.move_to_end(seq.id)
        if len(seqs) > len(self._seen):
            num_new = -(-len(seqs) // _GROWTH) * _GROWTH - len(self._seen)
            self._seen = torch.cat([self._seen, self._seen.new_zeros(num_new, self._seen.shape[1])])
            self._counts = torch.cat(
                [self._counts, self._counts.new_zeros(num_new, self._counts.shape[1])]
            )

    def _entry(self, seq: EngineSequence) -> _Entry:
        """The sequence's entry; emptied if it counted anything but the beginning of its tokens."""
        entry = self._entries.get(seq.id)
        if (
            entry is not None
            and entry.token_ids is seq.token_ids
            and entry.num_tokens <= seq.num_tokens
        ):
            return entry
        if entry is not None:
            row = entry.row
        elif len(self._entries) < len(self._seen):
            row = len(self._entries)
        else:
            row = self._entries.popitem(last=False)[1].row
        self._seen[row] = False
        self._counts[row] = 0
        entry = self._entries[seq.id] = _Entry(row, seq.token_ids, 0)
        return entry

    def _index(self, rows: list[int], others: list[int]) -> tuple[Tensor, Tensor]:
        first, second = torch.tensor([rows, others], device=self._seen.device)
        return first, second


def _is_penalized(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )
