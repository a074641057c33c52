"""What a program is lowered to: `reference` (plain torch, the oracle) or `vllm`."""
