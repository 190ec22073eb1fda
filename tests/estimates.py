"""LLaDA-8B as it is estimated."""

from typing import Any

from unmask.config import Config, parse_config

LLADA = "GSAI-ML/LLaDA-8B-Instruct"


def llada(**more: Any) -> Config:
    """The adapter is not merged and no step is captured, as in the first measurements."""
    shape = {"length": 256, "steps": 128, "block": 32, "cache": "dual", "mismatch": 0.0}
    rollout = {**shape, "merge_adapter": False, "graphs": False, **more.pop("rollout", {})}
    return parse_config({"model": LLADA, "task": "countdown", "method": "diffu_grpo", "compile": True, "device": "cpu",
                         "rollout": rollout, "eval": {"prompts": 1, "samples": 1}, **more})  # fmt: skip
