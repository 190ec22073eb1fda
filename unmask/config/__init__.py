"""The configuration of a training run: YAML and key=value overrides in, frozen models out, with methods and their
options by name. Everything that can be checked without a model is checked here. Imports tasks and what is below it.
"""
