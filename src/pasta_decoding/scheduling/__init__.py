"""Many answers over one engine: which of their threads a forward pass advances, and the loop."""
