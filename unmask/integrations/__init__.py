"""Adapters to other libraries' trainers. Nothing here is imported unless a user imports it. Imports training and the
rooms below it, not sft or studies.
"""
