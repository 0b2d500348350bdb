"""What is known of some runs, as numbers, pictures and one page."""
