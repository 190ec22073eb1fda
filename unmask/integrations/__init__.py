"""The parts inside other people's trainers. Nothing here is imported unless it is asked for by name. Imports
training and what is below it, not sft or studies.
"""
