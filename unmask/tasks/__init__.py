"""The tasks by name: TASKS["sudoku"](holes=(9, 12)) makes a Task. The options are the arguments of the class.

puzzles/ has the generated tasks of the embedded model, benchmarks/ the tasks of papers, support/ their shared code,
own.py a user's task in a Python file, and scoring.py computes rewards. Imports models and sandbox, not config.
"""

from collections.abc import Callable

from unmask.tasks import own
from unmask.tasks.benchmarks.gsm8k import Gsm8k
from unmask.tasks.benchmarks.humaneval import HumanEval
from unmask.tasks.benchmarks.json_schema import JsonSchema
from unmask.tasks.benchmarks.math500 import Math500
from unmask.tasks.benchmarks.mbpp import Mbpp
from unmask.tasks.benchmarks.multiple_choice import MultipleChoice
from unmask.tasks.benchmarks.reasoning_gym import ReasoningGym
from unmask.tasks.benchmarks.text_countdown import CountdownText
from unmask.tasks.benchmarks.text_sudoku import SudokuText
from unmask.tasks.benchmarks.word_problems import WordProblems
from unmask.tasks.puzzles.arithmetic import Arithmetic
from unmask.tasks.puzzles.code_mini import CodeMini
from unmask.tasks.puzzles.countdown import Countdown
from unmask.tasks.puzzles.json_mini import JsonMini
from unmask.tasks.puzzles.sudoku import Sudoku, SudokuLarge
from unmask.tasks.support.data import hub_rows
from unmask.tasks.task import Row, Task

TASKS: dict[str, Callable[..., Task]] = {
    "sudoku": Sudoku,
    "sudoku_large": SudokuLarge,
    "countdown": Countdown,
    "gsm8k": Gsm8k,
    "math500": Math500,
    "humaneval": HumanEval,
    "mbpp": Mbpp,
    "countdown_text": CountdownText,
    "sudoku_text": SudokuText,
    "word_problems": WordProblems,
    "json_schema": JsonSchema,
    "json_mini": JsonMini,
    "arithmetic": Arithmetic,
    "code_mini": CodeMini,
    "multiple_choice": MultipleChoice,
    "reasoning_gym": ReasoningGym,
    "own": own.task,
}

__all__ = ["TASKS", "Row", "Task", "hub_rows"]
