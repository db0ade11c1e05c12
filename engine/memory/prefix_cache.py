"""The prefix cache: finds blocks that already hold the KV of a prefix.

Keys form a hash chain rooted in a namespace, which comes from the tenant of the API key: equal
prompts of two tenants have different keys. A hit is never trusted on its hash alone: namespace and
token ids are compared. Only full blocks are published, after the step that computed them
succeeded (vLLM publishes before: a victim un-scheduled in the same step then leaves garbage).
"""

import hashlib
from array import array

from engine.memory.block_pool import Block, BlockPool
from engine.sequence import Sequence


def root_key(namespace: str) -> bytes:
    """The parent of a namespace's first blocks."""
    name = namespace.encode()
    return hashlib.sha256(b"headrace.root\0" + len(name).to_bytes(8, "little") + name).digest()


def block_key(parent: bytes, tokens: list[int]) -> bytes:
    """Key of the block that holds `tokens` after the prefix that `parent` names."""
    # The parent is 32 bytes and each token 8: no two inputs share an encoding.
    return hashlib.sha256(b"headrace.block\0" + parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """Index from key to the block with that content."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, seq: Sequence) -> list[int]:
        """Ids of the cached blocks that hold the longest known prefix of the sequence.

        At least one token is always left to compute: its logits are needed.
        """
        num_blocks = (seq.num_tokens - 1) // self._block_size
        block_ids: list[int] = []
        for index in range(num_blocks):
            block = self._blocks.get(self._key(seq, index))
            if block is None or block.namespace != seq.namespace:
                break
            if list(block.tokens) != self._tokens(seq, index):
                break
            block_ids.append(block.id)
        return block_ids

    def publish(self, seq: Sequence, pool: BlockPool, start: int, end: int) -> None:
        """Make the full blocks among tokens [start, end), just computed, findable.

        Content that another block already offers stays private: tables never swap blocks.
        """
        for index in range(start // self._block_size, end // self._block_size):
            key = self._key(seq, index)
            block = pool.blocks[seq.block_table[index]]
            if key in self._blocks or block.key is not None:
                continue
            block.key, block.namespace = key, seq.namespace
            block.tokens = tuple(self._tokens(seq, index))
            self._blocks[key] = block

    def forget(self, block: Block) -> None:
        """The block is about to be overwritten (BlockPool's `on_reuse`)."""
        if block.key is not None and self._blocks.get(block.key) is block:
            del self._blocks[block.key]

    def discard(self, block: Block) -> None:
        """Nobody may find this held block any more: its content is not to be trusted."""
        assert block.ref_count > 0
        self.forget(block)
        block.key, block.namespace, block.tokens = None, "", ()

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def _key(self, seq: Sequence, index: int) -> bytes:
        """Key of the sequence's full block `index`; the chain grows once and is kept."""
        keys = seq.block_keys
        while len(keys) <= index:
            parent = keys[-1] if keys else root_key(seq.namespace)
            keys.append(block_key(parent, self._tokens(seq, len(keys))))
        return keys[index]
