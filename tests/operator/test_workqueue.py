"""The work queue returns keys once, again, later and in parallel, as documented."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from rljob_operator.workqueue import QueueClosed, Slots, WorkQueue, work_through

Test = Callable[[], Coroutine[None, None, None]]


def middle() -> float:
    """Randomness that neither lengthens nor shortens a delay."""
    return 0.5


def together(_: str) -> str:
    """Puts all keys into one group."""
    return ""


def test_a_key_added_many_times_comes_once() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        for _ in range(500):
            queue.add("a")
        queue.add("b")
        assert [await queue.get(), await queue.get()] == ["a", "b"]
        assert queue.num_waiting == 0

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_key_added_while_it_is_worked_on_comes_again_afterwards() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        queue.add("a")
        await queue.get()
        queue.add("a")
        queue.add("a")
        assert queue.num_waiting == 0
        queue.done("a")
        assert (queue.num_waiting, await queue.get()) == (1, "a")
        queue.done("a")
        assert queue.num_waiting == 0

    asyncio.run(asyncio.wait_for(test(), 240))


def test_namespaces_are_served_in_turn() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, lambda key: key[0])
        for number in range(1000):
            queue.add(f"a{number}")
        for key in ("b0", "b1", "c0"):
            queue.add(key)
        first = [await queue.get() for _ in range(7)]
        assert first == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
        queue.add("b0")
        queue.done("b0")
        assert [await queue.get(), await queue.get(), await queue.get()] == ["a4", "b0", "a5"]
        assert queue.num_waiting == 994

    asyncio.run(asyncio.wait_for(test(), 240))


def test_the_earliest_of_several_times_wins() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        loop = asyncio.get_running_loop()
        started = loop.time()
        queue.add_after("a", 5000.0)
        queue.add_after("a", 0.05)
        queue.add_after("a", 3000.0)
        assert queue.num_delayed == 1
        await queue.get()
        assert loop.time() - started >= 0.05
        assert queue.num_delayed == 0

    asyncio.run(asyncio.wait_for(test(), 240))


def test_starting_work_cancels_the_planned_requeue() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        queue.add_after("a", 0.05)
        queue.add("a")
        await queue.get()
        queue.done("a")
        await asyncio.sleep(0.1)
        assert (queue.num_waiting, queue.num_delayed) == (0, 0)

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_paused_key_waits_however_often_it_is_added_and_others_do_not() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        loop = asyncio.get_running_loop()
        queue.add("a")
        assert await queue.get() == "a"
        paused_at = loop.time()
        queue.pause("a", 0.2)
        queue.add("a")
        queue.done("a")
        queue.add("a")
        queue.add_after("a", 0.0)
        queue.add("b")
        assert [await queue.get(), await queue.get()] == ["b", "a"]
        assert loop.time() - paused_at >= 0.19
        queue.done("a")
        queue.add("a")
        assert await queue.get() == "a"

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_pause_without_events_adds_nothing() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        queue.add("a")
        await queue.get()
        queue.pause("a", 0.01)
        queue.done("a")
        await asyncio.sleep(0.05)
        assert queue.num_waiting == 0

    asyncio.run(asyncio.wait_for(test(), 240))


def test_delays_double_up_to_five_minutes_and_start_again() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        delays = [queue.retry("a") for _ in range(13)]
        assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0, 300.0]
        assert queue.retry("b") == 0.5
        assert queue.retry("b", at_least_seconds=30.0) == 30.0
        queue.forget_failures("a")
        assert queue.retry("a") == 0.5
        queue.close()

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize(("drawn", "delay"), [(0.0, 0.4), (0.75, 0.55), (0.999999, 0.6)])
def test_delays_are_spread(drawn: float, delay: float) -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(lambda: drawn, together)
        assert queue.retry("a") == pytest.approx(delay, abs=1e-5)
        queue.close()

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_closed_queue_returns_no_keys() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        waiting = asyncio.create_task(queue.get())
        queue.add_after("b", 0.01)
        await asyncio.sleep(0)
        queue.close()
        queue.add("a")
        with pytest.raises(QueueClosed):
            await waiting
        await asyncio.sleep(0.05)
        with pytest.raises(QueueClosed):
            await queue.get()

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_key_is_never_worked_on_concurrently_and_others_continue() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        at_work: list[str] = []
        most: dict[str, int] = {}
        finished: list[str] = []
        others_are_done = asyncio.Event()

        async def work(key: str) -> None:
            at_work.append(key)
            most[key] = max(most.get(key, 0), at_work.count(key))
            if key == "slow":
                await others_are_done.wait()
            else:
                await asyncio.sleep(0.01)
            at_work.remove(key)
            finished.append(key)

        task = asyncio.create_task(work_through(queue, Slots(2), work))
        queue.add("slow")
        while not at_work:
            await asyncio.sleep(0.01)
        queue.add("slow")
        for number in range(5):
            queue.add(f"quick-{number}")
        while len(finished) < 5:
            await asyncio.sleep(0.01)
        assert "slow" not in finished
        others_are_done.set()
        while len(finished) < 7:
            await asyncio.sleep(0.01)
        assert set(most.values()) == {1}
        assert finished[5:] == ["slow", "slow"]
        queue.close()
        await task

    asyncio.run(asyncio.wait_for(test(), 240))


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_waiting_key_does_not_block_others(num_slots: int) -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        slots = Slots(num_slots)
        release = asyncio.Event()
        finished: list[str] = []
        num_inside = 0

        async def work(key: str) -> None:
            nonlocal num_inside
            if key.startswith("slow"):
                async with slots.released():
                    await release.wait()
            num_inside += 1
            assert num_inside <= num_slots
            await asyncio.sleep(0.01)
            num_inside -= 1
            finished.append(key)

        task = asyncio.create_task(work_through(queue, slots, work))
        for number in range(10):
            queue.add(f"slow-{number}")
        await asyncio.sleep(0.05)
        queue.add("quick")
        while "quick" not in finished:
            await asyncio.sleep(0.01)
        assert finished == ["quick"]
        release.set()
        while len(finished) < 11:
            await asyncio.sleep(0.01)
        queue.close()
        await task

    asyncio.run(asyncio.wait_for(test(), 240))


def test_a_failing_key_delays_no_other() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)
        tries: list[tuple[float, int]] = []
        """Time of each try, and how many other keys were done by then."""
        finished: list[str] = []

        async def work(key: str) -> None:
            if key == "poison":
                tries.append((asyncio.get_running_loop().time(), len(finished)))
                queue.retry(key)
            else:
                finished.append(key)

        task = asyncio.create_task(work_through(queue, Slots(1), work))
        queue.add("poison")
        for number in range(100):
            queue.add(f"good-{number}")
        while len(tries) < 2:
            await asyncio.sleep(0.01)
        (first, _), (second, num_finished) = tries[:2]
        assert num_finished == 100
        assert second - first >= 0.5
        queue.close()
        await task

    asyncio.run(asyncio.wait_for(test(), 240))


def test_an_exception_in_the_work_ends_the_workers() -> None:
    async def test() -> None:
        queue: WorkQueue[str] = WorkQueue(middle, together)

        async def work(key: str) -> None:
            raise MemoryError(key)

        queue.add("a")
        with pytest.raises(ExceptionGroup) as caught:
            await work_through(queue, Slots(1), work)
        assert caught.group_contains(MemoryError, match="a")

    asyncio.run(asyncio.wait_for(test(), 240))
