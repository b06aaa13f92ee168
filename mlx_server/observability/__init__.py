"""What the server shows of itself: series for Prometheus, traces and logs. Only this folder imports prometheus-client
and logfire, and it imports neither engine nor API: they hand over what is shown."""
