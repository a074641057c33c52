"""The vLLM target: the only folder of the package that imports vllm."""
