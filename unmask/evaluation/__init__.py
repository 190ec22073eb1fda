"""Accuracy on held-out problems: solve rates and pass@k with intervals, benchmark protocols, stored generations, step
sweeps, prompt variants. Imports config and the rooms below it.
"""
