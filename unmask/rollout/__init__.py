"""From prompts to traces: the sampler, its passes through the model, caches, branches and decoding settings. Imports
models and the rooms below it.
"""
