"""Running programs that a model wrote: `run(program, tests)` gives a verdict for every test.

    from unmask import sandbox
    sandbox.run("def double(x): return 2 * x", ["assert double(2) == 4", "assert double(0) == 1"])

Each program gets two sandboxes: one executes it, the other executes the tests and receives only plain data from it
(judge.py). The verdict is read outside, from a pipe that the program's sandbox does not have. Without a sandbox no
program runs: `run` raises SandboxUnavailable, which says what to install. Imports util only.
"""

from unmask.sandbox.verdicts import ProgramJob, SandboxUnavailable, Verdict, description, problem, run, run_many

__all__ = ["ProgramJob", "SandboxUnavailable", "Verdict", "description", "problem", "run", "run_many"]
