"""The scheduler actor: moves the messages, while `actors/policy/scheduler.py` decides."""
from __future__ import annotations

import time

from actors.kv_pool import KVPool
from actors.mailbox import Mailbox, Outbox
from actors.messages import NewTokens, StepPlan
from actors.policy.scheduler import SchedulerMessage, SchedulerPolicy


class Scheduler:
    """Keeps up to `overlap` + 1 steps in flight."""

    def __init__(self, policy: SchedulerPolicy, inbox: Mailbox[SchedulerMessage], pool: KVPool,
                 executor: Outbox[StepPlan], tokenizer: Outbox[NewTokens]) -> None:
        self.policy = policy
        self.inbox = inbox
        self.pool = pool
        self.executor = executor
        self.tokenizer = tokenizer
        self.busy_s = 0.0                   # with work; another thread may read it

    async def run(self) -> None:
        """Until cancelled."""
        since_s = time.monotonic()
        while True:
            was_idle = self.policy.is_idle
            messages = await self.inbox.drain()
            now_s = time.monotonic()
            if not was_idle:
                self.busy_s += now_s - since_s
            since_s = now_s
            self.policy.apply(messages)
            while self.policy.has_work():
                plan = await self._make_plan()
                if plan is not None:
                    self.executor.send(plan)
                elif self.policy.num_in_flight:
                    break                   # nothing fits until a result comes
            output = self.policy.take_output()
            if output is not None:          # launch first, deliver after
                self.tokenizer.send(output)

    async def _make_plan(self) -> StepPlan | None:
        """One round with the KV pool. NOTE: the inbox is not read before it ends."""
        reserved = await self.pool.ask(self.policy.wants())
        again = self.policy.preempt(reserved)
        if again is not None:
            reserved = await self.pool.ask(again)
        return self.policy.plan(reserved)
