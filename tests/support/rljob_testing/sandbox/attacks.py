"""Attempts to escape from the sandbox of the reward Code, or to do damage from within.

Each attempt is Python code that prints what happened. SCORER in the code is replaced by the id of the scoring process,
and TARGET by a file that all users can write. An attempt that succeeds prints ESCAPED. `is_stopped` decides by the
output and by the failure that the sandbox reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ESCAPED = "ESCAPED"


@dataclass(frozen=True)
class Attack:
    """An attempt, and what stops it."""

    code: str
    stopped_by: str
    """What the code must print, or what the failure of the run must contain."""
    seconds: float = 2.0
    """The time limit of the run."""
    needs_landlock: bool = False
    """Whether only Landlock stops it."""

    def code_against(self, scorer: int, target: str = "/dev/full") -> str:
        """The code, with the process id of the scoring process, and a file that all users can write."""
        return self.code.replace("SCORER", str(scorer)).replace("TARGET", repr(target))


_TRY = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, act):
    try:
        result = act()
    except OSError as error:
        # A read-only file system, as in a restricted pod, refuses to write before Landlock does.
        print(what, errno.errorcode[errno.EACCES if error.errno == errno.EROFS else error.errno])
    else:
        print(what, "ESCAPED" if result is None or not isinstance(result, int) or result >= 0 else
              errno.errorcode[ctypes.get_errno()])
def call(number, *arguments):
    return lambda: libc.syscall(ctypes.c_long(number), *[
        ctypes.c_long(each) if isinstance(each, int) else each for each in arguments])
parent, scorer, target = os.getppid(), SCORER, TARGET
arm = os.uname().machine == "aarch64"
"""


def _refused(*attempts: str, error: str = "EPERM", needs_landlock: bool = False) -> Attack:
    """An attempt in which each of these expressions must fail with this error."""
    lines = [f"attempt({number}, lambda: {act})" for number, act in enumerate(attempts)]
    expected = "".join(f"{number} {error}\n" for number in range(len(attempts)))
    return Attack(_TRY + "\n".join(lines), expected, needs_landlock=needs_landlock)


# Instructions of x86-64: `mov eax, 20; int 0x80; ret` asks a 64-bit kernel by its 32-bit interface for the process id.
_INT_80 = """
import ctypes, mmap, os
if os.uname().machine != "x86_64":
    os.abort()
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000cd80c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""

_OPEN_DESCRIPTORS = """
import os
found = []
for number in range(3, 4096):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(f'ESCAPED {found}' if found else 'none')
"""

ATTACKS: Mapping[str, Attack] = {
    # Processes.
    "fork bomb": Attack("import os\nwhile True: os.fork()\nprint('ESCAPED')", "Operation not permitted"),
    "processes by every call": _refused(
        "os.fork()",
        "call(220 if arm else 56, 17, 0, 0, 0, 0)()",
        "call(220 if arm else 58, 17, 0, 0, 0, 0)()",
        "call(220 if arm else 56, 0x10000000, 0, 0, 0, 0)()",
    ),
    "clone3": _refused("call(435, ctypes.create_string_buffer(88), 88)()", error="ENOSYS"),
    "a shell": _refused("os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])", "os.posix_spawn('/bin/sh', ['sh'], {})"),
    "a shell by subprocess": Attack(
        "import subprocess\nprint('ESCAPED', subprocess.check_output(['/bin/sh', '-c', 'id']))", "PermissionError"
    ),
    "a program in memory": _refused("os.memfd_create('x')", "call(281 if arm else 322, 0, b'', None, None, 0x1000)()"),
    "kill others": _refused(
        "os.kill(parent, 9)",
        "os.kill(scorer, 9)",
        "os.kill(parent, 0)",
        "os.killpg(os.getpgid(parent), 9)",
        "os.kill(0, 9)",
        "os.kill(-1, 9)",
        "os.kill(1, 9)",
        "call(131 if arm else 234, parent, parent, 9)()",
        "call(130 if arm else 200, parent, 9)()",
        "call(138 if arm else 129, parent, 9, ctypes.create_string_buffer(128))()",
        "os.pidfd_open(parent)",
        "call(424, 3, 9, None, 0)()",
    ),
    "kill by other ways": _refused(
        # fcntl F_SETOWN and F_SETSIG, prlimit of the CPU time, timers with SIGKILL, the signal at the parent's death.
        "__import__('fcntl').fcntl(0, 8, parent)",
        "__import__('fcntl').fcntl(0, 10, 9)",
        "__import__('resource').prlimit(parent, 0, (1, 1))",
        "call(107 if arm else 222, 0, None, ctypes.create_string_buffer(8))()",
        "-1 if libc.prctl(1, 0, 0, 0, 0) else 0",
        "os.kill(os.getpid(), 9)",
    ),
    "prlimit of itself": _refused(
        # SIGKILL at a limit would look like a lack of memory.
        "__import__('resource').prlimit(0, 0, (1, 1))",
        "__import__('resource').prlimit(os.getpid(), 0, (1, 1))",
        "__import__('resource').prlimit(0, 15, (1, 1))",
        "call(164 if arm else 160, 0, ctypes.create_string_buffer(bytes([1] + [0] * 7) * 2))()",
    ),
    "read another process": _refused(
        "call(117 if arm else 101, 16, parent, None, None)()",
        "call(270 if arm else 310, parent, None, 0, None, 0, 0)()",
        "call(271 if arm else 311, parent, None, 0, None, 0, 0)()",
        "call(272 if arm else 312, parent, parent, 0, 0, 0)()",
    ),
    "other interfaces of the kernel": _refused(
        *("call(425, 8, ctypes.create_string_buffer(120))()", "call(280 if arm else 321, 0, None, 0)()"),
        *("call(241 if arm else 298, None, 0, -1, -1, 0)()", "call(282 if arm else 323, 0)()"),
        *("call(217 if arm else 248, b'user', b'a', b'b', 1, -3)()", "call(219 if arm else 250, 0, -3, 1)()"),
        *("call(40 if arm else 165, b'a', b'/', b'tmpfs', 0, None)()", "call(97 if arm else 272, 0x10000000)()"),
        *("call(268 if arm else 308, 0, 0)()", "call(277 if arm else 317, 0, 0, None)()", "os.chroot('/')"),
        *("call(446, 0, 0)()", "os.setuid(0)", "call(91 if arm else 126, b'', None)()"),
        *("call(194 if arm else 29, 0, 4096, 0o1600)()", "os.sched_setaffinity(parent, [0])", "os.nice(1)"),
    ),
    "numbers of the x32 interface": Attack(
        _TRY + "attempt(0, call(0x40000000 + 57)); attempt(1, call(0x40000000 + 39))",
        "0 EPERM\n1 EPERM\n",
    ),
    "the 32-bit interface": Attack(_INT_80, "ended by signal SIGSYS|ended by signal SIGABRT"),
    # The network.
    "sockets": _refused(
        *("__import__('socket').socket()", "__import__('socket').socket(1, 1)", "__import__('socket').socket(16, 3)"),
        *(
            "__import__('socket').socket(1, 2)",
            "__import__('socket').socketpair()",
            "__import__('socket').socket(40, 1)",
        ),
    ),
    "a connection": Attack(
        "import urllib.request as u\nprint('ESCAPED', u.urlopen('http://127.0.0.1'))", "not permitted"
    ),
    # Files.
    "files of others": _refused(
        *("open('/etc/passwd')", "open('/proc/self/environ')", "open(f'/proc/{parent}/environ')"),
        *("open(f'/proc/{parent}/mem', 'rb')", "open('/proc/1/environ')", "os.listdir(f'/proc/{parent}/fd')"),
        *("os.listdir('/')", "os.listdir('/proc')"),
        *(
            "os.listdir(os.path.dirname(os.getcwd()))",
            "open('/proc/self/cwd/../../../../etc/passwd')",
            "os.listdir('..')",
        ),
        error="EACCES",
        needs_landlock=True,
    ),
    "memory and variables of the scoring process": _refused(
        *(
            "open(f'/proc/{scorer}/environ')",
            "open(f'/proc/{scorer}/mem', 'rb')",
            "os.readlink(f'/proc/{scorer}/fd/0')",
        ),
        error="EACCES",
    ),
    "write outside of its folder": _refused(
        *("open('/tmp/escaped', 'w')", "open('../escaped', 'w')", "open('/dev/shm/escaped', 'w')"),
        *("open(os.__file__, 'a')", "open('/proc/self/oom_score_adj', 'w')", "open('/escaped', 'w')"),
        error="EACCES",
        needs_landlock=True,
    ),
    "write system files": Attack(
        "import os\nfor path in ('/tmp/escaped', os.__file__, '/dev/shm/escaped'):\n    try:\n        open(path, 'a')\n"
        "        print('ESCAPED', path)\n    except PermissionError:\n        print('refused')",
        "refused\nrefused\nrefused\n",
    ),
    "truncate a file of others": _refused(
        # Read-only and the access mode 3, with O_TRUNC; then the calls truncate and creat.
        *("os.open(target, os.O_TRUNC)", "os.open(target, 3 | os.O_TRUNC)", "os.open(target, 3)"),
        "call(56 if arm else 2, *((-100, target.encode()) if arm else (target.encode(),)), 3 | os.O_TRUNC)()",
        *("os.truncate(target, 0)", "call(45 if arm else 85, target.encode(), 0)()"),
    ),
    "write a file of others": Attack(
        _TRY + "\nfor flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_CREAT):\n"
        "    attempt(flags, lambda: os.open(target, flags))\nprint('none')",
        "none\n",
    ),
    "links and folders": _refused(
        *("os.symlink('/etc/passwd', 'a')", "os.link('/etc/passwd', 'a')", "os.mkdir('a')", "os.mkfifo('a')"),
        *("os.rename('a', 'b')", "os.unlink('a')", "os.chmod('.', 0o777)", "os.truncate('a', 0)"),
    ),
    "a file without a name": _refused("os.open('.', os.O_TMPFILE | os.O_RDWR)"),
    "open descriptors of the sandbox": Attack(_OPEN_DESCRIPTORS, "none\n"),
    "environment variables": Attack("import os\nprint(dict(os.environ), os.getenv('CANARY'))", "{} None\n"),
    # Resources.
    "10 GiB of memory": Attack("x = bytearray(10 << 30)\nprint('ESCAPED')", "MemoryError"),
    "memory in small pieces": Attack("x = []\nwhile True: x.append('x' * 10 ** 6 + str(len(x)))", "MemoryError", 10.0),
    "many files": Attack(
        "for number in range(10 ** 9):\n    open(f'{number}', 'w').close()",
        "created more than 256 files|not permitted",
        10.0,
    ),
    "large files": Attack(
        "data = b'x' * (1 << 20)\nfor number in range(10 ** 9):\n    with open(f'{number}', 'wb') as file:\n"
        "        for _ in range(15): file.write(data)",
        "bytes into files|not permitted",
        10.0,
    ),
    "one large file": Attack(
        "f = open('a', 'wb')\nwhile True: f.write(b'x' * (1 << 20))", "File too large|not permitted", 10.0
    ),
    "a flood of output": Attack("while True: print('x' * 1000)", "to standard output", 10.0),
    "a flood of errors": Attack(
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "to standard error", 10.0
    ),
    "an endless loop": Attack("while True: pass", "ran longer than 0.5 s", 0.5),
    "sleep forever": Attack("import time\ntime.sleep(10 ** 6)", "ran longer than 0.2 s", 0.2),
    "many threads": Attack(
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(1000,)).start()",
        "started more than 64 threads",
        10.0,
    ),
    "ignored signals": Attack(
        "import signal\nfor number in set(range(1, 65)) - {9, 19, 32, 33}:\n    signal.signal(number, signal.SIG_IGN)\n"
        "while True: pass",
        "ran longer than 0.5 s",
        0.5,
    ),
    "a thread that goes on": Attack(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\nprint('done')",
        "done\n",
    ),
    "a crash": Attack("import ctypes\nctypes.string_at(0)", "ended by signal SIGSEGV"),
    "closed descriptors": Attack("import os\nos.closerange(0, 100)\nwhile True: pass", "ran longer than 0.3 s", 0.3),
}


def is_stopped(attack: Attack, failure: str, output: str) -> bool:
    """Whether the attempt ended as expected."""
    seen = f"{output}{failure}"
    return ESCAPED not in seen and any(each in seen for each in attack.stopped_by.split("|"))
