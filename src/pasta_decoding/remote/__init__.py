"""Answers from servers of completions: client, replicas, driver, decoder."""
