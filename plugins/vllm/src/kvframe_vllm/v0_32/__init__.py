"""The adapter for vLLM 0.32."""
