"""Which data sets of reasoning-gym are graded, and by whom.

Every data set of the package brings a scorer, and some of these run what the model wrote: `eval`, or sympy's parser,
which is `eval` too. So all scorers of one version were read, and a data set is used only where its name stands here:

    THEIRS   graded by the package; its scorer compares, counts or plays moves, in time that the text bounds
    OURS     graded here: theirs runs the answer, or gives full marks to wrong ones
    REFUSED  not used, with the reason

A name in none of them, or another version of the package, is refused. Where their scorer is safe for a certain form of
answer only, FORMS says which; an answer of another form is wrong before they see it.
"""

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from unmask.tasks.puzzles.countdown import LONGEST, expression
from unmask.tasks.task import Row

VERSION = "0.1.25"
"""Of reasoning-gym, whose scorers were read."""

_SAFE = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation caesar_cipher
calendar_arithmetic chain_sum circuit_logic color_cube_rotation complex_arithmetic count_bits count_primes
course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships
fraction_simplification futoshiki game_of_life gcd group_anagrams gsm_symbolic jugs kakurasu knights_knaves
largest_island lcm leg_counting letter_counting mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid
needle_haystack number_filtering number_format number_sequence palindrome_generation palindrome_partitioning
path_star polynomial_equations power_function prime_factorization products quantum_lock rearc rectangle_count
rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations simple_geometry
sokoban string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals tower_of_hanoi
tsumego word_sequence_reversal word_sorting zebra_puzzles
"""
THEIRS = frozenset(_SAFE.split())

FORMS = {
    # "nan" is at a distance that their scorer takes for none
    "complex_arithmetic": re.compile(r"[-+()0-9.iIjJ ]{1,80}"),
    # every letter A to C of a sentence is a button, every capital L, R, U or D a move
    "quantum_lock": re.compile(r"[ABC](?:[\s→,>-]{0,5}[ABC]){0,200}", re.IGNORECASE),
    "sokoban": re.compile(r"[LRUD]{1,2000}"),
}

_RUNS = "its scorer runs the answer as a program (eval)"
_SYMPY = "its scorer runs the answer through sympy's parser, which is eval"
_UNSOLVED = "it brings no solution that a grader could be checked with"
_UNSTABLE = "the same seed gives other questions in another process, so that its splits are not kept apart"

REFUSED = {
    "boxnet": _UNSOLVED,
    "codeio": "it makes its questions by running programs that come with the data, in this process",
    "composite": "it is a mixture of the others; name one of them",
    "graph_color": _UNSOLVED,
    "intermediate_integration": _SYMPY,
    "isomorphic_strings": _UNSTABLE,
    "knight_swap": _UNSTABLE,
    "list_functions": _UNSTABLE,
    "polynomial_multiplication": _SYMPY,
    "pool_matrix": "it draws from numpy's one global stream, which it seeds anew with every question",
    "propositional_logic": "an answer with many variables keeps its scorer busy for ever, and " + _UNSOLVED,
    "ransom_note": _UNSTABLE,
    "rubiks_cube": "an answer such as R999999999 keeps its scorer busy for ever, and " + _UNSOLVED,
    "rush_hour": "an answer such as A+999999999 keeps its scorer busy for ever, and " + _UNSOLVED,
    "simple_integration": _SYMPY,
    "word_ladder": _UNSTABLE,
}

NUMBER = re.compile(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?")
LIST = re.compile(r"\[[-+0-9.'\", ]{0,4000}\]")
PROBABILITY = re.compile(r"[0-9]{1,20}(?:[./][0-9]{1,20})?")
LEADING_MINUS = re.compile(r"(^|\()\s*-")


def tidy(text: str) -> str:
    """Without blanks at the ends of lines, and with one where there are several."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def same(row: Row, answer: str) -> bool:
    return tidy(answer) == tidy(row["answer"])


def same_but_for_case(row: Row, answer: str) -> bool:
    return tidy(answer).casefold() == tidy(row["answer"]).casefold()


def one_of_the_boards(row: Row, answer: str) -> bool:
    return tidy(answer) in map(tidy, row["metadata"]["valid_answers"])


def makes(target: int, numbers: list[int], answer: str) -> bool:
    """Whether the answer is an expression of exactly these numbers with the target's value, in exact fractions.

    A minus may stand before the first number and after an opening parenthesis, as it does in some of the package's own
    solutions.
    """
    if len(answer) > LONGEST:
        return False
    text, zeros = LEADING_MINUS.subn(r"\g<1>0-", answer)
    result = expression(text)
    return result is not None and result[0] == target and Counter(result[1]) == Counter(numbers + zeros * [0])


def reaches_target(row: Row, answer: str) -> bool:
    return makes(row["metadata"]["target"], row["metadata"]["numbers"], answer)


def reaches_24(row: Row, answer: str) -> bool:
    return makes(24, row["metadata"]["numbers"], answer)


def same_numbers(row: Row, answer: str) -> bool:
    """A list of the same numbers in the same order, in quotes or not."""
    if not LIST.fullmatch(answer):
        return False
    given, gold = ([Fraction(n) for n in NUMBER.findall(text)] for text in (answer, row["answer"]))
    return given == gold


def same_probability(row: Row, answer: str) -> bool:
    """A decimal or a fraction within a thousandth of the right one."""
    if not PROBABILITY.fullmatch(answer) or re.search("/0+$", answer):
        return False
    gold = Fraction(row["answer"])
    return abs(Fraction(answer) - gold) <= gold / 1000


OURS: dict[str, Callable[[Row, str], bool]] = {
    # theirs: eval of the answer
    "binary_matrix": same,
    "n_queens": one_of_the_boards,
    "spiral_matrix": same,
    "string_insertion": same,
    # theirs: sympy's parser; and for 24 any four numbers
    "countdown": reaches_target,
    "puzzle24": reaches_24,
    # theirs: eval, but of what the data set wrote; and lists within 1 of the right one, which need not be its numbers
    "bitwise_arithmetic": same_but_for_case,
    "number_sorting": same_numbers,
    # theirs: 0 for a probability below 1/10000; and 1e999999999 keeps it busy for ever
    "coin_flip": same_probability,
    # theirs: full marks for any text
    "game_of_life_halting": same_but_for_case,
    # theirs: full marks for the right word or words with others behind
    "figlet_font": same_but_for_case,
    "letter_jumble": same_but_for_case,
    "spell_backward": same_but_for_case,
}
