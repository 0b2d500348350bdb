"""An OpenAI-compatible server over one decoder, and a page to watch the threads write."""
