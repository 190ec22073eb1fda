"""Running programs that a model wrote: `run(program, tests)` gives a verdict for every test.

    from unmask import sandbox
    sandbox.run("def double(x): return 2 * x", ["assert double(2) == 4", "assert double(0) == 1"])

Two sandboxes for each program: one executes it, the other executes the tests and only ever sees plain data of it
(judge.py says how). The verdict is read here, outside, from a pipe that the program's sandbox does not have. There is
no other way to run a program: where there is no sandbox, this raises and says what to install.
"""

from unmask.sandbox.verdicts import ProgramJob, SandboxUnavailable, Verdict, description, problem, run, run_many

__all__ = ["ProgramJob", "SandboxUnavailable", "Verdict", "description", "problem", "run", "run_many"]
