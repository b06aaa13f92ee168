"""What the server shows of itself: series for Prometheus, traces and logs. Only this folder imports prometheus-client
and logfire; engine and API hand over plain numbers."""
