"""Collectives of a step by sort: as the plan has them, and as counted on the step's jaxpr."""

from collections import defaultdict

from olmo_jax.inspect import MICROBATCHES, jaxpr
from olmo_jax.plan.communication import communication
from tests.cases import layout_of


def sizes_of(config):
    return dict(config.mesh)


def planned(config):
    """Return [collectives, bytes put in, bytes sent] of each sort, by the plan."""
    totals = defaultdict(lambda: [0, 0, 0.0])
    for each in communication(layout_of(config)):
        total = totals[each.in_loop, each.kind, each.axes, each.dtype]
        total[0] += each.count
        total[1] += each.operand_bytes
        total[2] += each.sent_bytes
    return dict(totals)


def counted(step, sizes):
    """Return the same, counted on a live jaxpr; scans count as often as they run."""
    totals = defaultdict(lambda: [0, 0, 0.0])
    for c in jaxpr.collectives(step, sizes):
        total = totals[MICROBATCHES in c.scope, c.kind, c.axes, c.dtype]
        total[0] += c.count
        total[1] += c.count * c.operand_bytes
        total[2] += c.count * jaxpr.ring_bytes(c, sizes)
    return dict(totals)
