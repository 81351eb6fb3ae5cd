"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Machines are slow at times, and no test is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
