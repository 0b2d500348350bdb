"""The front door: what `import pasta_decoding` offers, and what every command loads by."""
