"""How many examples a law gets whose examples cost much: few by default, more in `make check`."""

from hypothesis import settings


def few(count: int) -> settings:
    """Return settings of `count` examples; of four times as many in the profile `thorough`."""
    thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=4 * count if thorough else count, deadline=None)
