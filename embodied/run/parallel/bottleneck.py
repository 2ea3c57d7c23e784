"""Names what holds a parallel run back, from shares of time. Logger process."""

from __future__ import annotations

from collections.abc import Mapping

# Shares of time that roles report, by what they mean here.
LEARNER_WAITS = "timer/learner/wait"
STREAM_WAITS = "timer/learner/stream_wait"
LIMITED = "timer/replay/limited"
SAMPLING = "timer/replay/sample"
STORING = "timer/replay/insert"
POLICY = "timer/actor/policy"

SMALL = 0.1  # Of the time: not what holds anything back.


def find_bottleneck(shares: Mapping[str, float], threads: int = 1) -> str:
    """Returns a line that names the slowest link of the chain, and why.

    The chain: env -> actor -> replay -> transfer -> learner. A link is the slowest if
    the one after it waits for it while it does not wait itself.

    Args:
      shares: by the names above; what is missing counts as zero.
      threads: that run the policy.
    """

    def share(name: str) -> float:
        return float(shares.get(name, 0.0))

    if LEARNER_WAITS in shares:  # Else there was no batch for it yet.
        waits = share(LEARNER_WAITS)
        if waits <= SMALL:
            return _line("learner", f"it waits for batches {waits:.0%} of the time")
        if share(STREAM_WAITS) <= 0.5 * waits:
            return _line(
                "transfer", f"batches are there, and the learner waits {waits:.0%}"
            )
    if share(LIMITED) < share(SAMPLING):
        return _line("replay", f"it samples {share(SAMPLING):.0%} of the time")
    if share(STORING) >= 0.5:
        return _line("replay", f"it stores steps {share(STORING):.0%} of the time")
    policy = share(POLICY) / max(1, threads)
    if policy >= 0.5:
        return _line("actor", f"the policy runs {policy:.0%} of the time")
    return _line("env", f"the policy runs only {policy:.0%} of the time")


def _line(role: str, reason: str) -> str:
    return f"{role}: {reason}"
