"""English words that make poor topics."""

from __future__ import annotations

STOP_WORDS = frozenset(
    """
    boosts defines exist imagine introduction join lay
    affects aimed allowed available compared considered focus focused given lies matter matters reality see widely
    a able about above according across actually add additional additionally after again against ago all allow
    allowed allowing allows almost along already also although always am among an and another any anyone
    anything appear appears are aren't around as ask at available away back based be became because become
    becomes becoming been before began begin begins behind being believe below best better between beyond both
    bring brings but by call called came can can't cannot case cases cause caused causes causing certain
    certainly choose clear come comes coming common commonly consider considered consists contain contains
    could couldn't course currently depend depending depends despite did didn't different difficult do does
    doesn't doing don't done down due during e.g each easier easily easy effective effectively either else
    enable enables end enough ensure ensures ensuring especially essential etc even eventually ever every
    everyone everything exactly example examples extremely fact far few finally find finding first firstly
    five follow followed following follows for found four from full fully further furthermore gave general
    generally get gets getting give given gives giving go goes going gone good got great greatly had happen
    happens has have haven't having he he's held help helped helpful helping helps hence her here here's hers
    herself high highly him himself his hold holds how however huge i i'd i'm i've i.e if important in include
    included includes including incredibly indeed instance instead into involve involved involves is isn't it
    it's its itself just keep keeping keeps kept key kind know known large last lastly later least leave left
    less let let's lets like likely little ll long longer look looking looks lot lots made main mainly major
    make makes making many may maybe me mean means meanwhile might more moreover most mostly much multiple
    must my myself near nearly necessary need needed needs neither never new next no nor not note nothing now
    number numerous obtain occur occurs of off offer offered offering offers often okay old on once one ones
    only onto or order other others otherwise our out over overall own particular particularly people per
    perhaps person play plays please popular possible potentially prevent primarily primary probably produce
    produces provide provided provides providing put quite range rather re reach really refer referred refers
    regarding related remember require required requires result resulting results right run s said same saw
    say says second secondly see seem seems seen set several she should show shows significant significantly
    similar similarly simple simply since small so some somebody someone something sometimes soon specific
    specifically start started starting starts still strong such suggest suggests sure t take taken takes
    taking tell ten than that that's the their theirs them themselves then there there's therefore these they
    they're thing things think third thirdly this those though three through throughout thus til till to
    together too took toward towards tried true try trying turn two type types typically ultimately under
    understand understanding unique unless until unto up upon us use used useful uses using usually various
    vary ve very via want was wasn't way ways we we're well went were weren't what what's whatever when
    whenever where whereas wherever whether which while who who's whole whom whose why wide widely will wish
    with within without won't worth would wouldn't yes yet you you'd you'll you're you've your yours yourself
    """.split()  # noqa: SIM905
)
WEAK_WORDS = frozenset(
    """
    ability achieve add affect aim amount approach area areas aspect aspects avoid aware build carry challenges
    change changes choice concept create created creates creating crucial day deep describe designed develop
    developed developing discuss early eat effect effects enhance enjoy entire experience explore face factor
    factors feel feeling form forms gain group grow growing growth hand hard idea impact improve improved
    improves increase increased increases increasing individual individuals introduced lead leading leads
    learn life live lived lives living located low manage managing method methods moment needs original part
    parts place point potential powerful practice present problem problems process promote quality question
    range reason reasons reduce reduces reducing role seek seeking sense serve serves situation small
    special spend stay step steps story study support supports technique techniques term terms time times
    today top topic understood value variety view vital wants watch word words work working works world write
    writing year years young
    """.split()  # noqa: SIM905
)
VERB_MARKERS = frozenset(
    "to can can't cannot could will would may might must should not don't doesn't didn't they we you it who i".split()
)
NOUNS_IN_LY = frozenset("family supply anomaly assembly reply butterfly italy july monopoly".split())
