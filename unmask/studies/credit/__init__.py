"""The true credit of denoising steps, V(s_{t+1}) - V(s_t), and how well credit rules agree with it (`unmask audit
--credit`, `unmask bench credit`). Imports training and the rooms below.
"""
