"""The programs that run inside the sandbox: the tester, and the solution it questions.

They import nothing but the standard library and each other (relatively: the folder is mounted alone, without the package around it).

    host ── job ──> tester ── source, then questions ──> solution
    host <─ verdict ─ tester <─ values ──────────────── solution

The tests run in the tester and the solution in another process, which never sees the tests, their expected values, or the pipe of the
verdict. So nothing the solution does to its own interpreter (patched builtins, `os._exit`, frames, ctypes) can make a test pass: all it
can do is answer questions with values.
"""
