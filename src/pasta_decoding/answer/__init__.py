"""One answer while it is written: tokens in, actions out; its sampling and its record.

Nothing here knows an engine: `scheduling` carries out the actions.
"""
