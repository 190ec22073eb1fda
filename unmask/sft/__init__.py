"""Supervised fine-tuning with the masked diffusion loss; turning an autoregressive model into a diffusion model;
fetching small models; pre-training the embedded one. Imports training and the rooms below it.
"""
