"""Everything that knows Hugging Face Transformers; the only folder that imports it."""
