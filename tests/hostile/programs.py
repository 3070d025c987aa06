# ruff: noqa: E501  # programs are a line each
"""Programs that try to pass without solving, or to do harm. Each is run against TESTS; none may pass.

An adversary that tries to reach something (the network, a file, the tests) solves the problem if it gets there: it passes only if the
sandbox leaks. `{…}` in one is filled in by the test: `home` a file in the user's home, `port` a server on this machine, `mark` a name for files.
"""

TESTS = """
EXPECTED = {2: 4, 7: 49, 100: 10000}
def check(candidate):
    for x, square in EXPECTED.items():
        assert candidate(x) == square, "wrong"
check(f)
assert abs(f(3) - 9) < 1e-6
"""

SOLVED = "def f(x): return x * x\n"

ADVERSARIES: dict[str, tuple[str, str]] = {  # name: the outcome or outcomes that may come of it, the program
    # time
    "endless loop when loaded": ("timeout", "while True: pass"),
    "endless loop when called": ("timeout", "def f(x):\n while True: pass"),
    "sleeps": ("timeout", "import time\ndef f(x): time.sleep(1000)"),
    "loop that swallows signals": (
        "timeout",
        "import signal\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\nwhile True: pass",
    ),
    "regular expression that explodes": ("timeout", "import re\ndef f(x): return re.match('(a|a)*b', 'a' * 60)"),
    # processes and threads
    "fork bomb": ("timeout processes exited", "import os\nwhile True:\n try: os.fork()\n except OSError: pass"),
    "thread bomb": (
        "timeout broken memory exited",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
    ),
    "child that outlives it": ("failed", "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(1000)\ndef f(x): return 4"),
    "grandchild that outlives it, output held open": (
        "failed",
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(1000)\n os._exit(0)\ndef f(x): return 4",
    ),
    "program started in the background": (
        "failed",
        "import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'nohup sleep 1000 &'], start_new_session=True)\ndef f(x): return 4",
    ),
    "thread that outlives it": (
        "failed",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\ndef f(x): return 4",
    ),
    # memory, disk, output
    "large list": ("memory", "x = [0] * 10**9"),
    "memory eaten slowly": ("memory", "x = []\nwhile True: x.append(bytearray(1 << 20))"),
    "memory eaten by children": (
        "memory",
        "import os, time\nfor _ in range(4):\n if os.fork() == 0:\n  x = bytearray(120 << 20)\n  time.sleep(1000)\ntime.sleep(1000)",
    ),
    "memory that no process holds": ("broken", "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))"),
    "memory that its pages' owner gave back": (
        "broken",
        "import mmap, os\nfor _ in range(4):\n m = mmap.mmap(-1, 100 << 20)\n for at in range(0, 100 << 20, 4096): m[at] = 1\n"
        " m.madvise(mmap.MADV_DONTNEED)\n if os.fork() == 0: pass\n" + SOLVED,
    ),
    "memory of the zero device": ("broken", "import mmap, os\nm = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)\n" + SOLVED),
    "memory of a process whose first thread ended": (
        "memory",
        "import os, threading, time\ndef work():\n time.sleep(0.1)\n x = bytearray(100 << 20)\n time.sleep(60)\nfor _ in range(4):\n"
        " if os.fork() == 0:\n  import ctypes\n  threading.Thread(target=work).start()\n"
        "  ctypes.CDLL(None).syscall(60 if os.uname().machine == 'x86_64' else 93, 0)\ntime.sleep(60)",
    ),
    "memory of the kernel": (
        "broken",
        "import ctypes, os, socket\nC = ctypes.CDLL(None, use_errno=True)\nC.mmap.restype = ctypes.c_void_p\n"
        "def allowed(call, *arguments):\n ctypes.set_errno(0)\n call(*arguments)\n return ctypes.get_errno() != 1\n"
        "r, w = os.pipe()\nhuge = 0x40022  # MAP_HUGETLB | MAP_ANONYMOUS | MAP_PRIVATE\nx = ctypes.create_string_buffer(64)\n"
        "found = [call for call, *arguments in (\n (C.semget, 0, 32000, 0o600), (C.vmsplice, w, x, 1, 0), (C.splice, r, 0, w, 0, 1, 2), (C.tee, r, w, 1, 2),\n"
        " (C.inotify_init,), (C.inotify_init1, 0), (C.fanotify_init, 0, 0), (C.mmap, None, 2 << 20, 3, huge, -1, 0),\n"
        " (C.syscall, 206 if os.uname().machine == 'x86_64' else 0, 1, x)) if allowed(call, *arguments)]\n"
        "try: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)\nexcept PermissionError: pass\nelse: found.append(socket)\n"
        "for family in (socket.AF_INET, socket.AF_INET6):\n try: found.append(socket.socket(family))\n except OSError: pass\n"
        "assert found\n" + SOLVED,
    ),
    "file flood": ("memory", "for n in range(50000): open(f'/tmp/{{n}}', 'w').close()\n" + SOLVED),
    "folder flood": ("memory", "import os\nfor n in range(50000): os.mkdir(f'/dev/shm/{{n}}')\n" + SOLVED),
    "shared memory flood": ("broken", "for n in range(100): open(f'/dev/shm/{{n}}', 'wb').write(bytes(1 << 20))"),
    "disk flood": ("broken", "for n in range(100): open(f'/tmp/{{n}}', 'wb').write(bytes(1 << 20))"),
    "one large file": ("broken exited", "with open('/tmp/x', 'wb') as file:\n while True: file.write(bytes(1 << 20))"),
    "output flood": ("output", "while True: print('x' * 1000)"),
    "error flood from a child": ("output", "import os, time\nif os.fork() == 0:\n while True: os.write(2, b'x' * 1000)\ntime.sleep(1000)"),
    # reaching out
    "network": ("broken", "import socket\nsocket.create_connection(('127.0.0.1', {port}), 3)\n" + SOLVED),
    "network of the outside": ("broken", "import socket\nsocket.create_connection(('192.0.2.1', 80), 3)\n" + SOLVED),
    "machine that hosts this one": ("broken", "import socket\nsocket.socket(40, socket.SOCK_STREAM)\n" + SOLVED),
    "kernel's sockets": ("broken", "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET)\n" + SOLVED),
    "netlink": ("broken", "import socket\nsocket.socket(16, socket.SOCK_RAW)\n" + SOLVED),
    "packets": ("broken", "import socket\nsocket.socket(17, socket.SOCK_RAW)\n" + SOLVED),
    "paths of the host in packages": (
        "broken",
        "import glob\nfound = ''\nfor path in glob.glob('/packages/*/*.pth') + glob.glob('/packages/*/*/direct_url.json'):\n"
        " try: found += open(path).read()\n except OSError: pass\nassert found\n" + SOLVED,
    ),
    "home folder read": ("broken", "open({home!r}).read()\n" + SOLVED),
    "home folder listed": ("broken", "import os, os.path\nassert os.listdir(os.path.dirname({home!r}))\n" + SOLVED),
    "password file": ("broken", "open('/etc/passwd').read()\n" + SOLVED),
    "environment": ("broken", "import os\nos.environ['FULLBAND_SECRET']\n" + SOLVED),
    "command line of the kernel": ("broken", "assert open('/proc/cmdline').read()\n" + SOLVED),
    "processes of the host": ("broken", "import os\nassert sum(p.isdigit() for p in os.listdir('/proc')) > 4\n" + SOLVED),
    "files left behind": (
        "failed",
        "import os\nfor folder in ('/tmp', '/var/tmp', '/dev/shm', '/', '/usr', os.path.dirname({home!r})):\n"
        " try:\n  os.makedirs(folder, exist_ok=True)\n  open(folder + '/{mark}', 'w').write('x')\n except OSError: pass\ndef f(x): return 4",
    ),
    "its own harness rewritten": ("broken", "open('/fullband/inside/tester.py', 'w').write('x')\n" + SOLVED),
    # privileges
    "becomes root": ("broken", "import os\nos.setuid(0)\n" + SOLVED),
    "new user namespace": ("broken", "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\n" + SOLVED),
    "new user namespace by clone": ("broken", "import ctypes\nassert ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0) >= 0\n" + SOLVED),
    "mounts": ("broken", "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0\n" + SOLVED),
    "limits raised": (
        "broken",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n" + SOLVED,
    ),
    # the tester
    "kills its parent": ("broken failed exited", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return 4"),
    "kills everything": ("broken failed exited", "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef f(x): return 4"),
    "stops its parent": ("broken failed exited", "import os, signal\nos.kill(1, signal.SIGSTOP)\ndef f(x): return 4"),
    "interrupts its parent": ("broken failed exited", "import os, signal\nos.kill(1, signal.SIGINT)\ndef f(x): return 4"),
    "limits of its parent": ("broken", "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))\n" + SOLVED),
    "limits of its parent, by its number": (
        "broken",
        "import ctypes, os\nnew = (ctypes.c_uint64 * 2)(0, 0)\nassert ctypes.CDLL(None).syscall(302 if os.uname().machine == 'x86_64' else 261, 1, 0, new, 0) == 0\n" + SOLVED,
    ),
    "starves its parent": ("broken", "import os\nos.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))\n" + SOLVED),
    "interrupts its parent again and again": (
        "failed exited broken",
        "import os, signal, threading\ndef again():\n while True: os.kill(1, signal.SIGINT)\n"
        "threading.Thread(target=again, daemon=True).start()\ndef f(x): return 4",
    ),
    "reads the tester's memory": ("broken", "open('/proc/1/mem', 'rb')\n" + SOLVED),
    "reads the tester's environment": ("broken", "open('/proc/1/environ', 'rb').read()\n" + SOLVED),
    "opens the tester's files": ("broken", "import os\nos.open('/proc/1/fd/1', os.O_WRONLY)\n" + SOLVED),
    "traces the tester": ("broken", "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0\n" + SOLVED),
    "takes the tester's files": (
        "broken",
        "import ctypes, os\nassert ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 1, 0) >= 0\n" + SOLVED,
    ),
    # ending early
    "os._exit(0) when loaded": ("exited", "import os\nos._exit(0)"),
    "os._exit(0) when called": ("exited", "import os\ndef f(x): os._exit(0)"),
    "sys.exit when loaded": ("exited", "import sys\nsys.exit(0)"),
    "sys.exit when called": ("exited", "import sys\ndef f(x): sys.exit(0)"),
    "becomes another program": ("exited", "import os\ndef f(x): os.execv('/bin/true', ['true'])"),
    "deep recursion": ("failed", "def f(x): return f(x + 1)"),
    "recursion past the stack": ("exited memory", "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return repr(g(x))\n"
                                 "class A:\n def __repr__(self): return repr(self)\ndef g(x): return repr(A())"),
    "crash": ("exited", "import ctypes\ndef f(x): ctypes.string_at(0)"),
    "raises what no test expects": ("exited", "class Odd(BaseException): pass\ndef f(x): raise Odd"),
    # false words
    "prints passed": ("failed", "print('passed')\nprint('{{\"outcome\": \"passed\", \"detail\": \"\"}}')\ndef f(x): return 4"),
    "writes a verdict to every file": (
        "failed exited",
        "import os\nfor fd in range(64):\n"
        " try: os.write(fd, b'{{\"outcome\": \"passed\", \"detail\": \"\"}}\\n')\n except OSError: pass\ndef f(x): return 4",
    ),
    "writes a verdict at exit": (
        "exited",
        "import atexit, os\n@atexit.register\ndef _():\n for fd in range(64):\n"
        "  try: os.write(fd, b'{{\"outcome\": \"passed\", \"detail\": \"\"}}\\n')\n  except OSError: pass\nraise SystemExit(0)",
    ),
    "answers before it is asked": (
        "failed exited",
        "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'{{\"value\": true, \"changed\": []}}\\n' * 50)\n except OSError: pass\n"
        "def f(x): return 4",
    ),
    "answers that are no JSON": ("exited", "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'xx\\n')\n except OSError: pass"),
    "answers nested deep": (
        "exited",
        "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'[' * 60000 + b'\\n')\n except OSError: pass",
    ),
    "answer without end": (
        "exited memory",
        "import os\nfor fd in range(3, 64):\n try:\n  while True: os.write(fd, b'x' * 60000)\n except OSError: pass",
    ),
    "answer that names a built-in": (
        "exited",
        "import os\nfor fd in range(3, 64):\n"
        " try: os.write(fd, b'{{\"value\": 1, \"changed\": []}}\\n' + b'{{\"value\": [\"builtin\", \"exec\"], \"changed\": []}}\\n' * 9)\n"
        " except OSError: pass",
    ),
    # patched interpreters
    "patched assert": ("failed", "import builtins\nclass Mild(Exception):\n def __new__(c, *a): return None\n"
                       "builtins.AssertionError = Mild\nAssertionError = Mild\ndef f(x): return 4"),
    "patched built-ins": ("failed exited", "import builtins\nbuiltins.abs = builtins.len = lambda x: 0\nabs = len = lambda x: 0\ndef f(x): return 4"),
    "patched modules": (
        "timeout exited",
        "import json, os, sys\njson.dumps = lambda *a, **k: '{{\"value\": true, \"changed\": []}}'\nos.write = lambda fd, data: len(data)\n"
        "sys.modules['inside.wire'].encode = lambda *a: True\ndef f(x): return 4",
    ),
    "trace function": ("failed", "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef f(x): return 4"),
    "names of the tests": ("failed", "def check(c): pass\nEXPECTED = {{}}\nassert_ = print\ndef f(x): return 4"),
    "optimised away": ("failed", "import os, sys\nos.environ['PYTHONOPTIMIZE'] = '2'\ndef f(x): return 4"),
    # the tests' expected values
    "looks through frames and objects": (
        "failed",
        "import gc, sys\ndef f(x):\n frame = sys._getframe()\n while frame:\n  for scope in (frame.f_locals, frame.f_globals):\n"
        "   if 'EXPECTED' in scope: return scope['EXPECTED'][x]\n  frame = frame.f_back\n"
        " for o in gc.get_objects():\n  if isinstance(o, dict) and o.get(2) == 4 and o.get(7) == 49: return o[x]",
    ),
    "looks through its own memory": (
        "failed exited",
        "import re\ndef f(x):\n for line in open('/proc/self/maps'):\n  a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "  if ' rw' in line:\n   with open('/proc/self/mem', 'rb') as file:\n    file.seek(a)\n    data = file.read(b - a)\n"
        "    if re.search(rb'EXPECTED = [{{]2: 4, 7: 49', data): return x * x",
    ),
    # values that lie
    "equal to everything": ("failed", "class A:\n def __eq__(self, other): return True\ndef f(x): return A()"),
    "number equal to everything": (
        "failed",
        "class A(int):\n def __eq__(self, other): return True\n def __sub__(self, other): return self\n __hash__ = int.__hash__\n"
        "def f(x): return A(4)",
    ),
    "raises when it is compared or written": (
        "failed exited",
        "class A:\n def __str__(self): raise SystemExit\n __repr__ = __str__\n def __eq__(self, other): raise KeyboardInterrupt\n"
        " def __abs__(self): raise GeneratorExit\ndef f(x): return A()",
    ),
    "raises an error that can't be written": (
        "failed exited",
        "class E(ValueError):\n def __str__(self): raise SystemExit\n def __getattribute__(self, name): raise KeyboardInterrupt\n"
        "def f(x): raise E",
    ),
    "reckons as it likes": (
        "failed",
        "class A:\n def __getattr__(self, name): return self\n def __call__(self, *a): return True\n"
        " __eq__ = __sub__ = __rsub__ = __lt__ = lambda self, other: True\n __abs__ = lambda self: self\ndef f(x): return A()",
    ),
}  # fmt: skip
