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
from engine.memory.kv_meter import KVMeter
from engine.memory.prefix_cache import PrefixCache
from engine.plan import BlockCopies
from engine.sequence import ParkedKV, ParkedSource
from engine.sequence import Sequence as EngineSequence


class KVMemory:
    """Block tables of all sequences of one pool. What is fetched from that of `prefill` is on the
    same meter."""

    def __init__(self, config: CacheConfig, prefill: "KVMemory | None" = None) -> None:
        self.prefix_cache = PrefixCache(config.block_size, config.public_prompts)
        self.pool = BlockPool(config.num_blocks, on_reuse=self.prefix_cache.forget)
        self.host = HostPool(config.num_host_blocks, config.max_host_blocks_per_tenant)
        self.meter: KVMeter = prefill.meter if prefill is not None else KVMeter()
        self.meter.add(self.pool)
        self.queried_tokens: Counter[str] = Counter()  # by tenant: looked up at admission
        self.hit_tokens: Counter[str] = Counter()
        self._config = config
        # By destination: a block taken from its first owner and copied into again counts once.
        self._copied: dict[int, int] = {}
        self._swapped_out: list[tuple[int, int]] = []
        self._copied_in: dict[ParkedSource, list[tuple[int, int]]] = {"host": [], "prefill": []}
        self._received: dict[int, int] = {}  # full blocks of the prefill pool, and where to
        self._fetched: list[tuple[EngineSequence, ParkedKV]] = []
        # Whose blocks are being swapped out, and its table.
        self._leaving: list[tuple[EngineSequence, list[int]]] = []

    # -- lookups ------------------------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def uses_cache(self, seq: EngineSequence) -> bool:
        return self._config.enable_prefix_cache and seq.use_prefix_cache

    def reads_cache(self, seq: EngineSequence) -> bool:
        """One whose prompt is to be scored needs the logits of all of it, and finds nothing until
        it has them."""
        return self.uses_cache(seq) and not seq.scores_prompt

    def match(self, seq: EngineSequence) -> list[int]:
        """Cached blocks for the beginning of a sequence."""
        return self.prefix_cache.match(seq) if self.reads_cache(seq) else []

    def num_coming_tokens(self, seq: EngineSequence, num_hits: int) -> int:
        """Tokens after its hits that others of its tenant are about to publish."""
        if not self.reads_cache(seq):
            return 0
        return self.prefix_cache.num_coming(seq, num_hits) * self._config.block_size

    def num_missing(self, hits: Sequence[tuple[EngineSequence, list[int]]], *, alone: bool) -> int:
        """Blocks that the pool lacks to admit these sequences of one tenant with their hits; none
        if <= 0. Floors keep nothing from what would run `alone`."""
        available = self.pool.num_available if alone else self.pool.available_to(hits[0][0].tenant)
        return self._num_taken(hits) - available

    def num_over_cap(self, hits: Sequence[tuple[EngineSequence, list[int]]]) -> int:
        """Blocks by which their tenant would exceed its cap with them; none if <= 0."""
        share = hits[0][0].share
        if share.kv_cap_blocks is None:
            return 0
        held = self.pool.held_by_tenant.get(share.tenant, 0)
        return held + self._num_taken(hits) - share.kv_cap_blocks

    def is_within_floor(self, hits: Sequence[tuple[EngineSequence, list[int]]]) -> bool:
        """Whether their tenant has a claim to the blocks, whoever holds them."""
        share = hits[0][0].share
        held = self.pool.held_by_tenant.get(share.tenant, 0)
        return held + self._num_taken(hits) <= share.kv_floor_blocks

    def _num_taken(self, hits: Sequence[tuple[EngineSequence, list[int]]]) -> int:
        """Blocks that would become the tenant's."""
        needed = 0
        received = set(self._received)
        for seq, found in hits:
            missing = range(len(found), self.num_blocks(seq.num_tokens))
            sources = (self._shareable(seq, index) for index in missing)
            shared = {source for source in sources if source is not None}
            needed += len(missing) - len(shared & received)
            received |= shared
        found_ids = {block_id for _, found in hits for block_id in found}
        revived = sum(not self.pool.blocks[block_id].ref_count for block_id in found_ids)
        return needed + revived

    def num_leaving_for(self, seq: EngineSequence) -> int:
        """Blocks that become available to the sequence with the next `commit`."""
        tenant = seq.tenant if self._is_capped(seq) else None
        leaving = Counter(block_id for _, table in self._leaving for block_id in table)
        return sum(
            self.pool.blocks[i].ref_count == n and tenant in (None, self.pool.blocks[i].tenant)
            for i, n in leaving.items()
        )

    def _num_takeable(self, seq: EngineSequence, alone: bool) -> int:
        """Blocks that the sequence's tenant may take now, by the pool and by its cap."""
        available = self.pool.num_available if alone else self.pool.available_to(seq.tenant)
        cap = seq.share.kv_cap_blocks
        if cap is None:
            return available
        return min(available, cap - self.pool.held_by_tenant.get(seq.tenant, 0))

    def can_take_from(self, seq: EngineSequence, victim: EngineSequence) -> bool:
        """Whether the sequence could get the victim's blocks: its own tenant's, or, below its cap,
        what is beyond another tenant's floor."""
        if victim.tenant == seq.tenant:
            return True
        return not self._is_capped(seq) and self.pool.borrowed_by(victim.tenant) > 0

    def _is_capped(self, seq: EngineSequence) -> bool:
        """Whether its own cap keeps the sequence's tenant from taking another block."""
        cap = seq.share.kv_cap_blocks
        return cap is not None and self.pool.held_by_tenant.get(seq.tenant, 0) >= cap

    def num_shared_tokens(self, seq: EngineSequence) -> int:
        """Computed tokens whose blocks others hold too: they outlive this sequence."""
        shared = sum(self.pool.blocks[block_id].ref_count > 1 for block_id in seq.block_table)
        return min(shared * self._config.block_size, seq.num_computed_tokens)

    def owed_by(self, seq: EngineSequence) -> float:
        """What the sequence owes now for all that it holds, here or parked. O(its blocks)."""
        owed = self.pool.owed(seq.block_table)
        return owed if seq.parked is None else owed + seq.parked.store.owed(seq.parked.block_ids)

    # -- changes ------------------------------------------------------------------------------

    def _take(self, seq: EngineSequence, block_ids: list[int]) -> None:
        """The sequence holds these too, from now on."""
        self._charge(seq, -self.pool.touch(block_ids, seq.tenant))

    def _charge(self, seq: EngineSequence, block_seconds: float) -> None:
        seq.kv_block_seconds += block_seconds
        self.meter.charge(seq.tenant, block_seconds)

    def hold(self, seq: EngineSequence, hits: list[int]) -> None:
        """Keep what `match` found from being evicted, until `admit`."""
        self._take(seq, hits)

    def admit(self, seq: EngineSequence, hits: list[int]) -> int:
        """Give a sequence blocks for all its tokens, after the hits that it holds; how many
        tokens' KV those provide.

        Parked KV beyond the hits is copied into the new blocks; `num_computed_tokens` says
        afterwards how far the KV reaches.
        """
        tokens_hit = len(hits) * self._config.block_size
        seq.block_table = list(hits)
        for index in range(len(hits), self.num_blocks(seq.num_tokens)):
            seq.block_table.append(self._place(seq, index))
        if seq.parked is not None:
            self._fetched.append((seq, seq.parked))
            seq.parked = None
        seq.num_computed_tokens = max(seq.num_computed_tokens, tokens_hit)
        if self.uses_cache(seq):
            self.queried_tokens[seq.tenant] += seq.num_tokens
            self.hit_tokens[seq.tenant] += tokens_hit
            self.prefix_cache.announce(seq, len(hits))
        self._changed(seq)
        return tokens_hit

    def _place(self, seq: EngineSequence, index: int) -> int:
        """A block for the sequence's block `index`, into which its parked KV is copied. What its
        group has in one block of the prefill pool is received once, and shared here too."""
        parked, shareable = seq.parked, self._shareable(seq, index)
        if shareable is not None and shareable in self._received:
            self._take(seq, [self._received[shareable]])
            return self._received[shareable]
        (target,) = self.pool.allocate(1, seq.tenant)
        if shareable is not None:
            self._received[shareable] = target
        if parked is not None and index < len(parked.block_ids):
            self._copied_in[parked.source].append((parked.block_ids[index], target))
        return target

    def _shareable(self, seq: EngineSequence, index: int) -> int | None:
        """The full block of the prefill pool that holds the sequence's block `index`, if any."""
        is_full = index < seq.num_computed_tokens // self._config.block_size
        if not is_full or seq.parked is None or seq.parked.source != "prefill":
            return None
        return seq.parked.block_ids[index]

    def grow(self, seq: EngineSequence, *, alone: bool) -> int:
        """Make room for the sequence's last token, which is to be computed; 0, or how many blocks
        are missing. A partial block that others hold too is copied first. Floors keep nothing from
        what runs `alone`: it could not give way to anybody."""
        table = seq.block_table
        index = seq.num_computed_tokens // self._config.block_size
        is_shared = index < len(table) and self.pool.blocks[table[index]].ref_count > 1
        needed = self.num_blocks(seq.num_tokens) - len(table) + is_shared
        if needed:
            available = self._num_takeable(seq, alone)
            if needed > available:
                return needed - available
            fresh = self.pool.allocate(needed, seq.tenant)
            if is_shared:
                shared, table[index] = table[index], fresh.pop()
                self._copied[table[index]] = shared
                self._charge(seq, self.pool.free([shared]))
            table += fresh
            self._changed(seq)
        return 0

    def fork(self, parent: EngineSequence, child: EngineSequence) -> None:
        """The child holds what its parent holds."""
        self._take(child, parent.block_table)
        child.block_table = list(parent.block_table)
        child.block_keys = list(parent.block_keys)
        child.num_public_blocks = parent.num_public_blocks
        self._changed(child)

    def extend_beams(
        self, beams: Sequence[EngineSequence], choices: Sequence[tuple[int, int]]
    ) -> None:
        """Beam i goes on as beam `parent` did, with one more token: choices[i] = parent, token."""
        moved = [
            (beam, list(old.block_table), list(old.block_keys), [*old.token_ids, token])
            for beam, (parent, token) in zip(beams, choices, strict=True)
            if (old := beams[parent]) is not beam
        ]
        for beam, table, _, _ in moved:
            self._take(beam, table)
        for beam, _, _, _ in moved:
            self._charge(beam, self.pool.free(beam.block_table))
        for beam, (parent, token) in zip(beams, choices, strict=True):
            if beam is beams[parent]:
                beam.token_ids.append(token)
        for beam, table, keys, token_ids in moved:
            beam.block_table, beam.block_keys, beam.token_ids = table, keys, token_ids
            self._changed(beam)

    def publish(self, seq: EngineSequence, start: int) -> None:
        """Tokens [start, num_computed_tokens) are really there: others may find them."""
        block_size = self._config.block_size
        if start // block_size != seq.num_computed_tokens // block_size and self.uses_cache(seq):
            self.prefix_cache.publish(seq, self.pool, start, seq.num_computed_tokens)

    def swap_out(self, seq: EngineSequence) -> None:
        """Park a sequence's KV in host memory, which has the room."""
        table = seq.block_table[: self.num_blocks(seq.num_computed_tokens)]
        host = self.host.allocate(len(table), seq.tenant)
        # A block that was to be copied on write in this step has its content elsewhere still.
        sources = (self._copied.get(block_id, block_id) for block_id in table)
        self._swapped_out += zip(sources, host, strict=True)
        seq.parked = ParkedKV(self.host, "host", host)
        self._leaving.append((seq, seq.block_table))
        self._detach(seq)

    def park(self, seq: EngineSequence) -> None:
        """Keep a sequence's KV here for another pool to copy from."""
        seq.parked = ParkedKV(self.pool, "prefill", seq.block_table)
        self._detach(seq)

    def unpark(self, seq: EngineSequence) -> None:
        """Give parked KV up: the sequence has nothing computed any more."""
        assert seq.parked is not None
        self._charge(seq, seq.parked.store.free(seq.parked.block_ids))
        seq.parked = None
        seq.num_computed_tokens = 0

    def release(self, seq: EngineSequence, *, discard: bool = False) -> None:
        """Free a sequence's blocks; its full ones stay cached, unless they cannot be trusted."""
        if discard:
            for block_id in seq.block_table:
                self.prefix_cache.discard(self.pool.blocks[block_id])
        self._charge(seq, self.pool.free(seq.block_table))
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
        use stay where they are, but nobody finds them any more. Public prompts are nobody's: they
        are forgotten with all."""
        for block in self.pool.blocks:
            is_meant = tenant is None or (block.tenant == tenant and block.namespace is not None)
            if block.ref_count and block.key and is_meant:
                self.prefix_cache.discard(block)
        return self.pool.reset(tenant)

    def forget_idle(self) -> None:
        """Drop the counts of tenants that have no block anywhere."""
        self.meter.forget_idle()
        kept = (self.pool.held_by_tenant, self.pool.cached_by_tenant, self.host.held_by_tenant)
        for counts in (self.queried_tokens, self.hit_tokens, self.pool.evicted_by_tenant):
            for tenant in [t for t in counts if not any(t in held for held in kept)]:
                del counts[tenant]

    # -- one step -----------------------------------------------------------------------------

    def take_copies(self) -> BlockCopies:
        """What must be copied before the step computes; `commit` follows when it has run."""
        copies = BlockCopies(
            swapped_out=tuple(self._swapped_out),
            copied=tuple((source, target) for target, source in self._copied.items()),
            swapped_in=tuple(self._copied_in["host"]),
            received=tuple(self._copied_in["prefill"]),
        )
        self._swapped_out, self._copied = [], {}
        self._copied_in, self._received = {"host": [], "prefill": []}, {}
        return copies

    def commit(self, now: float) -> None:
        """The step has run, or failed, by `now`: what its copies read may be used again."""
        self.meter.advance(now)
        for seq, kv in self._fetched:
            self._charge(seq, kv.store.free(kv.block_ids))
        for seq, table in self._leaving:
            self._charge(seq, self.pool.free(table))
        self._fetched, self._leaving = [], []

    def check(
        self, sequences: Iterable[EngineSequence], parked_by: Iterable[EngineSequence]
    ) -> None:
        """Raise InvariantError unless every book balances with these live sequences; those of
        `parked_by`, which include them, may have KV parked here. O(blocks)."""
        live = list(sequences)
        parked = [seq.parked for seq in parked_by if seq.parked is not None]
        parked += [kv for _, kv in self._fetched]
        here = [kv.block_ids for kv in parked if kv.store is self.pool]
        leaving = [table for _, table in self._leaving]
        self.pool.check([*(seq.block_table for seq in live), *here, *leaving])
        self.meter.check()
        self.host.check(kv.block_ids for kv in parked if kv.store is self.host)
        if not self.prefix_cache.check_announced(seq for seq in live if seq.block_table):
            raise InvariantError("prefix cache: announced by a sequence that does not run")
