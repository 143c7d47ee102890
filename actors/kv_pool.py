"""The KV pool actor: answers each Reserve of the scheduler."""
from __future__ import annotations

from actors.mailbox import Mailbox
from actors.messages import Reserve, Reserved
from actors.policy.block_pool import BlockPool


class KVPool:
    """`check`: prove after every Reserve that no block is lost. It looks at every block: for debugging and tests."""

    def __init__(self, pool: BlockPool, *, check: bool = False) -> None:
        self.pool = pool
        self.check = check
        self._inbox: Mailbox[Reserve] = Mailbox()
        self._answers: Mailbox[Reserved] = Mailbox()

    async def ask(self, reserve: Reserve) -> Reserved:
        """The scheduler's side. One question at a time."""
        self._inbox.send(reserve)
        return await self._answers.get()

    async def run(self) -> None:
        """Until cancelled. Raises: AssertionError where blocks do not add up, if that is checked."""
        while True:
            reserve = await self._inbox.get()
            self._answers.send(self.pool.reserve(reserve))
            if self.check:
                self.pool.check_integrity()
