"""The data sets of reasoning-gym that are graded, and their graders.

Every data set of the package has a scorer. Some scorers run the answer: with `eval`, or with sympy's parser, which uses
`eval`. We read all scorers of one version and use a data set only if its name is listed here:

    PACKAGE  graded by the package; its scorer compares, counts or plays moves, in time that the text bounds
    OURS     graded here: the package's scorer runs the answer, or gives full marks to wrong ones
    REFUSED  not used, with the reason

A name in none of them, or another version of the package, is refused. If the package's scorer is safe only for a
certain form of answer, FORMS has it; an answer of another form is wrong.
"""

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from unmask.tasks.puzzles.countdown import LONGEST, expression
from unmask.tasks.task import Row

VERSION = "0.1.25"
"""The version of reasoning-gym whose scorers were read."""

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
PACKAGE = frozenset(_SAFE.split())

FORMS = {
    # the package's scorer accepts "nan"
    "complex_arithmetic": re.compile(r"[-+()0-9.iIjJ ]{1,80}"),
    # the package's scorers read every letter A to C of a sentence as a button, every capital L, R, U or D as a move
    "quantum_lock": re.compile(r"[ABC](?:[\s→,>-]{0,5}[ABC]){0,200}", re.IGNORECASE),
    "sokoban": re.compile(r"[LRUD]{1,2000}"),
}

_SYMPY = "its scorer runs the answer through sympy's parser, which uses eval"
_UNSOLVED = "it has no solution to check a grader with"
_UNSTABLE = "the same seed gives other questions in another process, so its splits are not separate"

REFUSED = {
    "boxnet": _UNSOLVED,
    "codeio": "it makes its questions by running the programs of its data in this process",
    "composite": "it is a mixture of the others; name one of them",
    "graph_color": _UNSOLVED,
    "intermediate_integration": _SYMPY,
    "isomorphic_strings": _UNSTABLE,
    "knight_swap": _UNSTABLE,
    "list_functions": _UNSTABLE,
    "polynomial_multiplication": _SYMPY,
    "pool_matrix": "it draws from numpy's global generator, which it seeds again with every question",
    "propositional_logic": "its scorer does not finish for an answer with many variables, and " + _UNSOLVED,
    "ransom_note": _UNSTABLE,
    "rubiks_cube": "its scorer does not finish for an answer such as R999999999, and " + _UNSOLVED,
    "rush_hour": "its scorer does not finish for an answer such as A+999999999, and " + _UNSOLVED,
    "simple_integration": _SYMPY,
    "word_ladder": _UNSTABLE,
}

NUMBER = re.compile(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?")
LIST = re.compile(r"\[[-+0-9.'\", ]{0,4000}\]")
PROBABILITY = re.compile(r"[0-9]{1,20}(?:[./][0-9]{1,20})?")
LEADING_MINUS = re.compile(r"(^|\()\s*-")


def tidy(text: str) -> str:
    """Without spaces at the ends of lines and without repeated spaces."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def same(row: Row, answer: str) -> bool:
    return tidy(answer) == tidy(row["answer"])


def same_but_for_case(row: Row, answer: str) -> bool:
    return tidy(answer).casefold() == tidy(row["answer"]).casefold()


def one_of_the_boards(row: Row, answer: str) -> bool:
    return tidy(answer) in map(tidy, row["metadata"]["valid_answers"])


def makes(target: int, numbers: list[int], answer: str) -> bool:
    """Whether the answer is an expression of exactly these numbers with the target's value, in exact fractions.

    A minus before the first number or after an opening parenthesis is allowed: some of the package's solutions have it.
    """
    if len(answer) > LONGEST:
        return False
    text, zeros = LEADING_MINUS.subn(r"\g<1>0-", answer)
    result = expression(text)
    return result is not None and result[0] == target and Counter(result[1]) == Counter(numbers + zeros * [0])


def same_numbers(row: Row, answer: str) -> bool:
    """A list of the same numbers in the same order, in quotes or not."""
    if not LIST.fullmatch(answer):
        return False
    given, gold = ([Fraction(n) for n in NUMBER.findall(text)] for text in (answer, row["answer"]))
    return given == gold


def same_probability(row: Row, answer: str) -> bool:
    """A decimal or a fraction within a thousandth of the correct one."""
    if not PROBABILITY.fullmatch(answer) or re.search("/0+$", answer):
        return False
    gold = Fraction(row["answer"])
    return abs(Fraction(answer) - gold) <= gold / 1000


OURS: dict[str, Callable[[Row, str], bool]] = {
    # the package's scorers run eval on the answer
    "binary_matrix": same,
    "n_queens": one_of_the_boards,
    "spiral_matrix": same,
    "string_insertion": same,
    # they run sympy's parser; and puzzle24's accepts any four numbers
    "countdown": lambda row, answer: makes(row["metadata"]["target"], row["metadata"]["numbers"], answer),
    "puzzle24": lambda row, answer: makes(24, row["metadata"]["numbers"], answer),
    # they run eval on the data set's text, and accept lists whose numbers differ by up to 1
    "bitwise_arithmetic": same_but_for_case,
    "number_sorting": same_numbers,
    # it gives 0 for a probability below 1/10000, and does not finish for 1e999999999
    "coin_flip": same_probability,
    # it gives full marks for any text
    "game_of_life_halting": same_but_for_case,
    # they give full marks for the right words followed by others
    "figlet_font": same_but_for_case,
    "letter_jumble": same_but_for_case,
    "spell_backward": same_but_for_case,
}
