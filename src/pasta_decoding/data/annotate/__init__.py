"""Annotators: each turns a plain response into one with promises, in text form."""
