"""English words that make poor topics, found in annotated answers and sorted by hand."""

from __future__ import annotations

# Never part of a topic; a phrase ends at them.
STOP_WORDS = frozenset(
    """
    a able about above according across actually add addition additional additionally affects
    after again against ago aimed all allow allowed allowing allows almost along already also
    alternatively although always am amid among an and another any anyone anything appear
    appears are aren't around as aside ask at available away back based be became because become
    becomes becoming been before began begin begins behind being believe below best better
    between beyond boosts both bring brings but by call called calls came can can't cannot case
    cases cause caused causes causing certain certainly choose clear come comes coming common
    commonly compared consider considered consists contain contains could couldn't course
    currently defines depend depending depends despite did didn't different difficult do does
    doesn't doing don't done down due during e.g each eager easier easily easy effective
    effectively either else enable enables end enough ensure ensures ensuring enters especially
    essential etc even eventually ever every everyone everything exactly example examples exist
    extremely fact far few finally find finding first firstly five focus focused follow followed
    following follows for found four from full fully further furthermore gave general generally
    get gets getting give given gives giving go goes going gone good got great greatly had
    happen happens has have haven't having he he's held hello help helped helpful helping helps
    hence her here here's hers herself high highly him himself his hold holds hosts hour hours
    how however huge i i'd i'm i've i.e if ignores imagine important in include included
    includes including incredibly indeed instance instead into introduction involve involved
    involves is isn't it it's its itself join just keep keeping keeps kept key kind know known
    large last lastly later launched lay least leave left less let let's lets lies like likely
    little ll long longer look looking looks lot lots made main mainly major make makes making
    many matter matters may maybe me mean means meanwhile merely might minutes month months more
    moreover most mostly much multiple must my myself near nearly necessary need needed needs
    neither never new next no nobody none nor not note nothing noting now number numerous obtain
    occur occurs of off offer offered offering offers often okay old on once one ones only onto
    or order other others otherwise our out over overall own particular particularly people per
    perhaps person play plays please popular possible potentially prevent primarily primary
    probably produce produces provide provided provides providing put quite range rarely rather
    re reach reality really refer referred refers regarding regardless related remember require
    required requires result resulting results right run s said same saw say says second
    secondly see seem seems seen set sets several she should show shows significant
    significantly similar similarly simple simply since small so some somebody someone something
    sometimes soon sorry specific specifically stars start started starting starts still strong
    such suggest suggests sure t take taken takes taking tell ten than that that's the their
    theirs them themselves then there there's therefore these they they're thing things think
    third thirdly this those though three through throughout thus til till to together too took
    toward towards tried true try trying turn two type types typically ultimately under
    understand understanding unique unless until unto up upon us use used useful uses using
    usually various vary ve versus very via want was wasn't way ways we we're week weeks well
    went were weren't what what's whatever when whenever where whereas wherever whether which
    while who who's whole whom whose why wide widely will wish with within without won't worth
    would wouldn't yes yet you you'd you'll you're you've your yours yourself
    """.split()  # noqa: SIM905
)

# Poor by themselves, though they may stand beside a better word.
WEAK_WORDS = frozenset(
    """
    ability accessible accurate achieve active actively actual adapt added adding address
    addressing adds adjust advance advanced affect aim align alone amazing amount anywhere
    appealing applied approach appropriate area areas argue aspect aspects associated attached
    attempt attend attract avoid aware balanced basic basis beautiful beginning believed beloved
    bigger bit broken build built capable carries carry central challenges challenging chance
    change changed changes changing checking choice choosing chosen click combination
    comfortable communicate compete complete completed comprehensive concept conduct conducted
    conducting configure connect connected connection consist constant consuming continue
    continues contribute contributing controlled correct covered covers create created creates
    creating crucial current cut dangerous day deep delightful deliver describe described
    designed desired detailed detect determine develop developed developing discover discuss
    diverse divided drive early ease eat effect effects efficient effort efforts enabled
    enabling encourage encouraged encourages engage engaged engaging enhance enhancing enjoy
    enter entire establish established everyday excellent exceptional execute existing expensive
    experience experienced experiences experiencing explore exploring exposed express extends
    extensive extra extreme face facilitate facing factor factors famous fascinating feel
    feeling fewer filled fit form formed forms forward fostering fresh front functions
    fundamental gain gained gather generate generated generating goal goals greater group grow
    growing growth half hand handle hard heavy high-quality higher hot iconic idea ideas
    identify immediate impact implement implementing improve improved improves improving
    incorporate incorporating increase increased increases increasing indicate individual
    individuals informed innovative inside inspire intended intense interact interested
    intricate introduced intuitive issue issues largest late latest lead leading leads learn
    leaves led life linked listen live lived lives living located lose low lower maintain
    maintaining majority manage managing manner massive match meet method methods modify moment
    moved moving nature nearby nice notable objective observed opportunities opportunity
    optimize original overcome owned part participate parts passed passing perceived perfect
    perform performed piece pieces place point potential powerful practice prefer prepare
    presence present presented previous prioritize problem problems process processed produced
    producing profound promote promoting protect purpose quality question quick rare read reason
    reasons receive recognize recommend recover reduce reduced reduces reducing reflect relevant
    reliable rely remarkable remove renowned replace represent represents respond responsible
    return rich rise robust role running save seek seeking select sell send sense sensitive
    serious serve served serves share sharp showcase shown sign single situation situations slow
    smaller solve sort special spend spent stand standard stay step steps story strategic study
    successful support supports technique techniques tend term terms thanks thin time times
    today top topic total traditional turning ultimate understood updated utilize valuable value
    values variety varying vibrant view visible visit visiting vital wants watch willing win won
    wonderful word words work working works world write writing year years young
    """.split()  # noqa: SIM905
)

# The word behind one of these is a verb.
VERB_MARKERS = frozenset(
    """
    can can't cannot could didn't doesn't don't i it may might must not should they to we who
    will would you
    """.split()  # noqa: SIM905
)

NOUNS_IN_LY = frozenset(
    {"family", "supply", "anomaly", "assembly", "butterfly", "italy", "july", "monopoly"}
)
ADJECTIVE_ENDINGS = ("ed", "able", "ible", "ful", "ous", "less")
