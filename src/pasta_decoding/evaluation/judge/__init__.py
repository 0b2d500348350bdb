"""Judges: which of two answers to a prompt is better, with a calibrated probability."""
