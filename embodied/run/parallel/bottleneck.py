"""Finds the bottleneck of a parallel run in the metrics of roles. Logger process."""

from __future__ import annotations

from collections.abc import Mapping

# Metrics of roles, mostly shares of time, by their meaning here.
LEARNER_WAITS = "timer/learner/wait"
STREAM_WAITS = "timer/learner/stream_wait"
LIMITED = "timer/replay/limited"
SAMPLING = "timer/replay/sample"
STORING = "timer/replay/insert"
POLICY = "timer/actor/policy"
UPDATES = "parallel/updates"  # Of the learner; 0 when it has its first batch.
ON_CPU = "parallel/policy_on_cpu"  # 1 or 0.
NAMES = {
    *(LEARNER_WAITS, STREAM_WAITS, LIMITED, SAMPLING, STORING, POLICY, UPDATES),
    ON_CPU,
}

SMALL = 0.1  # Share of time that is too small to be a bottleneck.
# Phases before the learner has reported how long it waits.
FILLING, COMPILING, TRAINING = "filling the replay", "compiling", "training begins"


def find_bottleneck(values: Mapping[str, float], threads: int = 1) -> str:
    """Returns a line that names the slowest link of the chain, and why.

    The chain: env -> actor -> replay -> transfer -> learner. A link is the slowest if
    the one after it waits for it while it does not wait itself. Until the learner has
    reported how long it waits this is unknown, and the line is the phase of the run.

    Args:
      values: metrics by the names above; missing ones count as zero.
      threads: number of threads that run the policy.
    """

    def value(name: str) -> float:
        return float(values.get(name, 0.0))

    if LEARNER_WAITS not in values:
        if UPDATES not in values:
            return FILLING
        return TRAINING if value(UPDATES) else COMPILING
    waits = value(LEARNER_WAITS)
    if waits <= SMALL:
        return _line("learner", f"it waits for batches {waits:.0%} of the time")
    if value(STREAM_WAITS) <= 0.5 * waits:
        return _line(
            "transfer", f"batches are there, and the learner waits {waits:.0%}"
        )
    if value(LIMITED) < value(SAMPLING):
        return _line("replay", f"it samples {value(SAMPLING):.0%} of the time")
    if value(STORING) >= 0.5:
        return _line("replay", f"it stores steps {value(STORING):.0%} of the time")
    policy = value(POLICY) / max(1, threads)
    if policy >= 0.5:
        helps = "a larger run.actor_batch, jax.policy_beside True, or another device"
        helps += " in jax.policy_devices"
        if value(ON_CPU):
            helps = "a smaller model, or a lower run.train_ratio, since it is a CPU"
        return _line("actor", f"the policy runs {policy:.0%} of the time; try {helps}")
    return _line("env", f"the policy runs only {policy:.0%} of the time")


def _line(role: str, reason: str) -> str:
    return f"{role}: {reason}"
