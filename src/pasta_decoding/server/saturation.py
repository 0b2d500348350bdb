"""Which answers may write in parallel: threads are worth their price while there is room for them.

A step of two threads costs less than two steps of one, so an answer alone gains from its threads.
Where many answers are written together, steps are wide without them; what they add then is tags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pasta_decoding.runtime.request import Request
from pasta_decoding.server.backend import Ask, Load


@dataclass(frozen=True, slots=True)
class Saturation:
    """The policy. It looks at how much there is to do when an answer begins, and only then.

    parallel_up_to: answers under way, those that wait included, beyond which one that begins has
        its promises banned; None sets no limit.
    """

    parallel_up_to: int | None = None

    def request(self, ask: Ask, request: Request, load: Load) -> Request:
        """Return `request` as it is to be written. `load` counts it, too."""
        under_way = load.running + load.waiting
        has_room = self.parallel_up_to is None or under_way <= self.parallel_up_to
        if ask.insists or not request.rules.parallel or has_room:
            return request
        return replace(request, rules=replace(request.rules, parallel=False))
