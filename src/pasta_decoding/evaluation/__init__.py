"""Measuring what parallel decoding buys and costs."""
