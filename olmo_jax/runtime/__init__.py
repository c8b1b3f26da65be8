"""What the processes of a job need while it runs: environment, connection, barriers, watchdog."""
