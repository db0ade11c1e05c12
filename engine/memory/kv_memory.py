"""KV memory of sequences: the pool, the prefix cache and the host pool behind one table each.

Every change of a block table happens here. Copies that a change needs are collected for the
step's plan; blocks that a copy still reads stay taken until `commit`, after the step has run, so
that a runner may overlap its copies with whatever it likes within the step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.config import CacheConfig
from engine.errors import InvariantError
from engine.memory.block_pool import BlockPool
from engine.memory.host_pool import HostPool
from engine.memory.prefix_cache import PrefixCache
from engine.plan import BlockCopies
from engine.sequence import ParkedKV
from engine.sequence import Sequence as EngineSequence


class KVMemory:
    """Block tables of all sequences of one pool."""

    def __init__(self, config: CacheConfig) -> None:
        self.prefix_cache = PrefixCache(config.block_size, config.public_prompts)
        self.pool = BlockPool(config.num_blocks, on_reuse=self.prefix_cache.forget)
        self.host = HostPool(config.num_host_blocks, config.max_host_blocks_per_tenant)
        self.queried_tokens: Counter[str] = Counter()  # by tenant: looked up at admission
        self.hit_tokens: Counter[str] = Counter()
        self._config = config
        # By destination: a block taken from its first owner and copied into again counts once.
        self._copied: dict[int, int] = {}
        self._swapped_out: list[tuple[int, int]] = []
        self._parked_in: list[tuple[ParkedKV, list[int], int]] = []  # what, where to, from block
        self._leaving: list[list[int]] = []  # tables whose blocks are being swapped out

    # -- lookups ------------------------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def uses_cache(self, seq: EngineSequence) -> bool:
        return self._config.enable_prefix_cache and seq.use_prefix_cache

    def match(self, seq: EngineSequence) -> list[int]:
        """Cached blocks for the beginning of a sequence. One whose prompt is to be scored needs
        the logits of all of it, and finds none until it has them."""
        if not self.uses_cache(seq):
            return []
        if seq.params.prompt_logprobs is not None and not seq.is_prompt_scored:
            return []
        return self.prefix_cache.match(seq)

    def num_missing(self, hits: Sequence[tuple[EngineSequence, list[int]]]) -> int:
        """Blocks that the pool lacks to admit these sequences with their hits; none if <= 0."""
        needed = sum(self.num_blocks(seq.num_tokens) - len(found) for seq, found in hits)
        found_ids = {block_id for _, found in hits for block_id in found}
        revived = sum(not self.pool.blocks[block_id].ref_count for block_id in found_ids)
        return needed + revived - self.pool.num_available

    @property
    def num_leaving(self) -> int:
        """Blocks that become available with the next `commit`."""
        leaving = Counter(block_id for table in self._leaving for block_id in table)
        return sum(self.pool.blocks[block_id].ref_count == n for block_id, n in leaving.items())

    def num_shared_tokens(self, seq: EngineSequence) -> int:
        """Computed tokens whose blocks others hold too: they outlive this sequence."""
        shared = sum(self.pool.blocks[block_id].ref_count > 1 for block_id in seq.block_table)
        return min(shared * self._config.block_size, seq.num_computed_tokens)

    # -- changes ------------------------------------------------------------------------------

    def hold(self, seq: EngineSequence, hits: list[int]) -> None:
        """Keep what `match` found from being evicted, until `admit`."""
        self.pool.touch(hits, seq.tenant)

    def admit(self, seq: EngineSequence, hits: list[int]) -> int:
        """Give a sequence blocks for all its tokens, after the hits that it holds; how many
        tokens' KV those provide.

        Parked KV beyond the hits is copied into the new blocks; `num_computed_tokens` says
        afterwards how far the KV reaches.
        """
        tokens_hit = len(hits) * self._config.block_size
        fresh = self.pool.allocate(self.num_blocks(seq.num_tokens) - len(hits), seq.tenant)
        seq.block_table = hits + fresh
        if seq.parked is not None:
            self._parked_in.append((seq.parked, seq.block_table, len(hits)))
            seq.parked = None
        seq.num_computed_tokens = max(seq.num_computed_tokens, tokens_hit)
        if self.uses_cache(seq):
            self.queried_tokens[seq.tenant] += seq.num_tokens
            self.hit_tokens[seq.tenant] += tokens_hit
            self.prefix_cache.announce(seq, len(hits))
        self._changed(seq)
        return tokens_hit

    def grow(self, seq: EngineSequence) -> int:
        """Make room for the sequence's last token, which is to be computed; 0, or how many blocks
        are missing. A partial block that others hold too is copied first."""
        table = seq.block_table
        index = seq.num_computed_tokens // self._config.block_size
        is_shared = index < len(table) and self.pool.blocks[table[index]].ref_count > 1
        needed = self.num_blocks(seq.num_tokens) - len(table) + is_shared
        if needed > self.pool.num_available:
            return needed - self.pool.num_available
        if needed:
            fresh = self.pool.allocate(needed, seq.tenant)
            if is_shared:
                shared, table[index] = table[index], fresh.pop()
                self._copied[table[index]] = shared
                self.pool.free([shared])
            table += fresh
            self._changed(seq)
        return 0

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """The child holds what its parent holds."""
        self.pool.touch(parent.block_table, child.tenant)
        child.block_table = list(parent.block_table)
        child.block_keys = list(parent.block_keys)
        child.num_public_blocks = parent.num_public_blocks
        self._changed(child)

    def reassign(self, beams: Sequence[EngineSequence], parents: Sequence[EngineSequence]) -> None:
        """Each beam goes on from its parent, which is one of the beams."""
        tables = [list(parent.block_table) for parent in parents]
        keys = [list(parent.block_keys) for parent in parents]
        for beam, table in zip(beams, tables, strict=True):
            self.pool.touch(table, beam.tenant)
        for beam in beams:
            self.pool.free(beam.block_table)
        for beam, table, chain in zip(beams, tables, keys, strict=True):
            beam.block_table, beam.block_keys = table, chain
            self._changed(beam)

    def publish(self, seq: EngineSequence, start: int) -> None:
        """Tokens [start, num_computed_tokens) are really there: others may find them."""
        if self.uses_cache(seq):
            self.prefix_cache.publish(seq, self.pool, start, seq.num_computed_tokens)

    def swap_out(self, seq: EngineSequence) -> None:
        """Park a sequence's KV in host memory, which has the room."""
        table = seq.block_table[: self.num_blocks(seq.num_computed_tokens)]
        host = self.host.allocate(len(table), seq.tenant)
        # A block that was to be copied on write in this step has its content elsewhere still.
        sources = (self._copied.get(block_id, block_id) for block_id in table)
        self._swapped_out += zip(sources, host, strict=True)
        seq.parked = ParkedKV(self.host, "host", host)
        self._leaving.append(seq.block_table)
        self._detach(seq)

    def park(self, seq: EngineSequence) -> None:
        """Keep a sequence's KV here for another pool to copy from."""
        seq.parked = ParkedKV(self.pool, "prefill", seq.block_table)
        self._detach(seq)

    def unpark(self, seq: EngineSequence) -> None:
        """Give parked KV up: the sequence has nothing computed any more."""
        assert seq.parked is not None
        seq.parked.store.free(seq.parked.block_ids)
        seq.parked = None
        seq.num_computed_tokens = 0

    def release(self, seq: EngineSequence, *, discard: bool = False) -> None:
        """Free a sequence's blocks; its full ones stay cached, unless they cannot be trusted."""
        if discard:
            for block_id in seq.block_table:
                self.prefix_cache.discard(self.pool.blocks[block_id])
        self.pool.free(seq.block_table)
        self._detach(seq)

    def _detach(self, seq: EngineSequence) -> None:
        self.prefix_cache.withdraw(seq)
        seq.block_table = []
        self._changed(seq)

    def _changed(self, seq: EngineSequence) -> None:
        if seq.group is not None:
            seq.group.num_blocks = None

    def reset_cache(self, tenant: str | None = None) -> int:
        """Forget what is cached, of one tenant or of all; how many blocks became free. Blocks in
        use stay where they are, but nobody finds them any more."""
        for block in self.pool.blocks:
            if block.ref_count and block.key and tenant in (None, block.tenant):
                self.prefix_cache.discard(block)
        return self.pool.reset(tenant)

    # -- one step -----------------------------------------------------------------------------

    def take_copies(self) -> BlockCopies:
        """What must be copied before the step computes; `commit` follows when it has run."""
        parked = [
            (kv.source, pair)
            for kv, table, first in self._parked_in
            for pair in list(zip(kv.block_ids, table, strict=False))[first:]
        ]
        copies = BlockCopies(
            swapped_out=tuple(self._swapped_out),
            copied=tuple((source, target) for target, source in self._copied.items()),
            swapped_in=tuple(pair for source, pair in parked if source == "host"),
            received=tuple(pair for source, pair in parked if source == "prefill"),
        )
        self._swapped_out, self._copied = [], {}
        return copies

    def commit(self) -> None:
        """The step has run, or failed: what its copies read may be used again."""
        for kv, _, _ in self._parked_in:
            kv.store.free(kv.block_ids)
        for table in self._leaving:
            self.pool.free(table)
        self._parked_in, self._leaving = [], []

    def check(
        self, sequences: Iterable[EngineSequence], parked_by: Iterable[EngineSequence]
    ) -> None:
        """Raise InvariantError unless every book balances with these live sequences; those of
        `parked_by`, which include them, may have KV parked here. O(blocks)."""
        live = list(sequences)
        parked = [seq.parked for seq in parked_by if seq.parked is not None]
        parked += [kv for kv, _, _ in self._parked_in]
        here = [kv.block_ids for kv in parked if kv.store is self.pool]
        self.pool.check([*(seq.block_table for seq in live), *here, *self._leaving])
        self.host.check(kv.block_ids for kv in parked if kv.store is self.host)
        if not self.prefix_cache.check_announced(seq for seq in live if seq.block_table):
            raise InvariantError("prefix cache: announced by a sequence that does not run")
