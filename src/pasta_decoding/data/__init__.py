"""Responses on disk, and what annotates them."""
