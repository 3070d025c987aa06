"""Grading: GSM8K by its official rule, MATH by math-verify within time limits, HumanEval and MBPP as programs for the sandbox."""
