"""A run on disk: its folder, saved state and resuming, metrics and trackers, health checks, recorded rollouts, and
updates that were not finite.
"""
