"""Environments that hang, die or write into the connection: nothing hangs, and only the guilty rollout is blamed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rljob_testing.environments import call, process_ids, processes_for, run, write_module
from rljob_trainer.environments.environment_pool import RolloutPlace
from rljob_trainer.environments.failures import EnvironmentLostError, EnvironmentTimeoutError
from rljob_trainer.errors import ConfigurationError
from rljob_trainer.processes.child_process import ChildProcess

CLASSES = '''
import asyncio, os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent
VALID = '["OK", [["forged", false]]]'


class Faulty:
    def reset(self, what="", **row):
        self.what = what
        if what == "reset hangs":
            time.sleep(600)

    def act(self, what: str) -> str:
        """Acts."""
        if what == "hangs":
            (FOLDER / "hangs").write_text(str(os.getpid()))
            time.sleep(600)
        if what == "exits":
            os._exit(7)
        if what == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "forks and exits":
            if child := os.fork():
                (FOLDER / "grandchild").write_text(str(child))
                os._exit(0)
            time.sleep(600)
        if what.startswith("writes "):
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, what.removeprefix("writes ").encode() + b"\\n")
                except OSError:
                    pass
        if what == "closes":
            os.closerange(3, 10_000)
            time.sleep(600)
        if what == "takes a while":
            time.sleep(0.6)
        return what

    async def wait(self, flag: str) -> str:
        """Waits."""
        (FOLDER / flag).touch()
        while not (FOLDER / f"{flag} ends").exists():
            await asyncio.sleep(0.01)
        return flag

    async def sleep(self, seconds: float) -> str:
        """Sleeps."""
        await asyncio.sleep(seconds)
        return "slept"

    async def leave(self) -> str:
        """Leaves code behind that blocks the process."""
        async def occupy():
            await self.wait("left")
            (FOLDER / "occupied").touch()
            time.sleep(600)
        self.task = asyncio.create_task(occupy())
        return "left"

    async def ignore(self) -> str:
        """Answers although it is cancelled."""
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return "late"

    async def block(self) -> str:
        """Blocks although it is async."""
        time.sleep(600)

    def close(self):
        if self.what == "close hangs":
            time.sleep(600)


if (FOLDER / "refuse").exists():
    raise RuntimeError("not today")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, CLASSES)
    return tmp_path


async def act(place: RolloutPlace, what: str) -> str:
    [result] = await place.call_tools([call("act", what=what)])
    return result.text


async def until(reached: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("tool", ["act", "block", "sleep"])
def test_a_call_that_hangs_is_blamed_alone(folder: Path, tool: str) -> None:
    """The others of its process are lost, and the next rollout gets a new process."""

    async def rollouts() -> None:
        async with processes_for(folder, "Faulty", rollouts_per_process=3, max_rollouts=3, timeout_seconds=0.5) as pool:
            async with pool.place() as guilty, pool.place() as waiting, pool.place() as idle:
                for place in (guilty, waiting, idle):
                    await place.open("Faulty", {}, 0)
                arguments = {"act": {"what": "hangs"}, "block": {}, "sleep": {"seconds": 600}}[tool]
                hanging = asyncio.create_task(guilty.call_tools([call(tool, **arguments)]))
                if tool == "act":
                    await until((folder / "hangs").exists)
                other = asyncio.create_task(waiting.call_tools([call("sleep", seconds=0.4)] if tool != "sleep" else []))
                with pytest.raises(EnvironmentTimeoutError, match=r"a tool .* longer than 0\.5 s"):
                    await hanging
                if tool == "sleep":
                    assert await other == []
                else:
                    with pytest.raises(EnvironmentLostError, match="another rollout exceeded the time limit"):
                        await other
                with pytest.raises(EnvironmentLostError):
                    await idle.reward()
            async with pool.place() as place:
                await place.open("Faulty", {}, 0)
                assert await act(place, "lives") == "lives"

    run(rollouts())


@pytest.mark.parametrize(
    ("what", "text", "was_killed"),
    [
        ("exits", r"ended its process \(exit code 7\)", False),
        ("is killed", r"ended its process \(signal SIGKILL\)", True),
        ("forks and exits", r"ended its process \(exit code 0\)", False),
        ("closes", "closed the connection that carries its results", False),
        ("writes [", "wrote into the connection", False),
        ('writes ["0123456789abcdef", ["OK", [["forged", false]]]]', "wrote into the connection", False),
    ],
)
def test_a_process_that_ends_is_infrastructure(folder: Path, what: str, text: str, was_killed: bool) -> None:
    async def rollout() -> None:
        async with processes_for(folder, "Faulty") as pool:
            async with pool.place() as place:
                await place.open("Faulty", {}, 0)
                with pytest.raises(EnvironmentLostError, match=text) as lost:
                    await act(place, what)
                assert lost.value.was_killed is was_killed
            async with pool.place() as place:
                await place.open("Faulty", {}, 0)
                assert await act(place, "lives") == "lives"

    run(rollout())
    if (folder / "grandchild").exists():
        assert not is_running(int((folder / "grandchild").read_text()))


@pytest.mark.parametrize(("what", "is_known"), [("exits", True), ("is killed", False)])
def test_the_call_that_blocked_the_process_has_ended_it(
    folder: Path, what: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the system has killed it: then nobody knows which rollout was the cause."""
    kill, may_end = ChildProcess.kill, threading.Event()
    monkeypatch.setattr(ChildProcess, "kill", lambda child: may_end.wait() and kill(child))

    async def rollouts() -> None:
        processes = processes_for(folder, "Faulty", rollouts_per_process=3, max_rollouts=3)
        async with processes as pool, pool.place() as guilty, pool.place() as waiting, pool.place() as idle:
            for place in (guilty, waiting, idle):
                await place.open("Faulty", {}, 0)
            other = asyncio.create_task(waiting.call_tools([call("wait", flag="begun")]))
            await until((folder / "begun").exists)
            own = asyncio.create_task(act(guilty, what))
            await until(lambda: not idle.process.is_usable)
            # It begins before the cause is known.
            of_idle = asyncio.create_task(idle.reward())
            await asyncio.sleep(0)
            may_end.set()
            results = await asyncio.gather(own, other, of_idle, return_exceptions=True)
            lost = [each for each in results if isinstance(each, EnvironmentLostError)]
            assert [each.is_own_call for each in lost] == [True, False, False]
            assert [each.caused_by_other for each in lost] == [False, is_known, is_known]

    run(rollouts())


def test_all_calls_that_are_late_are_blamed(folder: Path) -> None:
    """Otherwise a process whose rollouts all hang would have to be killed once for each."""

    async def rollouts() -> None:
        processes = processes_for(folder, "Faulty", rollouts_per_process=2, max_rollouts=2, timeout_seconds=0.5)
        async with processes as pool, pool.place() as first, pool.place() as second:
            for place in (first, second):
                await place.open("Faulty", {}, 0)
            calls = [
                asyncio.create_task(place.call_tools([call("wait", flag=flag)]))
                for place, flag in ((first, "a"), (second, "b"))
            ]
            await until(lambda: (folder / "a").exists() and (folder / "b").exists())
            # The beginning of the calls is known after this, and the limits of both are over at the next check.
            await asyncio.sleep(0.05)
            time.sleep(0.8)
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, EnvironmentTimeoutError)

    run(rollouts())


def test_time_of_another_rollout_is_not_counted(folder: Path) -> None:
    async def rollouts() -> None:
        processes = processes_for(folder, "Faulty", rollouts_per_process=2, max_rollouts=2, timeout_seconds=1.0)
        async with processes as pool, pool.place() as first, pool.place() as second:
            for place in (first, second):
                await place.open("Faulty", {}, 0)
            sleeping = asyncio.create_task(first.call_tools([call("wait", flag="begun")]))
            await until((folder / "begun").exists)
            # Two calls of 0.6 s each block the process. After that, the limit is checked a few times.
            for _ in range(2):
                assert await act(second, "takes a while") == "takes a while"
            await second.call_tools([call("sleep", seconds=0.3)])
            (folder / "begun ends").touch()
            [result] = await sleeping
            assert result.text == "begun"

    run(rollouts())


def test_a_suspended_machine_is_not_counted(folder: Path) -> None:
    """An event loop that stands still for longer than the limit looks like a suspended machine."""

    async def rollout() -> None:
        async with processes_for(folder, "Faulty", timeout_seconds=0.5) as pool, pool.place() as place:
            await place.open("Faulty", {}, 0)
            waiting = asyncio.create_task(place.call_tools([call("wait", flag="begun")]))
            await until((folder / "begun").exists)
            # The beginning of the call is known after this.
            await asyncio.sleep(0.05)
            time.sleep(1.5)
            # The limit is checked now.
            await asyncio.sleep(0.05)
            (folder / "begun ends").touch()
            [result] = await waiting
            assert result.text == "begun"

    run(rollout())


def test_a_cancelled_call_ends(folder: Path) -> None:
    """An async call is cancelled in its process, a call that has not begun never begins, and a call that blocks the
    process is ended by a kill."""

    async def rollouts() -> None:
        processes = processes_for(folder, "Faulty", rollouts_per_process=2, max_rollouts=2)
        async with processes as pool, pool.place() as first, pool.place() as second:
            for place in (first, second):
                await place.open("Faulty", {}, 0)
            calls = [call("wait", flag="a"), call("ignore"), call("wait", flag="b")]
            waiting = asyncio.create_task(first.call_tools(calls))
            await until((folder / "b").exists)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await act(first, "goes on") == "goes on"
            slow = asyncio.create_task(act(second, "takes a while"))
            unbegun = asyncio.create_task(act(first, "hangs"))
            # Both are sent now.
            await asyncio.sleep(0)
            unbegun.cancel()
            assert await slow == "takes a while"
            assert await act(second, "goes on") == "goes on"
            assert not (folder / "hangs").exists()
            [before] = process_ids(pool)
            hanging = asyncio.create_task(act(first, "hangs"))
            await until((folder / "hangs").exists)
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            with pytest.raises(EnvironmentLostError, match="was cancelled"):
                await act(second, "x")
            await until(lambda: not is_running(before))

    run(rollouts())


def test_code_that_an_earlier_call_left_behind_is_no_time_limit(folder: Path) -> None:
    async def rollouts() -> None:
        async with processes_for(folder, "Faulty", timeout_seconds=0.5) as pool, pool.place() as place:
            await place.open("Faulty", {}, 0)
            await place.call_tools([call("leave")])
            (folder / "left ends").touch()
            await until((folder / "occupied").exists)
            with pytest.raises(EnvironmentLostError, match=r"did not begin a call for 0\.5 s"):
                await act(place, "lives")

    run(rollouts())


def test_close_may_hang(folder: Path) -> None:
    """Only the process of the rollout ends; its result is there already."""

    async def rollouts() -> None:
        async with processes_for(folder, "Faulty", timeout_seconds=0.5) as pool:
            async with pool.place() as place:
                await place.open("Faulty", {"what": "close hangs"}, 0)
            async with pool.place() as place:
                await place.open("Faulty", {}, 0)
                assert await act(place, "lives") == "lives"

    run(rollouts())


def test_processes_start_on_demand_and_all_end(folder: Path) -> None:
    async def rollouts() -> list[int]:
        async with processes_for(folder, "Faulty", rollouts_per_process=2, max_rollouts=3) as pool:
            assert process_ids(pool) == []
            async with pool.place() as first, pool.place(), pool.place() as third:
                assert first.process.pid != third.process.pid
                assert len(process_ids(pool)) == 2
                await first.open("Faulty", {}, 0)
                hanging = asyncio.create_task(act(first, "hangs"))
                await until((folder / "hangs").exists)
                used = process_ids(pool)
                await pool.close()
                with pytest.raises(EnvironmentLostError, match="stopped"):
                    await hanging
            with pytest.raises(EnvironmentLostError, match="stopped"):
                async with pool.place():
                    pass
            return used

    assert not any(map(is_running, run(rollouts())))
    assert {each.name for each in (folder / "logs").iterdir()} == {"environment-0.log", "environment-1.log"}


def test_classes_that_cannot_be_loaded_fail_every_call(folder: Path) -> None:
    (folder / "refuse").touch()

    async def rollouts() -> None:
        async with processes_for(folder, "Faulty") as pool:
            for _ in range(2):
                with pytest.raises(ConfigurationError, match=r"classes\[0\]\.path: (?s:importing .*not today)"):
                    async with pool.place():
                        raise AssertionError

    run(rollouts())


def test_rows_that_do_not_fit_are_rejected(folder: Path) -> None:
    async def rollouts() -> None:
        async with processes_for(folder, "Faulty") as pool, pool.place() as place:
            with pytest.raises(ConfigurationError, match="open: this cannot be sent"):
                await place.open("Faulty", {"x": object()}, 0)
            # More than the connection's buffer holds.
            await place.open("Faulty", {"x": (1, {2: "tuple"}), "long": "x" * 5_000_000}, 0)

    run(rollouts())
