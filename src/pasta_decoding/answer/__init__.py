"""One answer while it is written: tokens in, actions out; its sampling and its record. Pure."""
