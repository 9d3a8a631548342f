"""The catalogue: every metric that Tidegate exports, with its kind, its unit in words and its labels. Data alone.

Names begin with `tidegate_`; Ray puts `ray_` before them and `_total` behind counters. Ray makes a histogram's sum up
from its buckets, so that means come from pairs of counters. Every label takes few values; LABELS says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

OTHER = "other"
"""What a label says of all values beyond those it may take."""
TENANTS = 20
"""Tenants that a label tells apart: the first that come; the rest together are OTHER."""


class Kind(Enum):
    """COUNTER: what happened since the process began, only ever more. GAUGE: how much it is now."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


LABELS = {
    "service": "the one that the process belongs to",
    "model": "canonical names of the models in the config",
    "group": "places of a model's groups, counted from 0: a group that replaces another takes its place",
    "state": "states of a block, or standings of a group",
    "level": "rows of the ladder",
    "term": "what moves the ladder: held or growth",
    "class": "classes of requests",
    "stage": "stages of a grant",
    "reason": "codes of refusals and errors, ways to finish",
    "tenant": f"the first {TENANTS} tenants, and {OTHER}",
    "rows": "powers of two up to max_num_seqs",
}
"""label -> what keeps the number of its values small."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` are its own, behind `service`, which all have. `buckets` are a histogram's upper bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"tidegate_{name}", Kind.GAUGE, text, labels)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"tidegate_{name}", Kind.COUNTER, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"tidegate_{name}", Kind.HISTOGRAM, text, labels, buckets)


_GROUP = ("model", "group")
_REQUEST = ("model", "class")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKENS = tuple(float(2**power) for power in range(18))
_BYTES = tuple(float(2**power) for power in range(16, 41, 2))

# -- a group, by its reports -------------------------------------------------------------------------------------------

BLOCKS = _gauge("blocks", "Blocks of the pool in each state", *_GROUP, "state")
COMMITTED = _gauge("committed_blocks", "Blocks that grants and the forecast of live requests take up", *_GROUP)
OPEN_GRANTS = _gauge("group_grants", "Open grants of the group, void ones included", *_GROUP)
RUNNING = _gauge("running_requests", "Requests that hold a slot", *_GROUP)
WAITING = _gauge("waiting_requests", "Requests accepted by the group that hold no slot", *_GROUP)
WAITING_TOKENS = _gauge("waiting_tokens", "Prompt tokens of those, still to be computed", *_GROUP)
SESSIONS = _gauge("sessions", "Namespaces that have something cached", *_GROUP)
LOAD = _gauge("group_load", "The coordinator's measure of the group's load", *_GROUP)
UNUSED_SLOTS = _gauge("unused_slots", "Token slots of held blocks that hold no token", *_GROUP)
LONGEST_STEP = _gauge("longest_step_seconds", "The longest step since the report before", *_GROUP)
REPORT_AGE = _gauge("report_age_seconds", "Seconds since the group's last report", *_GROUP)
PROGRESS_AGE = _gauge("progress_age_seconds", "Seconds since the group last advanced or had nothing to do", *_GROUP)
STANDING = _gauge("group_standing", "1 for the standing that the group has, 0 for the others", *_GROUP, "state")
CLOSED = _gauge("group_closed", "1 while the group gets nothing new, by reason", *_GROUP, "reason")
PREEMPTIONS = _counter("preemptions", "Sequences that lost their blocks to others", *_GROUP)
FINISHED = _counter("group_finished_requests", "Requests that ended in the group", *_GROUP)
OUTPUT_TOKENS = _counter("output_tokens", "Tokens generated", *_GROUP)
PROMPT_TOKENS = _counter("queried_prompt_tokens", "Prompt tokens looked up in the cache, first attempts only", *_GROUP)
CACHED_TOKENS = _counter("cached_prompt_tokens", "Those of them that were there", *_GROUP)
COMPUTED_TOKENS = _counter("computed_tokens", "Tokens computed, of prompts and of output", *_GROUP)
RECOMPUTED_TOKENS = _counter("recomputed_tokens", "Tokens computed again after a preemption", *_GROUP)
LEAKED = _counter("leaked_blocks", "Blocks whose books were wrong and were set right", *_GROUP)
DROPPED_STEPS = _counter("dropped_steps", "Steps that no rank ran because one had no memory for it", *_GROUP)
EVICTED = _counter("evicted_blocks", "Cached blocks that gave way to others before they expired", *_GROUP)
EXPIRED = _counter("expired_blocks", "Cached blocks whose time was up", *_GROUP)
EXPIRED_ASKED = _counter("expired_asked_tokens", "Prompt tokens that would have hit had they not expired", *_GROUP)
LOST_TO_SCOPE = _counter("lost_to_scope_tokens", "Prompt tokens that another namespace had cached", *_GROUP)
RESTARTS = _counter("group_restarts", "How often a group was built anew", *_GROUP)
STEPS = _counter("steps", "Steps by their number of sequences, rounded up to a power of two", *_GROUP, "rows")
STEP_SECONDS = _counter("step_seconds", "Seconds of those steps", *_GROUP, "rows")
STEP_SAMPLED = _counter("step_sampled_tokens", "Tokens sampled in those steps", *_GROUP, "rows")
STEP_COMPUTED = _counter("step_computed_tokens", "Tokens computed in those steps", *_GROUP, "rows")
PEAK_BYTES = _histogram("request_peak_kv_bytes", "Most KV bytes that a request held at a time", _BYTES, "model")

# -- the ladder --------------------------------------------------------------------------------------------------------

LEVEL = _gauge("level", "Row of the ladder: 0 normal, 1 trim, 2 shrink, 3 compact, 4 refuse", *_GROUP)
LEVEL_SECONDS = _counter("level_seconds", "Seconds spent on each level", *_GROUP, "level")
LEVEL_CHANGES = _counter("level_changes", "Moves from one level to the next", *_GROUP)
DRIVE = _gauge(
    "level_drive", "What moves the ladder: blocks held, and growth that is to come, as shares", *_GROUP, "term"
)

# -- the coordinator ---------------------------------------------------------------------------------------------------

LINE_REQUESTS = _gauge("line_requests", "Requests that stand in the line", "model", "class")
LINE_TOKENS = _gauge("line_tokens", "Their tokens, expected output included", "model", "class")
LINE_AGE = _gauge("line_oldest_seconds", "How long the oldest of them has waited", "model", "class")
LINE_MEDIAN = _gauge("line_median_seconds", "How long the one in the middle of them has waited", "model", "class")
LINE_SERVED = _counter("line_served", "Requests that got a grant after they had waited", "model", "class")
LINE_WAITED = _counter("line_waited_seconds", "What those had waited, added up", "model", "class")
LINE_FULL = _gauge("line_full", "1 while the line takes no further request", "model")
LINE_TENANTS = _gauge("line_tenants", "Tenants that have a request in the line", "model")
LINE_TENANT = _gauge("line_tenant_requests", "Requests of a tenant that stand in the line", "model", "tenant")
GROUPS = _gauge("groups", "Groups of the model by standing", "model", "state")
DRAIN_RATE = _gauge("drained_tokens_per_second", "How fast the model's work drains", "model")
OUTPUT_SHARE = _gauge("expected_output_share", "The share of max_tokens that requests are expected to use", "model")
OUTPUT_EXPECTED = _gauge("expected_output_tokens", "Tokens that an output is expected to have", "model")
INGRESSES = _gauge("ingresses", "Ingress replicas that the coordinator knows")
AFFINITIES = _gauge("affinities", "Likenesses of requests that are remembered with their group")
BEAT = _gauge("report_period_seconds", "Seconds between two reports of a group, as the coordinator asks for them")
GRANTS = _gauge("grants", "Open grants by stage", "stage")
GRANTED = _counter("grants_given", "Grants given")
REFUSED = _counter("refusals", "Requests that the coordinator refused", "reason")

# -- an ingress --------------------------------------------------------------------------------------------------------

QUEUE = _histogram("queue_seconds", "From arrival until a group took the request", _SECONDS, *_REQUEST)
TTFT = _histogram("ttft_seconds", "From arrival to the first token", _SECONDS, *_REQUEST)
INTER_TOKEN = _histogram("inter_token_seconds", "Seconds per token after the first", _STEPS, *_REQUEST)
E2E = _histogram("e2e_seconds", "From arrival to the end", _SECONDS, *_REQUEST)
PROMPT_LENGTH = _histogram("prompt_length_tokens", "Tokens of a prompt", _TOKENS, *_REQUEST)
OUTPUT_LENGTH = _histogram("output_length_tokens", "Tokens of an output", _TOKENS, *_REQUEST)
ENDED = _counter("requests", "Requests that ended, by how", *_REQUEST, "tenant", "reason")
TENANT_PROMPT = _counter("tenant_prompt_tokens", "Prompt tokens of ended requests", "model", "tenant")
TENANT_CACHED = _counter("tenant_cached_tokens", "Those of them that came from the cache", "model", "tenant")
TENANT_OUTPUT = _counter("tenant_output_tokens", "Tokens that clients were sent", "model", "tenant")
FIRST_TOKENS = _counter("first_tokens", "Requests that got a first token", "model", "tenant")
TTFT_TOTAL = _counter("first_token_wait_seconds", "What those waited for it, added up", "model", "tenant")
REPLAYS = _counter("replays", "Attempts that a group took after an earlier one was lost", "model")
DEATHS = _counter("request_group_deaths", "Deaths of groups, counted by each request that ran there", "model")
POISONED = _counter("poisoned_requests", "Requests given up because groups die of them", "model")

CATALOGUE: dict[str, Metric] = {
    metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)
}
"""All of them by name."""


class Bounded:
    """The first `most` values that come, and OTHER for all that come after."""

    def __init__(self, most: int = TENANTS) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def __call__(self, value: str) -> str:
        """`value`, or OTHER."""
        known = self._known.get(value)
        if known is None:
            if len(self._known) >= self._most:
                return OTHER
            known = self._known[value] = value
        return known
