"""Barriers with names and limits. Two real processes meet in test_local.py."""

from olmo_jax.runtime.barrier import _message, barrier, missing_ranks

# As jaxlib 0.10.2 and 0.12.0.1 write it.
TIMED_OUT = (
    "DEADLINE_EXCEEDED: Barrier timed out. Id: save 12::0. This usually happens because a task "
    "triggered the barrier too early or too slowly. Please look at the task logs (both timed out "
    "and first task) to debug further.\n# of tasks that reached the barrier: 1/4.\nThe first task "
    "at the barrier: 0. Some timed out task names:\n3\n1\n12\n\n\nRPC: /xla.coordination."
    "CoordinationService/Barrier [type.googleapis.com/tensorflow.CoordinationServiceError='']"
)


def test_a_process_alone_passes() -> None:
    barrier("alone", 0.01)


def test_the_ranks_that_did_not_come_are_named() -> None:
    assert missing_ranks(TIMED_OUT) == [1, 3, 12]
    said = _message("save 12", 30.0, TIMED_OUT)
    assert said.startswith("barrier 'save 12': rank 1, 3 and 12 did not come within 30 s; every")


def test_a_list_that_cannot_be_read_is_no_list() -> None:
    other = TIMED_OUT.replace("Some timed out task names", "Absent")
    assert missing_ranks(other) == []
    assert "not every rank came within 30 s" in _message("save 12", 30.0, other)


def test_another_failure_is_said_as_it_is() -> None:
    said = _message("save 12", 30.0, "UNAVAILABLE: Task 1 heartbeat timeout.\nRPC: /xla")
    assert said.startswith("barrier 'save 12' failed: UNAVAILABLE: Task 1 heartbeat timeout.;")
