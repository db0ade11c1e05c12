"""The prefix cache: finds blocks that already hold the KV of a prefix.

Keys form a hash chain rooted in a namespace, which comes from the tenant of the API key: equal
prompts of two tenants have different keys. Prompts that the operator declared public have a root
of their own, and a sequence goes on in its own namespace where it leaves them. A hit is never
trusted on its hash alone: namespace and token ids are compared. Only full blocks are published,
after the step that computed them succeeded (vLLM publishes before: a victim un-scheduled in the
same step then leaves garbage). What a running sequence is about to publish is announced, so that
a second one with the same prefix can wait for it.
"""

import hashlib
from array import array
from collections.abc import Iterable
from itertools import takewhile

from engine.memory.block_pool import Block, BlockPool
from engine.sequence import Sequence

PUBLIC = None
"""The namespace of public prompts: no tenant's, since theirs are strings."""


def root_key(namespace: str | None, adapter: str = "") -> bytes:
    """The parent of a namespace's first blocks; `adapter` names weights beside the model's own."""
    kind = b"public" if namespace is None else b"tenant"
    fields = [kind, (namespace or "").encode(), adapter.encode()]
    encoded = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return hashlib.sha256(b"headrace.root\0" + encoded).digest()


def block_key(parent: bytes, tokens: list[int]) -> bytes:
    """Key of the block that holds `tokens` after the prefix that `parent` names."""
    # The parent is 32 bytes and each token 8: no two inputs share an encoding.
    return hashlib.sha256(b"headrace.block\0" + parent + array("q", tokens).tobytes()).digest()


def _enter_namespace(parent: bytes, namespace: str) -> bytes:
    """The parent of a tenant's own blocks after a public prefix."""
    return hashlib.sha256(b"headrace.enter\0" + parent + root_key(namespace)).digest()


class PrefixCache:
    """Index from key to the block with that content."""

    def __init__(self, block_size: int, public_prompts: Iterable[tuple[int, ...]] = ()) -> None:
        self._block_size = block_size
        self._public_prompts = tuple(public_prompts)
        self._blocks: dict[bytes, Block] = {}
        self._announced: dict[bytes, Sequence] = {}  # who will publish this key

    def __len__(self) -> int:
        return len(self._blocks)

    def enter(self, seq: Sequence) -> None:
        """Find out, once, how many of a new sequence's blocks are of a public prompt."""
        shared = max((_common(prompt, seq.token_ids) for prompt in self._public_prompts), default=0)
        seq.num_public_blocks = shared // self._block_size

    def match(self, seq: Sequence) -> list[int]:
        """Ids of the cached blocks that hold the longest known prefix of the sequence.

        At least one token is always left to compute: its logits are needed.
        """
        block_ids: list[int] = []
        for index in range(self._num_matchable(seq)):
            block = self._blocks.get(self._key(seq, index))
            if block is None or block.namespace != self._namespace(seq, index):
                break
            if list(block.tokens) != self._tokens(seq, index):
                break
            block_ids.append(block.id)
        return block_ids

    def num_coming(self, seq: Sequence, num_hits: int) -> int:
        """How many blocks after its hits running sequences of the same tenant, and of no lower
        class, are about to publish."""
        index = num_hits
        while index < self._num_matchable(seq):
            producer = self._announced.get(self._key(seq, index))
            if producer is None or producer.tenant != seq.tenant:
                break
            if producer.rank > seq.rank:
                break
            index += 1
        return index - num_hits

    def announce(self, seq: Sequence, num_hits: int) -> None:
        """An admitted sequence will publish its full blocks beyond the hits."""
        for index in range(num_hits, seq.num_tokens // self._block_size):
            self._announced.setdefault(self._key(seq, index), seq)

    def withdraw(self, seq: Sequence) -> None:
        """The sequence stops, and may not have published all that it announced."""
        for key in seq.block_keys:
            if self._announced.get(key) is seq:
                del self._announced[key]

    def publish(self, seq: Sequence, pool: BlockPool, start: int, end: int) -> None:
        """Make the full blocks among tokens [start, end), just computed, findable.

        Content that another block already offers stays private: tables never swap blocks.
        """
        for index in range(start // self._block_size, end // self._block_size):
            key = self._key(seq, index)
            if self._announced.get(key) is seq:
                del self._announced[key]
            block = pool.blocks[seq.block_table[index]]
            if key in self._blocks or block.key is not None:
                continue
            block.key, block.namespace = key, self._namespace(seq, index)
            block.tokens = tuple(self._tokens(seq, index))
            self._blocks[key] = block

    def forget(self, block: Block) -> None:
        """The block is about to be overwritten (BlockPool's `on_reuse`)."""
        if block.key is not None and self._blocks.get(block.key) is block:
            del self._blocks[block.key]

    def discard(self, block: Block) -> None:
        """Nobody may find this held block any more."""
        assert block.ref_count > 0
        self.forget(block)
        block.key, block.namespace, block.tokens = None, None, ()

    def check_announced(self, running: Iterable[Sequence]) -> bool:
        """Whether every announcement is a running sequence's."""
        live = {seq.id for seq in running}
        return all(seq.id in live for seq in self._announced.values())

    def _num_matchable(self, seq: Sequence) -> int:
        return (seq.num_tokens - 1) // self._block_size

    def _namespace(self, seq: Sequence, index: int) -> str | None:
        return PUBLIC if index < seq.num_public_blocks else seq.namespace

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def _key(self, seq: Sequence, index: int) -> bytes:
        """Key of the sequence's full block `index`; the chain grows once and is kept."""
        keys = seq.block_keys
        while len(keys) <= index:
            parent = keys[-1] if keys else root_key(self._namespace(seq, 0))
            if keys and len(keys) == seq.num_public_blocks:
                parent = _enter_namespace(parent, seq.namespace)
            keys.append(block_key(parent, self._tokens(seq, len(keys))))
        return keys[index]


def _common(prompt: tuple[int, ...], token_ids: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(prompt, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
