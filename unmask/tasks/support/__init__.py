"""What several tasks share: data files and splits, named protocols, answer extraction, composite rewards, and
processes that run somebody else's code.
"""
