"""The commands of `unmask`, thin: each reads its arguments, calls the library, and prints.

Heavy imports are inside the functions, so that `unmask --help` answers at once.
"""
