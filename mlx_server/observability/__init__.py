"""Metrics for Prometheus, traces and logs. Only this folder imports prometheus-client and logfire. It imports neither
engine nor API: they hand over what is shown."""
