"""Code that several tasks share: data files, splits, protocols, answer extraction, d1's rewards, and processes that
run untrusted code.
"""
