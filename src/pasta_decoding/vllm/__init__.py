"""A logits processor for vLLM: every guided request obeys the rules of its thread."""
