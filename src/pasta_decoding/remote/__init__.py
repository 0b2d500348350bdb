"""Answers from servers of completions: client, driver, decoder."""
