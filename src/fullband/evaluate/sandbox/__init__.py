"""Running code that a model wrote: closed off by bubblewrap, judged by tests that it can't reach. See docs/sandbox.md for what is
guaranteed and what is not."""

from fullband.evaluate.sandbox.sandbox import Limits, Outcome, Program, Sandbox, SandboxError, SandboxResult, run_all

__all__ = ["Limits", "Outcome", "Program", "Sandbox", "SandboxError", "SandboxResult", "run_all"]
