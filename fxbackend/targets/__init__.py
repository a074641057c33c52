"""Targets: what executes a program. Only `targets/vllm` imports vllm."""

TARGETS = ("reference",)
"""What `fxbackend.convert` can make callable in this process; the engine is reached by `Converted.to_vllm`."""
